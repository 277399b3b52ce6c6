"""Reads what the training of a drafter needs of its target's GGUF: sizes, embeddings and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..convert.gguf_header import ArrayValue, read_parts
from ..convert.gguf_tensor import find_tensor, read_tensor
from ..convert.schema import Key, Tensor

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
        n_vocab=find_tensor(path, Tensor.TOKEN_EMBD)[1].shape[0],
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
    return torch.from_numpy(read_tensor(path, Tensor.TOKEN_EMBD))


def read_head(path: Path) -> torch.Tensor:
    """Returns the output head of a target, float32 [n_vocab, n_embd]."""
    has_head = any(Tensor.OUTPUT in part.tensors for part in read_parts(path))
    return torch.from_numpy(read_tensor(path, Tensor.OUTPUT if has_head else Tensor.TOKEN_EMBD))
