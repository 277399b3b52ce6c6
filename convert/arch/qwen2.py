"""Qwen2ForCausalLM (Qwen2, Qwen2.5, R1-Distill-Qwen) as architecture `qwen2`."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Tensor
from .blocks import add_attention, add_ffn
from .common import (
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
    refuse_sliding_window,
    require_silu,
)


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen2 model."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    require_silu(config)
    refuse_sliding_window(config)
    result = Metadata(Arch.QWEN2)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    return result


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Qwen2 model from its checkpoint."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    n_ff = config.integer("intermediate_size")
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,))
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block in range(dims.n_layer):
        prefix = f"model.layers.{block}"
        for name, part in (
            (Tensor.ATTN_NORM, "input_layernorm"),
            (Tensor.FFN_NORM, "post_attention_layernorm"),
        ):
            inventory.add(of_block(name, block), f"{prefix}.{part}.weight", (dims.n_embd,))
        add_attention(inventory, dims, block, prefix)
        add_ffn(inventory, dims.n_embd, n_ff, block, f"{prefix}.mlp")
    return inventory.finish()
