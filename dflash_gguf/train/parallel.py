"""Computes the gradients of a batch in parallel: each thread takes other sequences of the batch.

Small matrices gain little from threads inside an operation. Sums have a fixed order, so that a
training is reproducible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

Piece = TypeVar("Piece")
# A function that returns the summed loss of a part of the batch, and numbers to sum for the log.
Loss = Callable[[Piece], tuple[Tensor, Tensor]]


def precision(device: torch.device) -> AbstractContextManager[object]:
    """Returns a bfloat16 autocast if the device computes bfloat16 faster, else a no-op."""
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return nullcontext()
    # Disables the cache of converted weights, as threads must not share it.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


class Workers:
    """Threads that compute the gradients of one module's parameters."""

    def __init__(self, module: nn.Module, n_threads: int) -> None:
        """n_threads: 1 to compute on the calling thread, e.g. for a GPU."""
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.n_threads = n_threads
        self.pool = ThreadPoolExecutor(n_threads)

    def alone(self, work: Callable[[], None]) -> None:
        """Calls `work`, in which each of torch's operations may use all threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, self.n_threads))
        work()
        torch.set_num_threads(before)

    def gradients(self, pieces: Sequence[Piece], loss: Loss[Piece], scale: float) -> Tensor:
        """Sets `.grad` to that of the loss of all pieces times `scale`; returns the summed log."""

        def share(first: int) -> tuple[list[Tensor], Tensor]:
            total: list[Tensor] = []
            logs: list[Tensor] = []
            for piece in pieces[first :: self.n_threads]:
                value, log = loss(piece)
                found = torch.autograd.grad(value * scale, self.parameters)
                logs.append(log.detach())
                if total:
                    torch._foreach_add_(total, list(found))
                else:
                    total = list(found)
            return total, torch.stack(logs).sum(0)

        n = min(self.n_threads, len(pieces))
        shares = list(self.pool.map(share, range(n))) if n > 1 else [share(0)]
        for i, parameter in enumerate(self.parameters):
            parameter.grad = sum((grads[i] for grads, _ in shares[1:]), shares[0][0][i])
        return sum((log for _, log in shares[1:]), shares[0][1])
