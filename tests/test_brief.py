"""draft="auto" on simulated machines whose rounds are brief; nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated import BLOCK, Machine, Text, answer

from dflash_gguf.policy.brief import BRIEF_S, AutoRule, BriefRule, Taken
from dflash_gguf.policy.budget import Budget
from dflash_gguf.policy.costs import Round
from dflash_gguf.policy.rules import FixedChain

LENGTHS = (1, 2, 3, 5, 7, 11, 15)


def tiny() -> Machine:
    """A few million weights: a draft costs as much as a plain round, a row a sixth of one."""
    return Machine(lambda rows: 1e-4 + 1.7e-5 * (rows - 1), lambda n: 8e-5 + 4e-6 * n, warm_up=10.0)


def automatic(
    machine: Machine,
    text: Callable[[int], Text],
    budget: Budget,
    *,
    n_tokens: int = 2048,
    seed: int = 0,
    taken: Taken | None = None,
) -> tuple[float, list[Round], Taken]:
    taken = taken or Taken(BLOCK)
    rule = AutoRule(budget.costs, budget.rule(BLOCK, 63), BriefRule(budget, taken, BLOCK, 0))
    ms, rounds = answer(machine, text, rule, budget, n_tokens=n_tokens, seed=seed)
    return ms, rounds, taken


@pytest.mark.parametrize("best", [0.6, 0.8, 0.9, 0.97])
def test_it_finds_the_best_length(best: float) -> None:
    text = Text(best=best)
    runs = [2048 * tiny().plain]
    for length in LENGTHS:
        machine, rule = tiny(), FixedChain(length)
        answer(machine, lambda _: text, rule, Budget(), n_tokens=64)
        runs.append(answer(machine, lambda _: text, rule, Budget(), n_tokens=2048)[0])
    machine, budget = tiny(), Budget()
    first, _, taken = automatic(machine, lambda _: text, budget)  # builds every graph it tries
    found, rounds, _ = automatic(machine, lambda _: text, budget, taken=taken, seed=1)
    assert min(runs) / found > 0.93, [done.n_drafted for done in rounds]
    assert min(runs) / first > 0.75


def test_a_random_drafter_costs_under_three_percent() -> None:
    text = Text(best=0.0, others=0.0)
    ratios = []
    for seed in range(6):
        machine = tiny()
        machine.warm_up = 0.5  # graphs are built once for all answers
        ms, rounds, _ = automatic(machine, lambda _: text, Budget(), seed=seed)
        assert any(done.n_drafted for done in rounds)
        ratios.append(2048 * machine.plain / ms)
    assert np.mean(ratios) > 0.97


def test_it_begins_to_draft_when_that_pays_and_ends_when_it_does_not() -> None:
    texts = {0: Text(best=0.0, others=0.0), 1: Text(best=0.95), 2: Text(best=0.0, others=0.0)}
    _, rounds, _ = automatic(tiny(), lambda n: texts[min(n // 3000, 2)], Budget(), n_tokens=9000)
    shares = []
    for begin in (0, 3000, 6000):
        part = [r for r in rounds if begin + 1000 <= r.position - 100 < begin + 3000]
        shares.append(np.mean([r.n_drafted > 0 for r in part]))
    assert shares[0] < 0.1
    assert shares[1] > 0.8
    assert shares[2] < 0.1


def test_what_was_learned_outlives_an_answer() -> None:
    budget = Budget()
    machine, text = tiny(), Text(best=0.9)
    _, _, taken = automatic(machine, lambda _: text, budget)
    rule = AutoRule(budget.costs, budget.rule(BLOCK, 63), BriefRule(budget, taken, BLOCK, 0))
    assert rule.choose(100, BLOCK) >= 3
    assert rule.is_narrow


def test_longer_rounds_are_the_budgets() -> None:
    budget = Budget()
    machine = Machine(lambda rows: 2 * BRIEF_S * (1 + 0.05 * rows), lambda _: BRIEF_S / 10)
    _, rounds, taken = automatic(machine, lambda _: Text(best=0.9), budget, n_tokens=512)
    assert taken.longest_known == 0
    assert any(done.n_drafted for done in rounds)


def test_ends_of_answers_are_respected() -> None:
    budget = Budget()
    _, rounds, taken = automatic(tiny(), lambda _: Text(best=0.95), budget)
    rule = BriefRule(budget, taken, BLOCK, 0)
    for limit in range(1, BLOCK + 1):
        assert rule.choose(500, limit) <= limit
    assert rounds[-1].position + rounds[-1].n_tokens == 100 + 2048
    assert BriefRule(budget, taken, BLOCK, 7).choose(500, 6) == 0
