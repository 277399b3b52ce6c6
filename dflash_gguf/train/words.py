"""Selects entries of a training step's softmax: the whole vocabulary costs more than the drafter.

Frequent tokens of the answers, and the tokens to predict, are always in; a random sample, new in
every step, stands for all others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FREQUENT = 0.75  # share of n_words for the answers' most frequent tokens


@dataclass(frozen=True, slots=True)
class Softmax:
    """The vocabulary entries in the softmax of one training step.

    ids: sorted token ids, int64 [n]. shift: float32 [n], added to logits: log of the number of
    tokens for which an entry stands. head: rows of the target's output head, [n, hidden]; None
    before `to`.
    """

    ids: Tensor
    shift: Tensor
    head: Tensor | None = None

    def to(self, device: torch.device, head: Tensor) -> Softmax:
        """Returns the entries on a device, with their rows of the target's output head."""
        ids = self.ids.to(device)
        rows = head if len(ids) == len(head) else head[ids]
        return Softmax(ids, self.shift.to(device), rows)

    def places(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each token's index in `ids`, and a mask that is False for tokens not in `ids`."""
        found = torch.searchsorted(self.ids, wanted).clamp(max=len(self.ids) - 1)
        return found, self.ids[found] == wanted


def most_frequent(answers: Iterable[Iterable[int]], n: int) -> Tensor:
    """Returns the sorted ids of the n most frequent tokens of answers."""
    counts = Counter(word for answer in answers for word in answer)
    return torch.tensor([word for word, _ in counts.most_common(n)], dtype=torch.int64).sort()[0]


class Words:
    """Draws the vocabulary entries of each training step."""

    def __init__(
        self,
        answers: Iterable[Iterable[int]],
        n_vocab: int,
        n_words: int,
        all_words: Tensor | None = None,
    ) -> None:
        """n_words: vocabulary entries of a step, beside the tokens to predict; 0 for all.

        all_words: ids of the only tokens that the drafter can draft, or None.
        """
        self.n_vocab = n_vocab
        self.all_words = all_words
        if all_words is None and not 0 < n_words < n_vocab:
            self.all_words = torch.arange(n_vocab)
        self.frequent = most_frequent(answers, int(n_words * FREQUENT))
        self.n_drawn = n_words - len(self.frequent)

    def draw(self, wanted: Tensor, generator: torch.Generator) -> Softmax:
        """Returns the entries of a step that predicts the token ids `wanted`, of any shape."""
        if self.all_words is not None:
            return Softmax(self.all_words, torch.zeros(len(self.all_words)))
        sure = torch.zeros(self.n_vocab, dtype=torch.bool)
        sure[self.frequent] = True
        sure[wanted.flatten()] = True
        others = (~sure).nonzero()[:, 0]
        n_drawn = min(self.n_drawn, len(others))
        drawn = others[torch.randperm(len(others), generator=generator)[:n_drawn]]
        ids = torch.cat([sure.nonzero()[:, 0], drawn]).sort().values
        each = math.log(len(others) / n_drawn) if n_drawn else 0.0
        return Softmax(ids, torch.where(sure[ids], 0.0, each))
