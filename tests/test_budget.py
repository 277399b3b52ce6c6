"""The budget rule on simulated machines and texts; nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dflash_gguf.budget import (
    LADDER,
    N_TIMES,
    Acceptance,
    Budget,
    BudgetedLength,
    Costs,
    FixedLength,
    Median,
    Round,
)


@dataclass
class Machine:
    """Milliseconds of a plain pass, of a verify by rows, of a draft by length; noise upwards."""

    plain: float
    verify: Callable[[int], float]
    draft: Callable[[int], float]
    noise: float = 0.1
    warm_up: float = 0.5
    seen: set[int] = field(default_factory=set)

    def run(self, n: int, rng: np.random.Generator) -> tuple[float, float]:
        """Draft and pass of a round with n candidates; the first of a length takes longer."""
        extra = 0.0 if n in self.seen else self.warm_up * self.plain
        self.seen.add(n)
        draft, rows = (self.draft(n) + extra, self.verify(n + 1)) if n else (0.0, self.plain)
        blur = 1.0 + self.noise * rng.standard_exponential(2)
        return draft * blur[0], (rows + extra) * blur[1]


def slow() -> Machine:
    """Every row costs: a small model on a CPU."""
    return Machine(10, lambda rows: 10 + 6 * (rows - 1), lambda n: 6 + 2 * n)


def fast() -> Machine:
    """Rows are nearly free up to eight: a large model on a GPU."""
    return Machine(20, lambda rows: 20 + 0.2 * rows + (10 if rows > 8 else 0), lambda _: 2)


Chances = Callable[[int], Sequence[float]]


def answer(
    machine: Machine,
    chances: Chances,
    budget: Budget,
    *,
    n_tokens: int = 512,
    longest: int = 15,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Milliseconds of an answer whose candidates are accepted by `chances(tokens so far)`."""
    rng, lengths = np.random.default_rng(seed), BudgetedLength(budget, longest)
    total, done, chosen = 0.0, 0, []
    while done < n_tokens:
        n = lengths.choose(100 + done, min(longest, n_tokens - done - 1))
        chance, accepted = chances(done), 0
        while accepted < n and rng.random() < chance[min(accepted, len(chance) - 1)]:
            accepted += 1
        draft, rows = machine.run(n, rng)
        lengths.observe(Round(100 + done, n, accepted, accepted + 1, draft, rows, 0.0))
        total, done = total + draft + rows, done + accepted + 1
        chosen.append(n)
    return total, chosen


def plain_ms(machine: Machine, n_tokens: int = 512) -> float:
    return n_tokens * machine.plain * (1 + machine.noise)


def best_fixed(machine: Machine, chance: float) -> float:
    """Speed-up of the best fixed length over plain decoding."""
    tokens = [sum(chance**i for i in range(n + 1)) for n in range(16)]
    rates = [tokens[n] / (machine.draft(n) + machine.verify(n + 1)) for n in LADDER if n < 16]
    return max(rates) * machine.plain


@pytest.mark.parametrize("make", [slow, fast])
def test_a_random_drafter_costs_under_three_percent(make: Callable[[], Machine]) -> None:
    ratios = [
        plain_ms(make()) / answer(make(), lambda _: [0.0], Budget(), seed=seed)[0]
        for seed in range(20)
    ]
    assert np.mean(ratios) > 0.97


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
def test_a_good_drafter_comes_near_the_best_fixed_length(chance: float) -> None:
    speedups = []
    for seed in range(10):
        machine, budget = fast(), Budget()
        answer(machine, lambda _: [chance], budget, seed=seed)
        ms, _ = answer(machine, lambda _: [chance], budget, seed=seed + 100)
        speedups.append(plain_ms(machine) / ms)
    assert np.mean(speedups) > 0.9 * best_fixed(fast(), chance)


def test_what_was_learned_outlives_the_answer() -> None:
    budget = Budget()
    answer(fast(), lambda _: [0.9], budget)
    _, chosen = answer(fast(), lambda _: [0.9], budget, seed=1)
    assert chosen[0] >= 7


def test_drafting_that_begins_to_pay_is_noticed() -> None:
    budget = Budget()
    _, chosen = answer(
        fast(), lambda done: [0.0] if done < 400 else [0.9], budget, n_tokens=1600, longest=7
    )
    assert np.mean(chosen[:400]) < 1
    assert np.mean(chosen[-50:]) > 4


