"""A made-up drafter that drafts step by step with K/V of all positions, like MTP or EAGLE-3."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from proposers import MadeUpProposer

from dflash_gguf.speculative.proposers.proposer import DraftSource, SpeculativeState
from dflash_gguf.speculative.tree import Tree

WIDTH = 4
Rows = np.ndarray[Any, np.dtype[np.float64]]


def row_of(token: int, position: int) -> Rows:
    return np.random.default_rng((token + 1, position)).standard_normal(WIDTH)


def step(rows: Rows, token: int, n_vocab: int) -> tuple[int, int]:
    """Returns the best and the second next token, given the rows of earlier tokens."""
    state = rows.sum(axis=0) + row_of(token, len(rows))
    best = int(abs(state[0]) * 1e4) % n_vocab
    return best, (best + 1 + int(abs(state[1]) * 1e4) % (n_vocab - 1)) % n_vocab


class KeptRows:
    """Stored rows, one per token of every sequence."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Any, Rows] = WeakKeyDictionary()
        self.tokens: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self.n_truncated = 0

    def rows(self, sequence: DraftSource) -> Rows:
        return self.of.setdefault(sequence, np.empty((0, WIDTH)))

    def position(self, sequence: DraftSource) -> int:
        return len(self.rows(sequence))

    def truncate(self, sequence: DraftSource, position: int) -> None:
        rows = self.rows(sequence)
        self.n_truncated += len(rows) > position
        self.of[sequence] = rows[:position]


class Stepwise(MadeUpProposer):
    """Two candidates per step, the second a leaf; one pass per step for all sequences."""

    name = "stepwise"
    max_draft = 5
    chance = 0.7

    def __init__(self, n_vocab: int) -> None:
        self.kept = KeptRows()
        self.n_passes = 0
        self._n_vocab = n_vocab

    def start(self, request: SpeculativeState) -> None:
        held = self.kept.tokens.get(request.sequence, [])
        same = itertools.takewhile(lambda x: x[0] == x[1], zip(held, request.history, strict=False))
        self.kept.truncate(request.sequence, sum(1 for _ in same))

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        for request in requests:
            self._catch_up(request)
        trees = [Tree.of([request.history[-1]]) for request in requests]
        rows = [self.kept.rows(request.sequence) for request in requests]
        spine = [0] * len(requests)
        for depth in range(max(request.n_positions for request in requests)):
            self.n_passes += 1
            for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
                if depth >= request.n_positions:
                    continue
                last = tree.tokens[spine[i]]
                pair = step(rows[i], last, self._n_vocab)
                rows[i] = np.concatenate([rows[i], [row_of(last, len(rows[i]))]])
                for token, prob in zip(pair, (0.7, 0.2), strict=True):
                    tree.tokens.append(token)
                    tree.parents.append(spine[i])
                    tree.depths.append(depth + 1)
                    tree.log_probs.append(tree.log_probs[spine[i]] + math.log(prob))
                spine[i] = len(tree) - 2
        return [tree.first(request.n_nodes) for request, tree in zip(requests, trees, strict=True)]

    def _catch_up(self, request: SpeculativeState) -> None:
        rows = self.kept.rows(request.sequence)
        new = enumerate(request.history[len(rows) : -1], len(rows))
        more = [row_of(token, position) for position, token in new]
        self.kept.of[request.sequence] = np.concatenate([rows, np.reshape(more, (-1, WIDTH))])
        self.kept.tokens[request.sequence] = list(request.history[:-1])
