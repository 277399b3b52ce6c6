"""Simulated machines and drafters, on which rules can be tried without a model or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from proposers import MadeUpProposer

from dflash_gguf.config import DecodeConfig
from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.calibration import Calibration, Features, Top1Acceptance
from dflash_gguf.speculative.controller import Controller
from dflash_gguf.speculative.cost_model import Round
from dflash_gguf.speculative.ddtree import PositionCandidates, best_first_tree, chain
from dflash_gguf.speculative.proposers.proposer import CHAIN, TOP1, SpeculativeState
from dflash_gguf.speculative.speculator import Speculator
from dflash_gguf.speculative.tree import Tree

K = 8
BLOCK = 15


@dataclass
class Machine:
    """Milliseconds of a pass by rows, what a tree's pass costs times that, and of a draft.

    ranking: what a draft with ranked candidates takes more.
    """

    rows: Callable[[int], float]
    draft: Callable[[int], float]
    tree: float = 1.0
    ranking: float = 0.0
    noise: float = 0.03
    warm_up: float = 0.5
    n_first: int = 1
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def plain(self) -> float:
        """A plain round, on average."""
        return self.rows(1) * (1.0 + self.noise)

    def run(self, done: Round, rng: np.random.Generator) -> None:
        """Fills in what a round took; the first ones of a shape take longer."""
        blur = 1.0 + self.noise * rng.standard_exponential(2)
        factor = self.tree if done.is_tree else 1.0
        rows_ms = factor * self.rows(done.n_drafted + 1) + self._first(
            f"tree {done.is_tree}", done.n_drafted
        )
        done.pass_s = rows_ms * blur[0]
        if done.n_positions:
            draft_ms = self.draft(done.n_positions) + (0.0 if done.is_top1 else self.ranking)
            done.draft_s = (draft_ms + self._first("draft", done.n_positions)) * blur[1]

    def _first(self, kind: str, n: int) -> float:
        self.seen[kind, n] += 1
        return self.warm_up * self.rows(1) if self.seen[kind, n] <= self.n_first else 0.0


def slow() -> Machine:
    """Every row costs: a small model on a CPU."""
    return Machine(lambda rows: 10 + 4 * (rows - 1), lambda n: 6 + n, tree=1.05)


def fast() -> Machine:
    """Rows are nearly free up to eight, and a ninth costs more than all of them: a GPU."""
    return Machine(lambda rows: 20 + 0.2 * rows + (12 if rows > 8 else 0), lambda _: 2)


def wide() -> Machine:
    """A hundred rows cost less than three: a large model on a large GPU."""
    return Machine(lambda rows: 20 + 0.15 * rows, lambda _: 2)


@dataclass
class Text:
    """How often the target takes the drafter's best candidate, and its others if not that.

    sure: what the drafter claims of its best candidate; None: the truth.
    spread: the chance changes from draft to draft by so much up or down, and the claim with it.
    """

    best: float
    others: float = 0.5
    sure: float | None = None
    spread: float = 0.0

    def draft(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The true chances [K] of every position's candidates, and what the drafter claims."""
        best = float(np.clip(self.best + self.spread * rng.uniform(-1, 1), 0.0, 0.999))
        shares = 0.5 ** np.arange(1, K)
        truth = np.append(best, (1.0 - best) * self.others * shares)
        claim = best if self.sure is None else self.sure
        claims = np.append(claim, (1.0 - claim) * 0.9 * shares)
        return truth, np.log(np.maximum(claims, 1e-9))


class Drafter(MadeUpProposer):
    """Proposes by a text that stays the same for a round, in the order of what it claims."""

    name = "simulated"
    max_draft = BLOCK

    def __init__(self, text: Callable[[int], Text]):
        self.text = text
        self.rng = np.random.default_rng(0)
        self._ranked, self._spine = Calibration(), Top1Acceptance()
        self._open: tuple[Features | None, list[int]] | None = None
        self._truth: np.ndarray | None = None

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: SpeculativeState) -> Tree:
        n, root = request.n_positions, request.history[-1]
        self._truth, claims = self.text(len(request.history) - 1).draft(self.rng)
        order = np.argsort(-claims, kind="stable")
        if request.shape == TOP1:
            best = [int(order[0])] * n
            self._open = None, best
            return Tree.chain([root, *best], [0.0, *self._spine.log_paths(n)])
        features = Features(np.tile(claims[order], (n, 1)))
        self._open = features, order.tolist()
        tokens = np.tile(order, (n, 1)).astype(np.int64)
        candidates = PositionCandidates(tokens, self._ranked.log_probs(features))
        if request.shape == CHAIN:
            return chain(root, candidates, request.n_nodes)
        return best_first_tree(root, candidates, request.n_nodes)

    def chosen(self) -> Iterator[int]:
        """The target's tokens of the positions to come, K for one that was no candidate."""
        assert self._truth is not None
        probs = np.append(self._truth, 1.0 - self._truth.sum())
        while True:
            yield int(self.rng.choice(K + 1, p=probs))

    def observe(self, request: SpeculativeState, tokens: Sequence[int]) -> None:
        if self._open is None:
            return
        (features, order), self._open = self._open, None
        self._spine.observe(order[:1] * request.n_positions, tokens)
        if features is not None:
            places = [order.index(token) if token < K else K for token in tokens]
            self._ranked.observe(features, places[: len(features.values)])

    def expected_path_probs(self, sampler: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return self._spine.paths(self.max_draft)


def answer(
    machine: Machine,
    drafter: Drafter,
    controller: Controller,
    *,
    n_tokens: int = 512,
    seed: int = 0,
) -> tuple[float, list[Round]]:
    """Milliseconds of an answer, and its rounds."""
    rng = drafter.rng = np.random.default_rng(seed)
    speculator = Speculator([drafter], controller)
    ms, seen, rounds = 0.0, [0], []
    request = SpeculativeState(None, seen, DraftScorer(DecodeConfig()))
    while (n_done := len(seen) - 1) < n_tokens:
        done = Round(100 + n_done)
        request.n_left, request.n_room = n_tokens - n_done, 256
        speculator.n_skip = 0  # asking takes no time here
        speculator.propose(done, (request,))
        tokens = [K]
        if done.n_positions:
            tokens = []
            drawn = (tokens.append(x) or x for x in drafter.chosen())
            done.n_accepted = len((request.tree or Tree.of([0])).accepted(drawn)) - 1
        done.n_tokens = done.n_accepted + 1
        machine.run(done, rng)
        speculator.observe(done, (request,), (tokens,))
        ms += done.seconds
        seen += tokens
        rounds.append(done)
    return ms / (len(seen) - 1) * n_tokens, rounds