def test_drafting_that_ceases_to_pay_is_given_up() -> None:
    _, chosen = answer(
        slow(), lambda done: [0.98] if done < 300 else [0.0], Budget(), n_tokens=900, longest=7
    )
    assert np.mean(chosen[-200:]) < 0.1


def test_equal_rounds_give_equal_choices() -> None:
    runs = [answer(fast(), lambda _: [0.7], Budget(), seed=4)[1] for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_first_round_is_plain_and_the_second_tries_one_candidate() -> None:
    lengths = BudgetedLength(Budget(), 15)
    assert lengths.choose(0, 15) == 0
    lengths.observe(Round(0, 0, 0, 1, 0.0, 10.0, 0.0))
    assert lengths.choose(1, 15) == 1


def test_lengths_keep_to_their_bounds() -> None:
    budget = Budget()
    answer(fast(), lambda _: [0.99], budget)
    assert BudgetedLength(budget, 15).choose(500, 15) == 15
    assert BudgetedLength(budget, 15).choose(500, 14) == 11
    assert BudgetedLength(budget, 6).choose(500, 15) == 6
    assert BudgetedLength(budget, 15, least=15).choose(500, 14) == 0
    assert FixedLength(9).choose(0, 4) == 4
    assert FixedLength(9, least=5).choose(0, 4) == 0
    assert FixedLength(9, least=5).choose(0, 12) == 9


def test_acceptance_counts_what_the_target_decided() -> None:
    acceptance = Acceptance()
    assert acceptance.chances(3) == [0.5, 0.5, 0.5]
    for _ in range(200):
        acceptance.observe(n_accepted=2, n_tried=3)
    first, second, third, fourth = acceptance.chances(4)
    assert min(first, second) > 0.98
    assert third < 0.05
    assert fourth == third
    assert acceptance.tokens(2) == [1.0, 1.0 + first, 1.0 + first + first * second]
    for _ in range(200):
        acceptance.observe(n_accepted=0, n_tried=1)
    assert acceptance.chances(1)[0] < 0.1


def test_a_round_cut_short_tells_nothing_about_the_rest() -> None:
    assert Round(0, n_drafted=6, n_accepted=2, n_tokens=2).n_decided == 2
    assert Round(0, n_drafted=6, n_accepted=2, n_tokens=3).n_decided == 3
    assert Round(0, n_drafted=2, n_accepted=2, n_tokens=3).n_decided == 2


def test_the_first_time_of_a_shape_does_not_count() -> None:
    median = Median()
    median.add(9.0)
    assert (median.value, median.is_warm) == (9.0, False)
    for ms in (1.0, 2.0, 3.0):
        median.add(ms)
    assert (median.value, median.is_warm) == (2.0, True)
    for _ in range(N_TIMES):
        median.add(5.0)
    assert median.value == 5.0


def warm(costs: Costs, position: int, n: int, draft: float, rows: float) -> None:
    for _ in range(2):
        costs.observe(Round(position, n, 0, 1, draft, rows, 0.5))


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs()
    warm(costs, 0, 0, 0.0, 10.0)
    assert costs.seconds(0, 0, 1.0) == 10.5
    assert costs.seconds(0, 3, 1.0) == 10.5
    warm(costs, 0, 1, 4.0, 12.0)
    assert costs.seconds(0, 1, 2.0) == 17.0
    assert costs.seconds(0, 3, 1.0) == 4 + 16 + 0.5
    warm(costs, 0, 7, 10.0, 18.0)
    assert costs.seconds(0, 4, 1.0) == pytest.approx(7 + 15 + 0.5)
    assert costs.seconds(0, 15, 1.0) == pytest.approx(18 + 26 + 0.5)


def test_costs_are_kept_by_context_and_taken_from_the_nearest() -> None:
    costs = Costs()
    warm(costs, 0, 0, 0.0, 10.0)
    warm(costs, 4000, 0, 0.0, 20.0)
    assert costs.seconds(100, 0, 0.0) == 10.0
    assert costs.seconds(3000, 0, 0.0) == 20.0
    assert costs.seconds(100_000, 0, 0.0) == 20.0
