"""Computes Qwen3.5's Gated DeltaNet in a form that trains several times faster on a CPU.

transformers' fallback loops over the rows of every chunk in Python. Here a chunk of 64 tokens takes
one triangular solve, and the convolution is a sum of shifted inputs. Computing the inverse as a
product of powers would be faster, but loses all precision if keys are similar. Source:
transformers, modeling_qwen3_5.py, torch_chunk_gated_delta_rule and causal_conv1d_fn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 64


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the delta rule over whole sequences; replaces torch_chunk_gated_delta_rule.

    query, key: [batch, tokens, heads, d_key]; value: [batch, tokens, heads, d_value]; g (log decay,
    at most 0) and beta: [batch, tokens, heads]. Returns the outputs in the shape of value and, if
    asked for, the last state [batch, heads, d_key, d_value].
    """
    kind, n_tokens = query.dtype, query.shape[1]
    if use_qk_l2norm_in_kernel:
        query = modeling_qwen3_5.l2norm(query.float())
        key = modeling_qwen3_5.l2norm(key.float())
    pad = -n_tokens % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """Reshapes [batch, tokens, heads, d] to float32 [batch * heads, chunks, CHUNK, d]."""
        x = F.pad(x.float().transpose(1, 2), (0, 0, 0, pad))
        return x.reshape(x.shape[0] * x.shape[1], -1, CHUNK, x.shape[-1])

    q, k, v = chunks(query) * query.shape[-1] ** -0.5, chunks(key), chunks(value)
    b, decay = chunks(beta[..., None]), chunks(g[..., None]).cumsum(-2)
    between = (decay - decay.transpose(-1, -2)).tril().exp().tril()
    grown = decay.exp()
    lower = (((k * b) @ k.transpose(-1, -2)) * between).tril(-1)
    fresh, seen = torch.linalg.solve_triangular(
        lower, torch.cat([v * b, k * b * grown], -1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    reach = q * grown
    last = decay[..., -1:, :]
    left = (k * (last - decay).exp()).transpose(-1, -2)
    state = (
        q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
        if initial_state is None
        else initial_state.float().flatten(0, 1)
    )
    kept = last.exp()
    states, updates = [], []
    for i in range(q.shape[1]):
        states.append(state)
        update = fresh[:, i] - seen[:, i] @ state
        updates.append(update)
        state = state * kept[:, i] + left[:, i] @ update
    out = reach @ torch.stack(states, 1) + within @ torch.stack(updates, 1)
    batch, heads = value.shape[0], value.shape[2]
    out = out.reshape(batch, heads, -1, v.shape[-1])[:, :, :n_tokens].transpose(1, 2)
    final = state.reshape(batch, heads, *state.shape[1:]) if output_final_state else None
    return out.to(kind), final


def shifted_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, **_: Any
) -> Tensor:
    """Computes a causal depthwise convolution of x [batch, channels, tokens]."""
    n, taps = x.shape[-1], weight.shape[-1]
    x = F.pad(x.transpose(1, 2), (0, 0, taps - 1, 0))
    weight = weight.to(x.dtype)
    out = x[:, :n] * weight[:, 0]
    for tap in range(1, taps):
        out = torch.addcmul(out, x[:, tap : tap + n], weight[:, tap])
    if bias is not None:
        out = out + bias
    out = F.silu(out) if activation in ("silu", "swish") else out
    return out.transpose(1, 2)


@contextmanager
def fast_delta_rule() -> Iterator[None]:
    """Makes transformers' Qwen3.5 use this module's functions within a with block."""
    with (
        patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chunked_delta_rule),
        patch.object(modeling_qwen3_5, "causal_conv1d_fn", shifted_conv),
    ):
        yield
