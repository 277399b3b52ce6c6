"""LlamaForCausalLM (Llama 2 and 3, SmolLM2) as architecture `llama`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .common import (
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    llama3_rope_factors,
    of_block,
    permutation,
    require_silu,
)


def rope_permutation(n_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Returns the row order that maps rope pairs (j, j + d/2) to neighbours (2j, 2j + 1).

    Hugging Face rotates halves, architecture `llama` rotates neighbours (ggml's NORM rope).
    """
    return permutation(
        n_heads * head_dim,
        n_heads,
        lambda rows: rows.reshape(n_heads, 2, head_dim // 2).swapaxes(1, 2),
    )


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Llama model."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    require_silu(config)
    result = Metadata(Arch.LLAMA)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config, also=("llama3",))
    result.uint32(Key.VOCAB_SIZE, dims.n_vocab)
    result.uint32(Key.ROPE_DIMENSION_COUNT, dims.head_dim)
    return result


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Llama model from its checkpoint."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    n_embd, n_ff = dims.n_embd, config.integer("intermediate_size")
    q, kv = dims.n_head * dims.head_dim, dims.n_head_kv * dims.head_dim
    q_rows = rope_permutation(dims.n_head, dims.head_dim)
    k_rows = rope_permutation(dims.n_head_kv, dims.head_dim)
    inventory = Inventory(checkpoint)
    factors = llama3_rope_factors(config, dims.head_dim)
    if factors is not None:
        inventory.add_values(Tensor.ROPE_FREQS, factors)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (n_embd,))
    inventory.add_head(n_embd, dims.n_vocab, config)
    linear = (
        (Tensor.ATTN_Q, Tensor.ATTN_Q_BIAS, "self_attn.q_proj", q, n_embd, q_rows),
        (Tensor.ATTN_K, Tensor.ATTN_K_BIAS, "self_attn.k_proj", kv, n_embd, k_rows),
        (Tensor.ATTN_V, Tensor.ATTN_V_BIAS, "self_attn.v_proj", kv, n_embd, None),
        (Tensor.ATTN_OUTPUT, Tensor.ATTN_OUTPUT_BIAS, "self_attn.o_proj", n_embd, q, None),
        (Tensor.FFN_GATE, Tensor.FFN_GATE_BIAS, "mlp.gate_proj", n_ff, n_embd, None),
        (Tensor.FFN_UP, Tensor.FFN_UP_BIAS, "mlp.up_proj", n_ff, n_embd, None),
        (Tensor.FFN_DOWN, Tensor.FFN_DOWN_BIAS, "mlp.down_proj", n_embd, n_ff, None),
    )
    for block in range(dims.n_layer):
        prefix = f"model.layers.{block}"
        norms = (
            (Tensor.ATTN_NORM, "input_layernorm"),
            (Tensor.FFN_NORM, "post_attention_layernorm"),
        )
        for name, part in norms:
            inventory.add(of_block(name, block), f"{prefix}.{part}.weight", (n_embd,))
        for weight, bias, part, n_out, n_in, rows in linear:
            source = f"{prefix}.{part}"
            inventory.add(of_block(weight, block), f"{source}.weight", (n_out, n_in), rows=rows)
            # A bias is stored as one row, so the row order of its weight applies to its columns.
            inventory.add_optional(of_block(bias, block), f"{source}.bias", (n_out,), columns=rows)
    return inventory.finish()
