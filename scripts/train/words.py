"""The words a training step tells apart: a head of 50,000 words costs more than a small drafter.

Always the words that are frequent in the answers and those that the step wants; of the others a
sample, new in every step, that stands for all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FREQUENT = 0.75  # of the words of a step


@dataclass(frozen=True, slots=True)
class Softmax:
    """One step's words.

    ids: int64 [n], rising. shift: float32 [n], added to logits: log of how many words each stands
    for. head: their rows of the target's, [n, hidden]; None before `to`.
    """

    ids: Tensor
    shift: Tensor
    head: Tensor | None = None

    def to(self, device: torch.device, head: Tensor) -> Softmax:
        """The same on a device, with rows of a whole head."""
        ids = self.ids.to(device)
        rows = head if len(ids) == len(head) else head[ids]
        return Softmax(ids, self.shift.to(device), rows)

    def places(self, wanted: Tensor) -> Tensor:
        """Where words stand among `ids`, which hold them all."""
        return torch.searchsorted(self.ids, wanted)


class Words:
    """Draws the words of a step."""

    def __init__(self, answers: Iterable[Iterable[int]], n_vocab: int, n_words: int) -> None:
        """n_words: of a step, without those it wants; 0: the whole vocabulary."""
        self.n_vocab = n_vocab
        self.whole = n_words <= 0 or n_words >= n_vocab
        n_frequent = int(n_words * FREQUENT)
        counts = Counter(word for answer in answers for word in answer)
        self.frequent = torch.tensor([word for word, _ in counts.most_common(n_frequent)])
        self.n_drawn = n_words - len(self.frequent)

    def draw(self, wanted: Tensor, generator: torch.Generator) -> Softmax:
        """The words of a step in which `wanted`, of any shape, are to be guessed."""
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
