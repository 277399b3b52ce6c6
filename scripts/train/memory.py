"""How many sequences a thread can hold at a time."""

from __future__ import annotations

import torch

from dflash_gguf.native import devices

SHARE = 0.3  # of the free memory, for what is counted below
LOGIT_COPIES = 4  # logits, their float32 form, softmax and gradient
CPU_PIECE_BYTES = 64 << 20  # more gains nothing on a CPU, whose caches it leaves


def free_bytes(device: torch.device) -> int:
    """Memory free for tensors on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return next(x.free_bytes for x in devices() if x.type == "cpu")


def piece_size(n_rows: int, n_vocab: int, n_sequences: int, free: int, n_threads: int = 1) -> int:
    """Sequences to compute at a time, 1 to `n_sequences`, each of `n_rows` rows of logits."""
    each = n_rows * n_vocab * 4 * LOGIT_COPIES
    return max(1, min(n_sequences, int(free * SHARE / n_threads) // each))
