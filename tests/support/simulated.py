"""Simulated machines and drafters, to test controllers without a model or a clock."""

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
    """A machine, by the milliseconds of a pass of n rows and of a draft of n positions.

    tree: factor of passes with trees. ranking: extra milliseconds of ranked drafts.
    slower: factor of draft times by proposer.
    """

    rows: Callable[[int], float]
    draft: Callable[[int], float]
    tree: float = 1.0
    ranking: float = 0.0
    noise: float = 0.03
    warm_up: float = 0.5
    n_first: int = 1
    slower: dict[str, float] = field(default_factory=dict)
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def plain(self) -> float:
        return self.rows(1) * (1.0 + self.noise)

    def run(self, done: Round, rng: np.random.Generator) -> None:
        """Sets a round's durations; the first rounds of a shape take longer."""
        blur = 1.0 + self.noise * rng.standard_exponential(2)
        factor = self.tree if done.is_tree else 1.0
        rows_ms = factor * self.rows(done.n_rows) + self._first(
            f"tree {done.is_tree}", done.n_drafted
        )
        done.pass_s = rows_ms * blur[0]
        if done.n_positions:
            draft_ms = self.draft(done.n_positions) + (0.0 if done.is_top1 else self.ranking)
            draft_ms *= self.slower.get(done.proposer, 1.0)
            done.draft_s = (draft_ms + self._first("draft", done.n_positions)) * blur[1]

    def _first(self, kind: str, n: int) -> float:
        self.seen[kind, n] += 1
        return self.warm_up * self.rows(1) if self.seen[kind, n] <= self.n_first else 0.0


def slow() -> Machine:
    """A small model on a CPU: every row costs time."""
    return Machine(lambda rows: 10 + 4 * (rows - 1), lambda n: 6 + n, tree=1.05)


def fast() -> Machine:
    """A GPU: up to eight rows are nearly free, and the ninth costs more than all others."""
    return Machine(lambda rows: 20 + 0.2 * rows + (12 if rows > 8 else 0), lambda _: 2)


def wide() -> Machine:
    """A large model on a large GPU: 100 rows cost less than twice one row."""
    return Machine(lambda rows: 20 + 0.15 * rows, lambda _: 2)


@dataclass
class Text:
    """A text, by the probabilities that the target accepts the best candidate, or else another.

    sure: probability that the drafter claims for its best candidate; None: the true one.
    spread: random change of both probabilities from draft to draft.
    """

    best: float
    others: float = 0.5
    sure: float | None = None
    spread: float = 0.0

    def draft(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns true probabilities [K] of candidates, and the drafter's log scores."""
        best = float(np.clip(self.best + self.spread * rng.uniform(-1, 1), 0.0, 0.999))
        shares = 0.5 ** np.arange(1, K)
        truth = np.append(best, (1.0 - best) * self.others * shares)
        claim = best if self.sure is None else self.sure
        claims = np.append(claim, (1.0 - claim) * 0.9 * shares)
        return truth, np.log(np.maximum(claims, 1e-9))


class Drafter(MadeUpProposer):
    """Proposes by `text`, fixed for a round, in the order of claimed probabilities."""

    max_draft = BLOCK

    def __init__(self, text: Callable[[int], Text], name: str = "simulated"):
        self.text, self.name = text, name
        self.rng = np.random.default_rng(0)
        self._ranked, self._top1 = Calibration(), Top1Acceptance()

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: SpeculativeState) -> Tree:
        n, root = request.n_positions, request.history[-1]
        truth, claims = self.text(len(request.history) - 1).draft(self.rng)
        order = np.argsort(-claims, kind="stable")
        if request.shape == TOP1:
            best = [int(order[0])] * n
            request.notes[self.name] = truth, None, best
            return Tree.chain([root, *best], [0.0, *self._top1.log_paths(n)])
        features = Features(np.tile(claims[order], (n, 1)))
        request.notes[self.name] = truth, features, order.tolist()
        tokens = np.tile(order, (n, 1)).astype(np.int64)
        candidates = PositionCandidates(tokens, self._ranked.log_probs(features))
        if request.shape == CHAIN:
            return chain(root, candidates, request.n_nodes)
        return best_first_tree(root, candidates, request.n_nodes)

    def chosen(self, request: SpeculativeState) -> Iterator[int]:
        """Yields the target's next tokens as candidate indices; K: no candidate."""
        truth = request.notes[self.name][0]
        probs = np.append(truth, 1.0 - truth.sum())
        while True:
            yield int(self.rng.choice(K + 1, p=probs))

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        for request, chosen in zip(requests, tokens, strict=True):
            if self.name not in request.notes:
                continue
            _, features, order = request.notes.pop(self.name)
            self._top1.observe(order[:1] * request.n_positions, chosen)
            if features is not None:
                places = [order.index(token) if token < K else K for token in chosen]
                self._ranked.observe(features, places[: len(features.values)])

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        return self._top1.paths(self.max_draft)


class Play:
    """Requests that decode together, on simulated time."""

    def __init__(
        self,
        machine: Machine,
        drafters: Sequence[Drafter],
        controller: Controller,
        *,
        n_requests: int = 1,
        seed: int = 0,
    ) -> None:
        self.machine, self._drafters = machine, drafters
        self._speculator = Speculator(drafters, controller)
        self._rng = np.random.default_rng(seed)
        for drafter in drafters:
            drafter.rng = self._rng
        self.requests: list[SpeculativeState] = []
        self.ms, self.n_tokens = 0.0, 0
        self.rounds: list[Round] = []
        self.join(n_requests)

    def join(self, n_requests: int) -> None:
        for _ in range(n_requests):
            self.requests.append(SpeculativeState(None, [0], DraftScorer(DecodeConfig())))

    def round(self, n_left: int = 10_000) -> Round:
        """Runs a round in which no answer may take more than n_left tokens."""
        done = Round(100 + sum(len(x.history) - 1 for x in self.requests), len(self.requests))
        for request in self.requests:
            request.n_left, request.n_room = n_left, 256
        for request in self.requests:
            request.tree = None
        if self._speculator.asks:
            self._speculator.propose(done, self.requests)
        drafter = next((x for x in self._drafters if x.name == done.proposer), None)
        tokens = [[K] for _ in self.requests]
        if drafter is not None:
            for request, chosen in zip(self.requests, tokens, strict=True):
                chosen.clear()
                drawn = (chosen.append(x) or x for x in drafter.chosen(request))
                done.n_accepted += len((request.tree or Tree.of([0])).accepted(drawn)) - 1
        done.n_tokens = sum(map(len, tokens))
        self.machine.run(done, self._rng)
        self._speculator.observe(done, self.requests, tokens)
        for request, chosen in zip(self.requests, tokens, strict=True):
            request.history = [*request.history, *chosen]
        self.ms += done.seconds
        self.n_tokens += done.n_tokens
        self.rounds.append(done)
        return done

    def speed(self, ms: float) -> float:
        """Returns the tokens per millisecond over the next `ms` simulated milliseconds."""
        n_tokens, start = self.n_tokens, self.ms
        while self.ms < start + ms:
            self.round()
        return (self.n_tokens - n_tokens) / (self.ms - start)


def answer(
    machine: Machine,
    drafter: Drafter,
    controller: Controller,
    *,
    n_tokens: int = 512,
    seed: int = 0,
) -> tuple[float, list[Round]]:
    play = Play(machine, [drafter], controller, seed=seed)
    while play.n_tokens < n_tokens:
        play.round(n_tokens - play.n_tokens)
    return play.ms / play.n_tokens * n_tokens, play.rounds
