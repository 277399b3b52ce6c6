"""Simulated machines and drafters, on which rules can be tried without a model or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_gguf.config import DecodeConfig
from dflash_gguf.draft.calibration import Features
from dflash_gguf.draft.tree import Candidates, Tree
from dflash_gguf.policy.budget import Budget
from dflash_gguf.policy.costs import Round
from dflash_gguf.policy.rules import Rule
from dflash_gguf.rounds import Speculation
from dflash_gguf.sampling import Sampler

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


class Drafter:
    """Proposes by a text that stays the same for a round, in the order of what it claims."""

    max_draft = BLOCK

    def __init__(self, text: Callable[[int], Text], budget: Budget, rng: np.random.Generator):
        self._text, self._rng = text, rng
        self._calibration = budget.calibrations.of(0.0, False)
        self._open: tuple[Features, list[int]] | None = None

    def propose(
        self,
        seen: Sequence[int],
        n: int,
        sampler: Sampler,  # noqa: ARG002
        *,
        is_narrow: bool,  # noqa: ARG002
    ) -> Candidates:
        self._truth, claims = self._text(len(seen) - 1).draft(self._rng)
        order = np.argsort(-claims, kind="stable")
        features = Features(np.tile(claims[order], (n, 1)))
        self._open = features, order.tolist()
        tokens = np.tile(order, (n, 1)).astype(np.int64)
        return Candidates(tokens, self._calibration.log_chances(features))

    def chosen(self) -> Iterator[int]:
        """The target's tokens of the positions to come, K for one that was no candidate."""
        while True:
            yield int(self._rng.choice(K + 1, p=np.append(self._truth, 1.0 - self._truth.sum())))

    def observe(self, tokens: Sequence[int]) -> None:
        if self._open is not None:
            (features, order), self._open = self._open, None
            places = [order.index(token) if token < K else K for token in tokens]
            self._calibration.observe(features, places[: len(features.values)])


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
    drafter = Drafter(text, budget, rng)
    speculation = Speculation(drafter, rule, Sampler(DecodeConfig()))
    ms, seen, rounds = 0.0, [0], []
    while (n_done := len(seen) - 1) < n_tokens:
        done = Round(100 + n_done)
        tree = speculation.propose(done, seen, n_tokens - n_done, 256)
        tokens = [K]
        if done.n_positions:
            tokens = []
            drawn = (tokens.append(x) or x for x in drafter.chosen())
            done.n_accepted = len((tree or Tree.of([0])).accepted(drawn)) - 1
        done.n_tokens = done.n_accepted + 1
        machine.run(done, rng)
        speculation.observe(done, tokens)
        ms += done.seconds
        seen += tokens
        rounds.append(done)
    return ms / (len(seen) - 1) * n_tokens, rounds
