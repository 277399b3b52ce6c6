"""Trains an MTP layer, which drafts a chain step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from .. import loading
from .answers import Answer
from .features import AnswerFeatures
from .fit import Recipe, Trainer, Update
from .mtp import N_STEPS, GgufTarget, chain_losses

STEP_DECAY = 0.8
"""Weight of the loss of a chain's step, relative to that of the step before."""


class ChainTrainer(Trainer[Sequence[int]]):
    """An MTP layer in training."""

    def __init__(
        self,
        model: MtpModel,
        target: GgufTarget,
        data: AnswerFeatures,
        recipe: Recipe,
        folder: Path,
        measured: Callable[[], float],
    ) -> None:
        """Creates a trainer, with the state in folder/state.pt if there is one.

        data: answers, whose features are the inputs of the target's output head. measured: returns
        the tokens a round of the layer as it is. Errors: as for Trainer.
        """
        super().__init__(model.layers[0], data.answers, recipe, folder, N_STEPS + 1)
        self.model, self.target, self.data, self._measured = model, target, data, measured

    def tau(self) -> float:
        """Returns the tokens a round on the held-out answers."""
        return self._measured()

    def update(self, chosen: Sequence[Sequence[int]]) -> Update[Sequence[int]]:
        """Returns all tokens of the chosen answers."""
        answers = (self.answers[i] for piece in chosen for i in piece)
        n = sum(len(x.tokens) - x.n_prompt for x in answers)
        return Update(chosen, self._loss, 1 / n, n)

    def _loss(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the summed loss of answers, and a log: this loss, the right tokens by step."""
        tokens, hidden = self.data.batch(chosen)
        positions = torch.arange(tokens.shape[1])
        answers = [self.answers[i] for i in chosen]
        begins = torch.tensor([[x.n_prompt] for x in answers])
        ends = torch.tensor([[len(x.tokens)] for x in answers])
        is_wanted = (begins <= positions) & (positions < ends)
        right = []

        def of_step(step: int, left: Tensor) -> Tensor:
            is_row = is_wanted[:, step + 1 :]
            logits = F.linear(left[:, :-1][is_row], self.target.head)
            wanted = tokens[:, step + 1 :][is_row]
            right.append((logits.argmax(-1) == wanted).sum())
            return F.cross_entropy(logits, wanted, reduction="sum") * STEP_DECAY ** (step - 1)

        value = chain_losses(self.model, self.target.embeddings[tokens], hidden, of_step)
        return value, torch.stack([value.detach(), *right])


def tau_of(target: Path, layer: Path, answers: Sequence[Answer], n_threads: int) -> float:
    """Returns tokens a round of greedy chains of N_STEPS; ValueError if an answer changes."""
    n_rounds = n_tokens = 0
    n_ctx = max(len(answer.tokens) for answer in answers) + N_STEPS + 1
    with loading.load(target, drafter=layer, n_ctx=n_ctx, n_threads=n_threads) as decoder:
        for answer in answers:
            prompt, wanted = answer.tokens[: answer.n_prompt], answer.tokens[answer.n_prompt :]
            result = decoder.generate(
                prompt,
                max_tokens=len(wanted),
                temperature=0.0,
                draft="chain",
                draft_type="mtp",
                draft_max=N_STEPS,
            )
            if result.tokens != wanted:
                raise ValueError(
                    f"{layer}: with its drafts {target} gives another answer than held-out.json "
                    "has; was that file made with this target, on this machine?"
                )
            n_rounds, n_tokens = n_rounds + result.rounds, n_tokens + result.n_decoded
    return n_tokens / n_rounds
