"""A proposer that knows half of an answer, for tests and measurements of drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from proposers import MadeUpProposer

from dflash_gguf.speculative.ddtree import PositionCandidates, best_first_tree, chain
from dflash_gguf.speculative.proposers.proposer import CHAIN, MAIN_CHAIN, TOP1, SpeculativeState
from dflash_gguf.speculative.tree import Tree


class HalfRight(MadeUpProposer):
    """Proposes a known continuation; candidate `wrong(r)` of round r is another token.

    The right token of position i is the `rank(i)`-th of `width` candidates.
    """

    name = "half right"
    chance = 0.8

    def __init__(
        self,
        tokens: Sequence[int],
        n_prompt: int,
        wrong: Callable[[int], int],
        max_draft: int = 15,
        *,
        width: int = 1,
        rank: Callable[[int], int] = lambda _: 0,
        n_vocab: int = 300,
    ) -> None:
        self.max_draft = max_draft
        self.observed: list[int] = []
        self._tokens, self._n_prompt, self._wrong = list(tokens), n_prompt, wrong
        self._width, self._rank, self._n_vocab = width, rank, n_vocab
        self._n_rounds = 0

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: SpeculativeState) -> Tree:
        candidates = self._candidates(len(request.history) - self._n_prompt, request.n_positions)
        root, n = request.history[-1], request.n_nodes
        if request.shape in (TOP1, CHAIN):
            return chain(root, candidates, n)
        return best_first_tree(root, candidates, n, main_chain=request.shape == MAIN_CHAIN)

    def _candidates(self, start: int, n: int) -> PositionCandidates:
        path = (self._tokens[start : start + n] + [7] * n)[:n]
        wrong = self._wrong(self._n_rounds)
        self._n_rounds += 1
        tokens = np.empty((n, self._width), dtype=np.int64)
        for depth, token in enumerate(path):
            first = token - self._rank(start + depth) if depth != wrong else token + 1
            tokens[depth] = (first + np.arange(self._width)) % self._n_vocab
        probs = np.log(0.9 / self._width - 0.01 * np.arange(self._width) / self._width)
        return PositionCandidates(tokens, np.tile(probs, (n, 1)))

    def observe(
        self,
        requests: Sequence[SpeculativeState],  # noqa: ARG002
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for chosen in tokens:
            self.observed += chosen
