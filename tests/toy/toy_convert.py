"""Converter of the made-up architecture: ToyForCausalLM as architecture `toy`."""

from __future__ import annotations

import numpy as np
from dflash_gguf.convert.arch.common import (
    Dims,
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
)
from dflash_gguf.convert.checkpoint import Checkpoint, Config
from dflash_gguf.convert.plan import Metadata, TensorPlan
from dflash_gguf.convert.schema import Key, Tensor

ARCH = "toy"


def slides(block: int) -> bool:
    """True if the layer has a sliding window: two of three layers."""
    return block % 3 != 2


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    result = Metadata(ARCH)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    small = config.integer("sliding_head_dim")
    result.uint32(Key.ATTENTION_SLIDING_WINDOW, config.integer("sliding_window"))
    result.uint32(Key.ATTENTION_KEY_LENGTH_SWA, small)
    result.uint32(Key.ATTENTION_VALUE_LENGTH_SWA, small)
    result.uint32(Key.ROPE_DIMENSION_COUNT, dims.head_dim)
    result.uint32(Key.ROPE_DIMENSION_COUNT_SWA, small)
    result.float32(Key.ROPE_FREQ_BASE_SWA, config.number("sliding_rope_theta"))
    result.float32(Key.ATTENTION_SCALE, config.number("attention_scale"))
    result.float32(Key.EMBEDDING_SCALE, config.number("embedding_scale"))
    result.float32(Key.LOGIT_SCALE, config.number("logit_scale"))
    result.float32(Key.FINAL_LOGIT_SOFTCAPPING, config.number("softcap"))
    return result


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,))
    factors = np.asarray(config.get("rope_factors"), dtype=np.float32)
    inventory.add_values(Tensor.ROPE_FREQS, factors)
    for block in range(dims.n_layer):
        _add_block(inventory, config, dims, block)
    return inventory.finish()


def _add_block(inventory: Inventory, config: Config, dims: Dims, block: int) -> None:
    prefix, n_ff = f"model.layers.{block}", config.integer("intermediate_size")
    head = config.integer("sliding_head_dim") if slides(block) else dims.head_dim
    q, kv, n = dims.n_head * head, dims.n_head_kv * head, dims.n_embd
    for name, part, shape in (
        (Tensor.ATTN_NORM, "input_norm.weight", (n,)),
        (Tensor.POST_ATTENTION_NORM, "post_attention_norm.weight", (n,)),
        (Tensor.FFN_NORM, "pre_mlp_norm.weight", (n,)),
        (Tensor.POST_FFW_NORM, "post_mlp_norm.weight", (n,)),
        (Tensor.LAYER_OUTPUT_SCALE, "scale", (1,)),
        (Tensor.ATTN_Q_NORM, "attention.q_norm.weight", (head,)),
        (Tensor.ATTN_K_NORM, "attention.k_norm.weight", (head,)),
        (Tensor.ATTN_SINKS, "attention.sinks", (dims.n_head,)),
        (Tensor.ATTN_Q, "attention.q.weight", (q, n)),
        (Tensor.ATTN_Q_BIAS, "attention.q.bias", (q,)),
        (Tensor.ATTN_K, "attention.k.weight", (kv, n)),
        (Tensor.ATTN_K_BIAS, "attention.k.bias", (kv,)),
        (Tensor.ATTN_OUTPUT, "attention.output.weight", (n, q)),
        (Tensor.ATTN_OUTPUT_BIAS, "attention.output.bias", (n,)),
        (Tensor.FFN_GATE, "mlp.gate.weight", (n_ff, n)),
        (Tensor.FFN_UP, "mlp.up.weight", (n_ff, n)),
        (Tensor.FFN_DOWN, "mlp.down.weight", (n, n_ff)),
    ):
        inventory.add(of_block(name, block), f"{prefix}.{part}", shape)
    if slides(block):
        inventory.add(of_block(Tensor.ATTN_V, block), f"{prefix}.attention.v.weight", (kv, n))
        inventory.add(of_block(Tensor.ATTN_V_BIAS, block), f"{prefix}.attention.v.bias", (kv,))
