"""Plans attention and feed-forward tensors of GGUF files, alike in several architectures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ConvertError
from ..schema import Tensor
from .common import Dims, Inventory, of_block


def add_attention(
    inventory: Inventory,
    dims: Dims,
    block: int,
    prefix: str,
    *,
    q_factor: int = 1,
    q_rows: NDArray[np.int64] | None = None,
    k_rows: NDArray[np.int64] | None = None,
    optional_k: bool = False,
    optional_v: bool = False,
) -> None:
    """Plans the tensors of a block's Q, K, V and output projections, with biases if present.

    q_factor: 2 if Q holds a gate beside the query. q_rows, k_rows: GGUF order of Q's, K's rows.
    optional_k, optional_v: the checkpoint may lack the projection.
    """
    q, kv = dims.n_head * dims.head_dim, dims.n_head_kv * dims.head_dim
    for part, weight, bias, size, rows in (
        ("q_proj", Tensor.ATTN_Q, Tensor.ATTN_Q_BIAS, q_factor * q, q_rows),
        ("k_proj", Tensor.ATTN_K, Tensor.ATTN_K_BIAS, kv, k_rows),
        ("v_proj", Tensor.ATTN_V, Tensor.ATTN_V_BIAS, kv, None),
    ):
        source = f"{prefix}.self_attn.{part}"
        optional = {"k_proj": optional_k, "v_proj": optional_v}.get(part, False)
        add = inventory.add_optional if optional else inventory.add
        add(of_block(weight, block), f"{source}.weight", (size, dims.n_embd), rows=rows)
        # A bias is stored as one row, so the row order of its weight applies to its columns.
        inventory.add_optional(of_block(bias, block), f"{source}.bias", (size,), columns=rows)
    output = of_block(Tensor.ATTN_OUTPUT, block)
    inventory.add(output, f"{prefix}.self_attn.o_proj.weight", (dims.n_embd, q))
    output_bias = of_block(Tensor.ATTN_OUTPUT_BIAS, block)
    inventory.add_optional(output_bias, f"{prefix}.self_attn.o_proj.bias", (dims.n_embd,))


def add_ffn(inventory: Inventory, n_embd: int, n_ff: int, block: int, prefix: str) -> None:
    """Plans the gate, up and down projections of a block's dense feed-forward network."""
    inventory.add(of_block(Tensor.FFN_GATE, block), f"{prefix}.gate_proj.weight", (n_ff, n_embd))
    inventory.add(of_block(Tensor.FFN_UP, block), f"{prefix}.up_proj.weight", (n_ff, n_embd))
    inventory.add(of_block(Tensor.FFN_DOWN, block), f"{prefix}.down_proj.weight", (n_embd, n_ff))


def add_experts(
    inventory: Inventory, n_embd: int, n_ff: int, n_experts: int, block: int, prefix: str
) -> None:
    """Plans expert tensors from weights per expert, or 3-D ones that join gate, then up."""
    fused = f"{prefix}.gate_up_proj"
    gate = of_block(Tensor.FFN_GATE_EXPS, block)
    up = of_block(Tensor.FFN_UP_EXPS, block)
    down = of_block(Tensor.FFN_DOWN_EXPS, block)
    if fused in inventory.checkpoint:
        both = inventory.view(fused, (n_experts, 2 * n_ff, n_embd))
        shape = (n_experts, n_ff, n_embd)
        inventory.add_parts(gate, shape, [expert[:n_ff] for expert in both], [fused])
        inventory.add_parts(up, shape, [expert[n_ff:] for expert in both], [fused])
        inventory.add(down, f"{prefix}.down_proj", (n_experts, n_embd, n_ff))
        return
    for name, part, rows, columns in (
        (gate, "gate_proj", n_ff, n_embd),
        (up, "up_proj", n_ff, n_embd),
        (down, "down_proj", n_embd, n_ff),
    ):
        sources = [f"{prefix}.{expert}.{part}.weight" for expert in range(n_experts)]
        views = [inventory.view(source, (rows, columns)) for source in sources]
        if len({view.dtype for view in views}) > 1:
            raise ConvertError(
                f"{inventory.checkpoint.directory}: the experts of {prefix}.{part} differ in "
                "dtype, which must be the same"
            )
        inventory.add_parts(name, (n_experts, rows, columns), views, sources)
