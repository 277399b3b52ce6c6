"""A made-up kind of drafter: what followed the last token when it stood there before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_gguf.draft.calibration import Calibrations
from dflash_gguf.draft.proposer import Drafts
from dflash_gguf.draft.tree import Candidates
from dflash_gguf.sampling import Sampler


class Echo:
    """Needs no model of its own."""

    max_draft = 6

    def __init__(self) -> None:
        self.n_proposed = self.n_observed = 0

    def propose(
        self,
        seen: Sequence[int],
        n: int,
        sampler: Sampler,  # noqa: ARG002
        *,
        is_narrow: bool,  # noqa: ARG002
    ) -> Candidates | None:
        earlier = [i for i in range(len(seen) - 1) if seen[i] == seen[-1]]
        if not earlier:
            path = [seen[-1]] * n
        else:  # and again from there, where the text ends too soon
            period = seen[earlier[-1] + 1 :]
            path = [period[i % len(period)] for i in range(n)]
        self.n_proposed += n
        return Candidates(np.array(path)[:, None], np.full((n, 1), np.log(0.5)))

    def observe(self, tokens: Sequence[int]) -> None:
        self.n_observed += len(tokens)


def make(sequence: Drafts, calibrations: Calibrations) -> Echo:  # noqa: ARG001
    """For any sequence."""
    return Echo()
