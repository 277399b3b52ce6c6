"""The base class of made-up proposers."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.proposers.proposer import Proposer


class MadeUpProposer(Proposer):
    """Base class; `chance` is the expected acceptance of each further candidate."""

    chance = 0.5

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return [self.chance**n for n in range(1, self.max_draft + 1)]
