"""Defines the optimizers and learning rates of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Run = Callable[[Callable[[Any], None], Iterable[Any]], Iterable[None]]


class Optimizers:
    """Muon for the matrices of the layers, AdamW for all other parameters.

    Learning rates rise over `warmup` steps, stay, and fall to 0 over the last `decay` steps. So
    n_steps can change before the fall begins, without an effect on earlier steps.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        n_steps: int,
        warmup: int,
        decay: int,
        muon_rate: float,
        adam_rate: float,
    ) -> None:
        """muon_rate, adam_rate: learning rates of Muon and AdamW between rise and fall."""
        self.n_steps, self.warmup, self.decay = n_steps, warmup, decay
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [
            *(
                (
                    torch.optim.Muon(
                        [matrix], lr=muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
                    ),
                    muon_rate,
                )
                for matrix in sorted(matrices, key=torch.numel, reverse=True)
            ),
            (
                torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
                adam_rate,
            ),
        ]

    def factor(self, step: int) -> float:
        """Returns the factor of both learning rates at a step, counted from 0."""
        rising = (step + 1) / self.warmup if self.warmup else 1.0
        falling = (self.n_steps - step) / (self.decay + 1)
        return max(0.0, min(1.0, rising, falling))

    def step(self, step: int, run: Run = map) -> None:
        """Updates the weights by their gradients, with the learning rates of a step.

        run: calls a function for all optimizers, which a pool does on several threads.
        """

        def update(part: tuple[torch.optim.Optimizer, float]) -> None:
            optimizer, rate = part
            for group in optimizer.param_groups:
                group["lr"] = rate * self.factor(step)
            optimizer.step()

        for _ in run(update, self.parts):
            pass

    def state_dict(self) -> list[dict[str, object]]:
        """Returns the optimizers' state, for `load_state_dict`."""
        return [optimizer.state_dict() for optimizer, _ in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restores the optimizers' state that `state_dict` returned."""
        for (optimizer, _), state in zip(self.parts, states, strict=True):
            optimizer.load_state_dict(state)
