"""Computes how many sequences fit the memory of a training thread at a time."""

from __future__ import annotations

import torch

from ..native import devices

SHARE = 0.3
"""Share of the free memory that logits may take in training."""
LOGIT_COPIES = 4
"""Copies of logits in memory in a training step: raw, float32, softmax and gradient."""
CPU_PIECE_BYTES = 64 << 20
"""Bytes that count as free memory for each CPU thread: so few that logits fit its caches."""


def free_bytes(device: torch.device) -> int:
    """Returns the memory of a device that is free for tensors."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return next(x.free_bytes for x in devices() if x.type == "cpu")


def piece_size(n_rows: int, n_vocab: int, n_sequences: int, free: int, n_threads: int = 1) -> int:
    """Returns how many sequences to compute at once, each with n_rows rows of n_vocab logits."""
    each = n_rows * n_vocab * 4 * LOGIT_COPIES
    return max(1, min(n_sequences, int(free * SHARE / n_threads) // each))
