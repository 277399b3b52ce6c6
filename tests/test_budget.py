"""The budget rule on simulated machines and texts; nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated import Machine, Text, answer, fast, slow, wide

from dflash_gguf.draft.tree import Candidates, chain, grow
from dflash_gguf.policy.budget import Budget
from dflash_gguf.policy.costs import Costs, Round
from dflash_gguf.policy.rules import FixedChain, FixedTree, Rule

Kinds = list[tuple[str, int]]


def automatic(
    machine: Machine,
    text: Callable[[int], Text],
    budget: Budget,
    *,
    longest: int = 15,
    most: int = 63,
    n_tokens: int = 512,
    seed: int = 0,
) -> tuple[float, list[Round]]:
    rule = budget.rule(longest, most)
    return answer(machine, text, rule, budget, n_tokens=n_tokens, seed=seed)


def fixed_ms(make: Callable[[], Machine], text: Text, rule: Rule) -> float:
    """Milliseconds of 512 tokens by a fixed rule, once its shapes are warm."""
    machine, budget = make(), Budget()
    answer(machine, lambda _: text, rule, budget, n_tokens=64)
    runs = [answer(machine, lambda _: text, rule, budget, seed=seed)[0] for seed in range(2)]
    return float(np.mean(runs))


def kinds(rounds: list[Round]) -> Kinds:
    return [(done.kind, done.n_drafted) for done in rounds]


@pytest.mark.parametrize("make", [slow, fast, wide])
@pytest.mark.parametrize("sure", [0.2, 0.9])
def test_a_random_drafter_costs_under_three_percent(
    make: Callable[[], Machine], sure: float
) -> None:
    """From the first token on, however sure it is."""
    text = Text(best=0.0, others=0.0, sure=sure)
    ratios = []
    for seed in range(6):
        machine = make()
        machine.noise = 0.1
        ms, _ = automatic(machine, lambda _: text, Budget(), seed=seed)
        ratios.append(512 * machine.plain / ms)
    assert np.mean(ratios) > 0.97


@pytest.mark.parametrize("make", [slow, fast, wide])
def test_once_known_it_costs_half_a_percent(make: Callable[[], Machine]) -> None:
    text = Text(best=0.0, others=0.0, sure=0.9)
    machine, budget = make(), Budget()
    machine.noise = 0.0
    for seed in range(4):
        ms, _ = automatic(machine, lambda _: text, budget, seed=seed)
    assert 512 * machine.plain / ms > 0.995


GRID = {
    "slow, nearly always right": (slow, Text(0.95)),
    "fast, wrong as often as not": (fast, Text(0.6)),
    "fast, unsure": (fast, Text(0.8, sure=0.4)),
    "fast, of changing sureness": (fast, Text(0.6, spread=0.35)),
    "wide, wrong as often as not": (wide, Text(0.6)),
}


@pytest.mark.parametrize("name", GRID)
def test_it_comes_near_the_best_fixed_setting(name: str) -> None:
    make, text = GRID[name]
    rules: list[Rule] = [FixedChain(n) for n in (4, 7, 15)]
    rules += [FixedTree(n, 15) for n in (7, 15, 31, 63)]
    best = min(fixed_ms(make, text, rule) for rule in rules)
    found = []
    for seed in range(3):
        machine, budget = make(), Budget()
        automatic(machine, lambda _: text, budget, seed=seed)
        found.append(automatic(machine, lambda _: text, budget, seed=seed + 100)[0])
    print(f"{name}: {best / np.mean(found):.3f} of the best")
    assert best / np.mean(found) > 0.9


def test_what_was_learned_outlives_the_answer() -> None:
    machine, budget = fast(), Budget()
    automatic(machine, lambda _: Text(0.9), budget)
    _, rounds = automatic(machine, lambda _: Text(0.9), budget, seed=1)
    assert rounds[0].n_drafted >= 5


def test_drafting_that_begins_to_pay_is_noticed() -> None:
    _, rounds = automatic(
        fast(), lambda done: Text(0.0 if done < 400 else 0.9, sure=0.9), Budget(), n_tokens=1600
    )
    assert np.mean([done.n_drafted for done in rounds[:400]]) < 0.5
    assert np.mean([done.n_drafted for done in rounds[-50:]]) > 4


def plain_known() -> Budget:
    """One that has seen plain rounds of a second."""
    budget = Budget()
    for _ in range(3):
        budget.observe(Round(100, n_tokens=1, pass_s=1.0))
    return budget


def test_an_answer_begins_without_debts() -> None:
    budget = plain_known()
    for _ in range(4):
        budget.observe(Round(100, 3, 3, n_expected=2.0, n_tokens=1, draft_s=0.5, pass_s=1.5))
    assert not budget.may_lose(0.1, 100)
    budget.pause(0.5, 100)
    assert budget.is_paused()
    rule = budget.rule(15, 63)
    assert budget.may_lose(0.1, 100)
    assert rule.choose(100, 15) > 0


def test_a_plain_round_after_drafted_ones_is_no_measure_of_plain_decoding() -> None:
    budget = plain_known()
    for _ in range(300):
        budget.observe(Round(100, 3, 3, n_accepted=3, n_tokens=4, draft_s=0.5, pass_s=1.5))
    assert budget.needs_plain(1.0)
    budget.observe(Round(100, n_tokens=1, pass_s=2.0))  # caches hold what drafting needed
    assert budget.costs.plain_s(100) == 1.0
    assert budget.needs_plain(1.0)
    for _ in range(6):
        budget.observe(Round(100, n_tokens=1, pass_s=1.2))
    assert not budget.needs_plain(1.0)
    assert budget.costs.plain_s(100) == pytest.approx(1.2)


def test_looks_that_cost_several_rounds_are_saved_for() -> None:
    """A second row costs as much as three passes, as where kernels for one row are far better."""
    machine = Machine(lambda rows: 10 + (25 + rows if rows > 1 else 0), lambda _: 8)
    text = Text(0.3, sure=0.9)
    ms, rounds = automatic(machine, lambda _: text, Budget(), n_tokens=4000)
    assert 4000 * machine.plain / ms > 0.97
    looks = [number for number, done in enumerate(rounds) if done.n_drafted]
    assert len(looks) > 5
    assert looks[-1] > 3000


def tiny() -> Machine:
    """A model so small that building a graph takes as long as many of its passes."""
    return Machine(lambda rows: 0.3 + 0.04 * (rows - 1), lambda _: 0.3, tree=2.5, warm_up=15.0)


def test_first_runs_do_not_keep_it_from_drafting() -> None:
    """A draft of one loses, and the one that pays is reached by looks at shorter ones."""
    text = Text(0.8)
    best = min(fixed_ms(tiny, text, FixedChain(n)) for n in (5, 7, 11, 15))
    assert best < 0.8 * 512 * tiny().plain
    machine, budget = tiny(), Budget()
    automatic(machine, lambda _: text, budget, n_tokens=768)
    found = [automatic(machine, lambda _: text, budget, seed=seed)[0] for seed in range(1, 4)]
    print(f"tiny: {best / np.mean(found):.3f} of the best")
    assert best / np.mean(found) > 0.9


def test_first_runs_are_not_made_for_nothing() -> None:
    """Looking costs two graphs, here 30 passes, and nothing that grows with the answers."""
    machine, budget = tiny(), Budget()
    ms = 0.0
    for seed in range(8):
        ms += automatic(machine, lambda _: Text(0.0, sure=0.9), budget, seed=seed)[0]
    assert (ms / machine.plain - 8 * 512) < 40 + 0.02 * 8 * 512


def test_captures_do_not_keep_it_from_drafting() -> None:
    """Where the second run of a shape is slow too, the third tells what it costs."""
    text = Text(0.75)

    def last_ms(n_first: int, known: int) -> float:
        machine, budget = wide(), Budget(Costs(known))
        machine.warm_up, machine.n_first = 1.0, n_first
        for seed in range(3):
            ms, _ = automatic(machine, lambda _: text, budget, n_tokens=256, seed=seed)
        return ms

    at_best = last_ms(1, 1)
    assert last_ms(2, 2) < 1.1 * at_best
    assert last_ms(2, 1) > 1.1 * at_best  # what knowing it is worth


def test_drafting_that_ceases_to_pay_is_given_up() -> None:
    _, rounds = automatic(
        slow(), lambda done: Text(0.98 if done < 600 else 0.0), Budget(), n_tokens=1200
    )
    assert np.mean([done.n_drafted for done in rounds[-200:]]) < 0.1


def test_it_stops_before_a_step_of_the_costs_or_goes_well_past_it() -> None:
    """The ninth row costs more than the eight before it: no pass has nine to fifteen rows."""
    for text in (Text(0.5), Text(0.7), Text(0.97)):
        machine, budget = fast(), Budget()
        automatic(machine, lambda _, text=text: text, budget)
        _, rounds = automatic(machine, lambda _, text=text: text, budget, seed=1)
        rows = np.array([done.n_drafted + 1 for done in rounds])
        assert np.mean((rows > 8) & (rows < 16)) < 0.05
        assert np.mean(rows >= 8) > 0.5


def test_trees_where_they_are_cheap_and_chains_where_they_are_not() -> None:
    found = []
    for tree in (1.0, 2.0):
        machine, budget = wide(), Budget()
        machine.tree = tree
        automatic(machine, lambda _: Text(0.6), budget)
        _, rounds = automatic(machine, lambda _: Text(0.6), budget, seed=1)
        found.append(np.mean([done.is_tree for done in rounds]))
    assert found[0] > 0.9
    assert found[1] < 0.1


def test_equal_rounds_give_equal_choices() -> None:
    runs = [automatic(fast(), lambda _: Text(0.7), Budget(), seed=4)[1] for _ in range(2)]
    assert kinds(runs[0]) == kinds(runs[1])


def test_the_first_two_rounds_are_plain_and_the_third_looks() -> None:
    rule = Budget().rule(15, 63)
    for position in range(2):
        assert rule.choose(position, 15) == 0
        rule.observe(Round(position, n_tokens=1, pass_s=10.0))
    assert rule.choose(2, 15) == 1


def test_known_costs_let_the_first_round_draft() -> None:
    machine, budget = fast(), Budget()
    automatic(machine, lambda _: Text(0.9), budget)
    again = Budget(Costs.from_dict(budget.costs.to_dict()))
    _, rounds = automatic(machine, lambda _: Text(0.9), again, n_tokens=64)
    assert rounds[0].n_positions > 0
    assert np.mean([done.n_drafted for done in rounds]) > 4


def candidates(n: int) -> Candidates:
    chances = np.tile(np.log([0.9, 0.05]), (n, 1))
    return Candidates(np.tile([[1, 2]], (n, 1)), chances)


def test_choices_keep_to_their_bounds() -> None:
    machine, budget = wide(), Budget()
    for _ in range(2):
        automatic(machine, lambda _: Text(0.95), budget)
    for longest, most, least, limit in (
        (15, 63, 0, 15),
        (15, 63, 0, 4),
        (6, 9, 0, 15),
        (15, 7, 3, 15),
    ):
        rule = budget.rule(longest, most, least)
        for position in range(200, 240):
            n = rule.choose(position, limit)
            assert n <= min(longest, limit)
            if n:
                tree = rule.pick(0, candidates(n), limit)
                assert tree.n_drafted == 0 or least <= tree.n_drafted <= min(most, limit)
                assert max(tree.depths) <= n
    assert budget.rule(15, 63, 15).choose(500, 14) == 0


def test_fixed_rules_draft_what_they_were_told() -> None:
    line, bush = FixedChain(9, 5), FixedTree(20, 15, 3)
    assert [line.choose(0, limit) for limit in (4, 5, 12)] == [0, 5, 9]
    assert [bush.choose(0, limit) for limit in (2, 3, 99)] == [0, 3, 15]
    assert (line.n_rows, bush.n_rows) == (10, 21)
    assert line.pick(7, candidates(9), 30) == chain(7, candidates(9), 9)
    assert line.pick(7, candidates(9), 4).n_drafted == 4
    assert bush.pick(7, candidates(9), 30) == grow(7, candidates(9), 20)
    assert bush.pick(7, candidates(9), 6).n_drafted == 6
    spine = FixedTree(12, 9, spine=True).pick(7, candidates(9), 30)
    assert spine.depths[:10] == list(range(10))
    assert FixedTree(3, 15).choose(0, 15) == 3
