"""Runs a training loop, the same for all kinds of drafters."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor, nn

from .answers import Answer
from .checkpoint import load_state, pick, save_state
from .parallel import Loss, Piece, Workers
from .schedule import Optimizers

SAVE_SECONDS = 120.0
LOG_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyper-parameters of a training, whose batch has n_sequences answers.

    falling: number of last steps, in which learning rates fall. piece: answers that a thread takes
    at once.
    """

    n_steps: int
    n_sequences: int = 32
    warmup: int = 50
    falling: int = 300
    muon_rate: float = 5e-3
    adam_rate: float = 2e-3
    eval_steps: int = 200
    seed: int = 1
    piece: int = 4
    n_threads: int = 1


@dataclass(slots=True)
class History:
    """Log of a training: [step, loss, accuracy of each drafted token...] and [step, tau] rows."""

    losses: list[list[float]] = field(default_factory=list)
    taus: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Update(Generic[Piece]):
    """The work of one update: pieces for the threads, and the loss of one.

    scale: factor of the sum of all losses. n: number of guesses for each drafted token.
    """

    pieces: Sequence[Piece]
    loss: Loss[Piece]
    scale: float
    n: int


class Trainer(ABC, Generic[Piece]):
    """A drafter in training, with its answers, optimizers and step."""

    def __init__(
        self,
        module: nn.Module,
        answers: Sequence[Answer],
        recipe: Recipe,
        folder: Path,
        n_tokens: int,
    ) -> None:
        """Creates a trainer, with the state in folder/state.pt if there is one.

        n_tokens: tokens that an answer must have. Errors: ValueError if all answers are too short,
        or if the state is of a later step than the last.
        """
        self.module, self.answers, self.recipe = module, answers, recipe
        self.usable = [i for i, a in enumerate(answers) if len(a.tokens) - a.n_prompt >= n_tokens]
        if not self.usable:
            raise ValueError(
                f"all answers are shorter than the {n_tokens} tokens of a draft; train in a new "
                "folder with a larger --new-tokens or a smaller --block"
            )
        self.workers = Workers(module, recipe.n_threads)
        self.optimizers = Optimizers(
            module,
            n_steps=recipe.n_steps,
            warmup=recipe.warmup,
            decay=recipe.falling,
            muon_rate=recipe.muon_rate,
            adam_rate=recipe.adam_rate,
        )
        self.path = folder / "state.pt"
        self.step, self.history = 0, History()
        state = load_state(self.path)
        if state is not None:
            module.load_state_dict(state["drafter"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.step = state["step"]
            if self.step > recipe.n_steps:
                raise ValueError(
                    f"--steps {recipe.n_steps}: {self.path} has run {self.step} steps already"
                )
            self.history = History(state["losses"], state["taus"])

    @abstractmethod
    def update(self, chosen: Sequence[Sequence[int]]) -> Update[Piece]:
        """Returns the work of the next update. chosen: indices of answers, by piece."""

    @abstractmethod
    def tau(self) -> float:
        """Returns the tokens a round on the held-out answers."""

    def run(self, on_tau: Callable[[History], None]) -> None:
        """Trains to the end of the recipe; calls on_tau after every measurement of tau.

        The last measurement is of the last step, also if no step was left to run.
        """
        recent: list[Tensor] = []
        saved = time.monotonic()
        while self.step < self.recipe.n_steps:
            recent.append(self._one_step())
            self.step += 1
            if self.step % LOG_STEPS == 0:
                self._log(torch.stack(recent).mean(0).tolist())
                recent.clear()
            if self.step % self.recipe.eval_steps == 0 and self.step < self.recipe.n_steps:
                self._measure(on_tau)
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
        self._measure(on_tau)
        self._save()

    def _measure(self, on_tau: Callable[[History], None]) -> None:
        tau = self.tau()
        self.history.taus = [x for x in self.history.taus if x[0] < self.step]
        self.history.taus.append([self.step, tau])
        print(f"{time.strftime('%H:%M:%S')} step {self.step}: tau {tau:.3f}", flush=True)
        on_tau(self.history)

    def _one_step(self) -> Tensor:
        """Runs one training step; returns the loss and the accuracy of every drafted token."""
        recipe = self.recipe
        start = self.step * recipe.n_sequences
        order = pick(len(self.usable), recipe.seed, start, recipe.n_sequences)
        # Sorts by length, as answers that are computed together are padded to the longest one.
        chosen = sorted((self.usable[i] for i in order), key=lambda i: len(self.answers[i].tokens))
        update = self.update(
            [chosen[i : i + recipe.piece] for i in range(0, len(chosen), recipe.piece)]
        )
        logs = self.workers.gradients(update.pieces, update.loss, update.scale)
        if not math.isfinite(float(logs[0])):
            raise ArithmeticError(f"the loss is {float(logs[0])} at step {self.step + 1}")
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizers.step(self.step, self.workers.pool.map)
        return torch.cat([logs[:1] * update.scale, logs[1:] / update.n]).cpu()

    def _log(self, means: list[float]) -> None:
        self.history.losses.append([self.step, *means])
        places = " ".join(f"{value:.2f}" for value in means[1:8])
        print(
            f"{time.strftime('%H:%M:%S')} step {self.step} loss {means[0]:.3f} right {places}",
            flush=True,
        )

    def _save(self) -> None:
        state = {
            "step": self.step,
            "drafter": self.module.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "losses": self.history.losses,
            "taus": self.history.taus,
        }
        save_state(self.path, state)
