"""Maps checkpoint positions to GGUF positions, for `--check`.

Written independently of the converter's permutations and in the other direction, so that a
check cannot repeat their errors. Source: forward passes of transformers (rotate_half,
repeat_interleave of key heads) and llama.cpp's graphs (NORM rope, tiled value heads).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint, Config
from .schema import Arch, Tensor

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """GGUF index of each checkpoint row, column (None: the same). value: maps values to GGUF's."""

    rows: Index | None = None
    columns: Index | None = None
    value: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None


def layout_of(name: str, arch: str, config: Config) -> Layout:
    """Returns the layout of GGUF tensor `name` in a model of architecture `arch`."""
    template = re.sub(r"^blk\.\d+\.", "blk.{bid}.", name)
    if arch == Arch.LLAMA:
        return _llama(template, config)
    if arch in (Arch.QWEN35, Arch.QWEN35MOE):
        return _qwen35(template, config)
    if arch == Arch.QWEN3NEXT:
        return _qwen3next(template)
    if arch == Arch.GEMMA3 and "norm" in template:
        return Layout(value=lambda weight: 1 + weight)
    if arch == Arch.DFLASH and config.get("rope_is_neox_style") is False:
        return _dflash_neighbours(template, config)
    return Layout()


def _heads(config: Config, kind: str) -> int:
    n_head = config.integer("num_attention_heads")
    return n_head if kind == "q" else config.integer("num_key_value_heads", n_head)


def _head_dim(config: Config) -> int:
    default = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", default)


_Q = (Tensor.ATTN_Q, Tensor.ATTN_Q_BIAS)
_K = (Tensor.ATTN_K, Tensor.ATTN_K_BIAS)


def _llama(template: str, config: Config) -> Layout:
    """Maps rope pairs (j, j + d/2) of Hugging Face to neighbours (2j, 2j + 1) in GGUF."""
    if template not in _Q + _K:
        return Layout()
    d = _head_dim(config)
    head, within = np.divmod(np.arange(_heads(config, "q" if template in _Q else "k") * d), d)
    half, j = np.divmod(within, d // 2)
    where = head * d + 2 * j + half
    return Layout(columns=where) if template.endswith(".bias") else Layout(rows=where)


def _dflash_neighbours(template: str, config: Config) -> Layout:
    """Maps rope pairs (2j, 2j + 1) of the checkpoint to (j, j + d/2) in GGUF."""
    d = config.integer("head_dim", 128)
    if template in (Tensor.ATTN_Q_NORM, Tensor.ATTN_K_NORM):
        n_head = 1
    elif template in _Q + _K:
        n_head = _heads(config, "q" if template in _Q else "k")
    else:
        return Layout()
    head, within = np.divmod(np.arange(n_head * d), d)
    where = head * d + within % 2 * (d // 2) + within // 2
    return Layout(columns=where) if n_head == 1 and "norm" in template else Layout(rows=where)


def _qwen35(template: str, config: Config) -> Layout:
    if template.endswith("norm.weight") and template != Tensor.SSM_NORM:
        return Layout(value=lambda weight: 1 + weight)
    n_key, n_value = (
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
    )
    size = config.integer("linear_value_head_dim")
    before = 2 * n_key * config.integer("linear_key_head_dim")
    heads = _tiled(np.arange(n_value), n_key, n_value // n_key)
    head, within = np.divmod(np.arange(n_value * size), size)
    channels = heads[head] * size + within
    mixed = np.concatenate([np.arange(before), before + channels])
    return {
        Tensor.ATTN_QKV: Layout(rows=mixed),
        Tensor.SSM_CONV1D: Layout(rows=mixed),
        Tensor.ATTN_GATE: Layout(rows=channels),
        Tensor.SSM_OUT: Layout(columns=channels),
        Tensor.SSM_BETA: Layout(rows=heads),
        Tensor.SSM_ALPHA: Layout(rows=heads),
        Tensor.SSM_DT_BIAS: Layout(columns=heads),
        Tensor.SSM_A: Layout(columns=heads, value=lambda a_log: -np.exp(a_log)),
    }.get(template, Layout())


def _qwen3next(template: str) -> Layout:
    if template.endswith("norm.weight") and template != Tensor.SSM_NORM:
        return Layout(value=lambda weight: 1 + weight)
    return Layout(value=lambda a_log: -np.exp(a_log)) if template == Tensor.SSM_A else Layout()


def qwen3next_heads(name: str, source: str, checkpoint: Checkpoint) -> Iterator[NDArray[Any]]:
    """Yields the rows of Q, K and V, or of gates, of a projection that joins them by key head.

    Source: transformers, models/qwen3_next, fix_query_key_value_ordering.
    """
    config = checkpoint.config
    n_key, n_value, d_key, d_value = (
        config.integer(f"linear_{part}")
        for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    view, values = checkpoint.view(source), n_value // n_key * d_value
    sizes = {"q": d_key, "k": d_key, "v": values, "z": values}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    for kind in "z" if "gate" in name else "qkv":
        for head in range(n_key):
            first = head * sum(sizes.values()) + starts[kind]
            yield view[first : first + sizes[kind]]


def _tiled(head: Index, n_key: int, ratio: int) -> Index:
    """Maps value heads of a checkpoint (grouped by key head) to GGUF's (tiled over key heads)."""
    key_head, place = np.divmod(head, ratio)
    return place * n_key + key_head


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def gpt_oss_experts(
    name: str, sources: Sequence[str], checkpoint: Checkpoint
) -> Iterator[NDArray[Any]]:
    """Yields the 2-D values of each expert from a gpt-oss checkpoint.

    Gate and up are the even and odd outputs of one projection. Plain weights are stored as
    [inputs, outputs], MXFP4 blocks by output with neighbouring values in a byte.
    """
    kept = slice("_up_" in name, None, 2) if "gate_up_proj" in sources[0] else slice(None)
    if not sources[0].endswith("_blocks"):
        for expert in checkpoint.view(sources[0]):
            yield expert[None, kept] if expert.ndim == 1 else expert[:, kept].T
        return
    both = np.concatenate((_E2M1, -_E2M1))
    views = (checkpoint.view(source, packed=True) for source in sources)
    for blocks, exponents in zip(*views, strict=True):
        values = np.empty((*blocks.shape[:2], 32), np.float32)
        values[..., 0::2], values[..., 1::2] = both[blocks % 16], both[blocks // 16]
        values *= np.exp2(exponents.astype(np.float32) - 127)[..., None]
        yield values.reshape(len(blocks), -1)[kept]
