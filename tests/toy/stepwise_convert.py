"""Converter of the made-up drafter: StepwiseForCausalLM as architecture `stepwise`."""

from __future__ import annotations

from dflash_gguf.convert.arch.blocks import add_attention, add_ffn
from dflash_gguf.convert.arch.common import (
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
)
from dflash_gguf.convert.checkpoint import Checkpoint
from dflash_gguf.convert.plan import Metadata, TensorPlan
from dflash_gguf.convert.schema import Key, Tensor


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    result = Metadata("stepwise")
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    result.uint32(Key.BLOCK_SIZE, config.integer("block_size"))
    return result


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    inventory, n = Inventory(checkpoint), dims.n_embd
    inventory.add(Tensor.FC, "fc.weight", (n, 2 * n))
    for tensor, name in (
        (Tensor.ENC_OUTPUT_NORM, "hidden_norm.weight"),
        (Tensor.OUTPUT_NORM, "norm.weight"),
        (of_block(Tensor.ATTN_NORM, 0), "layer.input_norm.weight"),
        (of_block(Tensor.FFN_NORM, 0), "layer.mlp_norm.weight"),
    ):
        inventory.add(tensor, name, (n,))
    add_attention(inventory, dims, 0, "layer")
    add_ffn(inventory, n, config.integer("intermediate_size"), 0, "layer.mlp")
    return inventory.finish()
