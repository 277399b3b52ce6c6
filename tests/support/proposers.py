"""The base of made-up proposers: one that expects each candidate with the same probability."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.proposers.proposer import Proposer


class MadeUpProposer(Proposer):
    """Base class; `chance` is what each further candidate is expected to be accepted with."""

    chance = 0.5

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return [self.chance**n for n in range(1, self.max_draft + 1)]
