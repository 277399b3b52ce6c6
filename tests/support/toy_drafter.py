"""A made-up drafter that repeats the tokens after the last token's previous occurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from proposers import MadeUpProposer

from dflash_gguf.speculative.proposers.proposer import DraftSource, SpeculativeState
from dflash_gguf.speculative.tree import Tree


class Echo(MadeUpProposer):
    name = "echo"
    max_draft = 6

    def __init__(self) -> None:
        self.n_proposed = self.n_observed = 0

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        return [self._tree(request.history, request.n_positions) for request in requests]

    def _tree(self, seen: Sequence[int], n: int) -> Tree:
        earlier = [i for i in range(len(seen) - 1) if seen[i] == seen[-1]]
        if not earlier:
            path = [seen[-1]] * n
        else:
            period = seen[earlier[-1] + 1 :]
            path = [period[i % len(period)] for i in range(n)]
        self.n_proposed += n
        return Tree.chain([seen[-1], *path], [i * math.log(0.5) for i in range(n + 1)])

    def observe(
        self,
        requests: Sequence[SpeculativeState],  # noqa: ARG002
        tokens: Sequence[Sequence[int]],
    ) -> None:
        self.n_observed += sum(map(len, tokens))


def make(sequence: DraftSource) -> Echo:  # noqa: ARG001
    return Echo()
