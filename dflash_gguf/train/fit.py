"""Runs the training loop of a drafter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .acceptance import Acceptance, measure
from .blocks import Blocks, draw_anchors, make_blocks, place_weights
from .checkpoint import load_state, pick, save_state
from .drafter import BlockModel
from .features import AnswerFeatures
from .parallel import Workers, precision
from .schedule import Optimizers
from .words import Softmax, Words

SAVE_SECONDS = 120.0
LOG_STEPS = 20
# A part of a step's work for one thread: indices of answers, and the answers' blocks.
Piece = tuple[list[int], Blocks]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of a training. A batch has n_blocks blocks of each of n_sequences answers.

    decay: position k of a block has loss weight exp(-k / decay). distil: share of the loss that
    compares with the target's distribution, not with the answer's token. falling: number of last
    steps, in which learning rates fall. n_words: vocabulary entries in a step's softmax, 0 for all.
    piece: answers that a thread takes at once.
    """

    n_steps: int
    n_sequences: int = 32
    n_blocks: int = 16
    decay: float = 4.0
    distil: float = 0.0
    n_words: int = 0
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
    """Log of a training: [step, loss, accuracy of each block position...] and [step, tau] rows."""

    losses: list[list[float]] = field(default_factory=list)
    taus: list[list[float]] = field(default_factory=list)


class Trainer:
    """A drafter in training, with its data, optimizers and step."""

    def __init__(
        self,
        model: BlockModel,
        data: AnswerFeatures,
        held_out: AnswerFeatures,
        recipe: Recipe,
        folder: Path,
        device: torch.device,
    ) -> None:
        """Continues a training saved in `folder`; ValueError if all answers are too short."""
        self.model, self.recipe, self.device = model.to(device), recipe, device
        self.data, self.held_out = data, held_out
        self.size = model.drafter.block_size
        self.usable = [
            i for i, a in enumerate(data.answers) if len(a.tokens) - a.n_prompt >= self.size
        ]
        if not self.usable:
            raise ValueError(f"no answer is as long as a block of {self.size} tokens")
        self.weights = place_weights(self.size, recipe.decay).to(device)
        self.words = Words(
            (a.tokens[a.n_prompt :] for a in data.answers),
            model.head.shape[0],
            recipe.n_words,
            model.tokens,
        )
        self.workers = Workers(model.drafter, recipe.n_threads)
        self.optimizers = Optimizers(
            model.drafter,
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
            model.drafter.load_state_dict(state["drafter"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.step = state["step"]
            self.history = History(state["losses"], state["taus"])

    def run(self, on_log: Callable[[History], None]) -> None:
        """Trains to the end of the recipe; calls on_log after every measurement of tau."""
        recent: list[Tensor] = []
        saved = time.monotonic()
        while self.step < self.recipe.n_steps:
            recent.append(self._one_step())
            self.step += 1
            if self.step % LOG_STEPS == 0:
                self._log(torch.stack(recent).mean(0).tolist())
                recent.clear()
            if self.step % self.recipe.eval_steps == 0 or self.step == self.recipe.n_steps:
                tau = self.evaluate().tau
                self.history.taus.append([self.step, tau])
                print(f"{time.strftime('%H:%M:%S')} step {self.step}: tau {tau:.3f}", flush=True)
                on_log(self.history)
            if time.monotonic() - saved > SAVE_SECONDS or self.step == self.recipe.n_steps:
                self._save()
                saved = time.monotonic()

    def evaluate(self) -> Acceptance:
        """Returns the acceptance of the drafter's greedy drafts on the held-out answers."""
        self.model.eval()
        with torch.inference_mode(), precision(self.device):
            found = measure([(a.tokens, a.n_prompt) for a in self.held_out.answers], self.draft)
        self.model.train()
        return found

    def draft(self, places: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Returns the greedy draft after each (held-out answer, position of its last token)."""
        found: list[list[int]] = []
        for begin in range(0, len(places), 16):
            chosen = places[begin : begin + 16]
            tokens, features = self.held_out.batch([i for i, _ in chosen], self.size)
            anchors = torch.tensor([[place] for _, place in chosen])
            blocks = make_blocks(tokens, anchors, self.size, self.model.drafter.mask_token_id)
            logits = self.model(blocks.to(self.device), features.to(self.device))
            best = logits[:, 0].argmax(-1)
            found += (best if self.model.tokens is None else self.model.tokens[best.cpu()]).tolist()
        return found

    def _one_step(self) -> Tensor:
        """Runs one training step; returns the loss and the accuracy of every block position."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + self.step) % (1 << 63))
        start = self.step * recipe.n_sequences
        order = pick(len(self.usable), recipe.seed, start, recipe.n_sequences)
        # Sorts by length, as answers that are computed together are padded to the longest one.
        chosen = sorted(
            (self.usable[i] for i in order), key=lambda i: len(self.data.answers[i].tokens)
        )
        pieces = [chosen[i : i + recipe.piece] for i in range(0, len(chosen), recipe.piece)]
        batch = [self._piece(piece, generator) for piece in pieces]
        wanted = torch.cat([blocks.wanted.flatten() for _, blocks in batch])
        softmax = self.words.draw(wanted, generator).to(self.device, self.model.head)
        n_blocks = recipe.n_sequences * recipe.n_blocks
        scale = 1 / (n_blocks * float(self.weights.sum()))
        logs = self.workers.gradients(batch, lambda piece: self._loss(piece, softmax), scale)
        if not math.isfinite(float(logs[0])):
            raise ArithmeticError(f"the loss is {float(logs[0])} at step {self.step + 1}")
        torch.nn.utils.clip_grad_norm_(self.model.drafter.parameters(), 1.0)
        self.optimizers.step(self.step, self.workers.pool.map)
        return torch.cat([logs[:1] * scale, logs[1:] / n_blocks]).cpu()

    def _piece(self, chosen: list[int], generator: torch.Generator) -> Piece:
        answers = [self.data.answers[i] for i in chosen]
        first = torch.tensor([a.n_prompt for a in answers])
        last = torch.tensor([len(a.tokens) - 1 for a in answers])
        anchors = draw_anchors(first, last, self.recipe.n_blocks, self.size, generator)
        tokens = self.data.tokens(chosen)
        return chosen, make_blocks(tokens, anchors, self.size, self.model.drafter.mask_token_id)

    def _loss(self, piece: Piece, softmax: Softmax) -> tuple[Tensor, Tensor]:
        chosen, blocks = piece[0], piece[1].to(self.device)
        features = self.data.batch(chosen)[1].to(self.device)
        with precision(self.device):
            logits = self.model(blocks, features, softmax.head)
        wanted, is_known = softmax.places(blocks.wanted)
        log_probs = (logits.float() + softmax.shift).log_softmax(-1)
        losses = -log_probs.gather(-1, wanted[..., None])[..., 0]
        distil = self.recipe.distil
        if distil > 0:
            inputs = self.data.head_input(chosen, piece[1].places_before())
            with torch.no_grad(), precision(self.device):
                rows = self.model.head if softmax.head is None else softmax.head
                teacher = F.linear(inputs.to(self.device), rows).float() + softmax.shift
            compared = -(teacher.softmax(-1) * log_probs).sum(-1)
            losses = (1 - distil) * losses + distil * compared
        value = (losses * is_known * self.weights).sum()
        is_right = (logits.detach().argmax(-1) == wanted) & is_known
        right = is_right.float().sum((0, 1))
        return value, torch.cat([value.detach()[None], right])

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
            "drafter": self.model.drafter.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "losses": self.history.losses,
            "taus": self.history.taus,
        }
        save_state(self.path, state)
