"""Qwen3ForCausalLM as architecture `qwen3`."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Tensor
from .blocks import add_attention, add_ffn
from .common import (
    Dims,
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
    refuse_sliding_window,
    require_silu,
)

DEFAULT_HEAD_DIM = 128  # default head_dim of transformers' Qwen3Config


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen3 model."""
    config, dims = checkpoint.config, dims_of(checkpoint.config, DEFAULT_HEAD_DIM)
    require_silu(config)
    refuse_sliding_window(config)
    result = Metadata(Arch.QWEN3)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    return result


def add_attention_and_norms(inventory: Inventory, dims: Dims, block: int) -> None:
    """Plans the attention and norm tensors of a block, also for mixtures of experts."""
    prefix = f"model.layers.{block}"
    for name, part, size in (
        (Tensor.ATTN_NORM, "input_layernorm", dims.n_embd),
        (Tensor.FFN_NORM, "post_attention_layernorm", dims.n_embd),
        (Tensor.ATTN_Q_NORM, "self_attn.q_norm", dims.head_dim),
        (Tensor.ATTN_K_NORM, "self_attn.k_norm", dims.head_dim),
    ):
        inventory.add(of_block(name, block), f"{prefix}.{part}.weight", (size,))
    add_attention(inventory, dims, block, prefix)


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Qwen3 model from its checkpoint."""
    config, dims = checkpoint.config, dims_of(checkpoint.config, DEFAULT_HEAD_DIM)
    n_ff = config.integer("intermediate_size")
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,))
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block in range(dims.n_layer):
        add_attention_and_norms(inventory, dims, block)
        add_ffn(inventory, dims.n_embd, n_ff, block, f"model.layers.{block}.mlp")
    return inventory.finish()
