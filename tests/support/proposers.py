"""The base of made-up proposers: one that keeps nothing of texts and learns nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.proposers.proposer import SpeculativeState


class MadeUpProposer:
    """Base class; `chance` is what each further candidate is expected to be accepted with."""

    needs_forward = True
    max_draft = 0
    chance = 0.5

    def start(self, request: SpeculativeState) -> None:
        pass

    def observe(self, request: SpeculativeState, tokens: Sequence[int]) -> None:
        pass

    def expected_path_probs(self, sampler: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return [self.chance**n for n in range(1, self.max_draft + 1)]

    def forget(self, sequence: Any) -> None:
        pass

    def to_dict(self) -> dict[str, Any]:
        return {}

    def learn(self, stored: Mapping[str, Any]) -> None:
        pass
