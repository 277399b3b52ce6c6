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

    def places(self, wanted: Tensor) -> Tensor:
        """Returns the indices in `ids` of the tokens to predict, all of which are in `ids`."""
        return torch.searchsorted(self.ids, wanted)


class Words:
    """Draws the vocabulary entries of each training step."""

    def __init__(self, answers: Iterable[Iterable[int]], n_vocab: int, n_words: int) -> None:
        """n_words: entries of a step besides the tokens to predict; 0 for the whole vocabulary."""
        self.n_vocab = n_vocab
        self.whole = n_words <= 0 or n_words >= n_vocab
        n_frequent = int(n_words * FREQUENT)
        counts = Counter(word for answer in answers for word in answer)
        self.frequent = torch.tensor([word for word, _ in counts.most_common(n_frequent)])
        self.n_drawn = n_words - len(self.frequent)

    def draw(self, wanted: Tensor, generator: torch.Generator) -> Softmax:
        """Returns the entries of a step that predicts the token ids `wanted`, of any shape."""
        if self.whole:
            return Softmax(torch.arange(self.n_vocab), torch.zeros(self.n_vocab))
        sure = torch.zeros(self.n_vocab, dtype=torch.bool)
        sure[self.frequent] = True
        sure[wanted.flatten()] = True
        others = (~sure).nonzero()[:, 0]
        n_drawn = min(self.n_drawn, len(others))
        drawn = others[torch.randperm(len(others), generator=generator)[:n_drawn]]
        ids = torch.cat([sure.nonzero()[:, 0], drawn]).sort().values
        each = math.log(len(others) / n_drawn) if n_drawn else 0.0
        return Softmax(ids, torch.where(sure[ids], 0.0, each))
