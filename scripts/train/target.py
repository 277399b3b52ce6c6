"""Reads what the training of a drafter needs of its target's GGUF: sizes, embeddings and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_gguf.convert.gguf_header import ArrayValue, read_parts
from dflash_gguf.convert.schema import Key, Tensor
from gguf.quants import dequantize

EXPERTS_FFN = 3
"""Width of a drafter's feed-forward divided by the hidden size, if the target has experts only."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and constants of a target; those that layers may differ in are the largest."""

    n_layer: int
    n_embd: int
    n_vocab: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx_train: int
    norm_eps: float
    rope_base: float


def read_sizes(path: Path) -> Sizes:
    """Returns the sizes of a target; ConvertError for a damaged file."""
    first = read_parts(path)[0]
    arch = first.metadata[Key.GENERAL_ARCHITECTURE].value

    def of(key: str, default: Any) -> Any:
        found = first.metadata.get(key.replace("{arch}", arch))
        value = default if found is None else found.value
        return max(value.head) if isinstance(value, ArrayValue) else value

    n_embd, n_head = of(Key.EMBEDDING_LENGTH, 0), of(Key.ATTENTION_HEAD_COUNT, 1)
    return Sizes(
        n_layer=of(Key.BLOCK_COUNT, 0) - of(Key.NEXTN_PREDICT_LAYERS, 0),
        n_embd=n_embd,
        n_vocab=read_shape(path, Tensor.TOKEN_EMBD)[0],
        n_ff=of(Key.FEED_FORWARD_LENGTH, 0) or EXPERTS_FFN * n_embd,
        n_head=n_head,
        n_head_kv=of(Key.ATTENTION_HEAD_COUNT_KV, n_head),
        head_dim=of(Key.ATTENTION_KEY_LENGTH, n_embd // n_head),
        n_ctx_train=of(Key.CONTEXT_LENGTH, 2048),
        norm_eps=of(Key.ATTENTION_LAYER_NORM_RMS_EPSILON, 1e-6),
        rope_base=of(Key.ROPE_FREQ_BASE, 1e4),
    )


def read_embeddings(path: Path) -> torch.Tensor:
    """Returns the token embeddings of a target, float32 [n_vocab, n_embd], without a scale."""
    return _read(path, Tensor.TOKEN_EMBD)


def read_head(path: Path) -> torch.Tensor:
    """Returns the output head of a target, float32 [n_vocab, n_embd]."""
    has_head = any(Tensor.OUTPUT in part.tensors for part in read_parts(path))
    return _read(path, Tensor.OUTPUT if has_head else Tensor.TOKEN_EMBD)


def read_shape(path: Path, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor, row-major; ValueError if the file does not have it."""
    for part in read_parts(path):
        if name in part.tensors:
            return part.tensors[name].shape
    raise ValueError(f"{path}: has no tensor {name}")


def _read(path: Path, name: str) -> torch.Tensor:
    n_rows = read_shape(path, name)[0]
    part = next(part for part in read_parts(path) if name in part.tensors)
    tensor = part.tensors[name]
    data = np.memmap(part.path, np.uint8, "r", tensor.start, (n_rows, tensor.n_bytes // n_rows))
    values = dequantize(data, tensor.type)
    return torch.from_numpy(np.array(values, dtype=np.float32))
