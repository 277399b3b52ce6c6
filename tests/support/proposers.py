"""The base class of made-up proposers, and requests for proposers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_gguf.config import DecodeConfig
from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.proposers.proposer import Proposer, SpeculativeState


class MadeUpProposer(Proposer):
    """Base class; `chance` is the expected acceptance of each further candidate."""

    chance = 0.5

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return [self.chance**n for n in range(1, self.max_draft + 1)]


class Timeline:
    """Stands for a sequence, as the key of its texts."""


def request_of(seen: list[int], sequence: Any = None) -> SpeculativeState:
    """Returns a greedy request with the text `seen`, of a timeline of its own by default."""
    sampler = DraftScorer(DecodeConfig())
    sequence = sequence or Timeline()
    return SpeculativeState(sequence, seen, sampler, n_left=99, n_room=99, n_positions=9, n_nodes=9)
