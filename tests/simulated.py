"""Simulated machines and drafters, on which rules can be tried without a model or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dflash_gguf.draft.calibration import Features
from dflash_gguf.draft.tree import Candidates
from dflash_gguf.policy.budget import Budget
from dflash_gguf.policy.costs import Round
from dflash_gguf.policy.rules import Rule

K = 8
BLOCK = 15


@dataclass
class Machine:
    """Milliseconds of a pass by rows, what a tree's pass costs times that, and of a draft."""

    rows: Callable[[int], float]
    draft: Callable[[int], float]
    tree: float = 1.0
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
        rows_ms = factor * self.rows(done.n_drafted + 1) + self._first(done.kind, done.n_drafted)
        done.pass_s = rows_ms * blur[0]
        if done.n_positions:
            draft_ms = self.draft(done.n_positions) + self._first("draft", done.n_positions)
            done.draft_s = draft_ms * blur[1]

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


def chosen(
    truth: np.ndarray, order: np.ndarray, places: list[int], rng: np.random.Generator
) -> Iterator[int]:
    """The target's tokens of the positions to come, K for one that was no candidate.

    places: takes their places among the candidates in the drafter's order.
    """
    while True:
        token = int(rng.choice(K + 1, p=np.append(truth, 1.0 - truth.sum())))
        places.append(int(np.flatnonzero(order == token)[0]) if token < K else K)
        yield token


def answer(
    machine: Machine,
    text: Callable[[int], Text],
    rule: Rule,
    budget: Budget,
    *,
    n_tokens: int = 512,
    seed: int = 0,
) -> tuple[float, list[Round]]:
    """Milliseconds of an answer, and its rounds. text: of what kind it is after so many tokens."""
    rng = np.random.default_rng(seed)
    calibration = budget.calibrations.of(0.0, False)
    ms, n_done, rounds = 0.0, 0, []
    while n_done < n_tokens:
        done = Round(100 + n_done)
        n = rule.choose(done.position, min(BLOCK, n_tokens - n_done - 1))
        places: list[int] = []
        if n:
            done.n_positions, done.is_narrow = n, rule.is_narrow
            truth, claims = text(n_done).draft(rng)
            order = np.argsort(-claims, kind="stable")
            features = Features(np.tile(claims[order], (n, 1)))
            tokens = np.tile(order, (n, 1)).astype(np.int64)
            tree = rule.pick(0, Candidates(tokens, calibration.log_chances(features)), 255)
            done.verifies(tree)
            done.n_accepted = len(tree.accepted(chosen(truth, order, places, rng))) - 1
            calibration.observe(features, places[:n])
        done.n_tokens = done.n_accepted + 1
        machine.run(done, rng)
        rule.observe(done)
        ms += done.seconds
        n_done += done.n_tokens
        rounds.append(done)
    return ms / n_done * n_tokens, rounds
