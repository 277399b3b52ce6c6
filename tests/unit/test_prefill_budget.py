"""The prefill budget: prompt tokens per round beside decoding requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_gguf.engine.prefill_budget import MAX_WAITING_ROUNDS, PrefillBudget


@pytest.mark.parametrize("held_up_at", [[0], [1], [1, 2], [50, 51], range(100, 110)])
def test_a_round_that_was_held_up_keeps_no_prompt_waiting(held_up_at: Sequence[int]) -> None:
    """Single slow rounds (a sleeping machine, a graph build) do not change the budget."""
    pace, n_mixed, waited = PrefillBudget(), 0, [0]
    for _ in range(6000):
        n = pace.chunk() if pace._alone.value else 0
        seconds = 0.01 + n * 1e-4
        if n and n_mixed in held_up_at:
            seconds = 3600.0
        n_mixed += n > 0
        waited = [*waited, 0] if n else [*waited[:-1], waited[-1] + 1]
        pace.observe(seconds, n)
    assert n_mixed > 2500
    assert max(waited) <= MAX_WAITING_ROUNDS
    assert max(waited[-1000:]) < 10


def test_pieces_of_prompts_leave_the_others_their_share() -> None:
    """A plain round takes 10 ms; the cost of a prompt row grows from round to round."""
    pace = PrefillBudget()
    alone_s = others_s = 0.0
    for i in range(2000):
        n = pace.chunk() if i >= 10 else 0
        seconds = 0.01 + n * (1e-4 + 1e-6 * i)
        pace.observe(seconds, n)
        if i >= 10:
            alone_s, others_s = alone_s + 0.01, others_s + seconds - 0.01
    assert 0.75 < others_s / alone_s < 0.9


@pytest.mark.parametrize(("row_s", "longest"), [(1e-6, 512), (1e-3, 128), (3e-3, 64), (0.1, 32)])
def test_pieces_are_long_where_they_are_quick(row_s: float, longest: int) -> None:
    pace = PrefillBudget()
    sizes = []
    for i in range(3000):
        n = pace.chunk() if i >= 10 else 0
        pace.observe(0.01 + n * row_s, n)
        sizes.append(n)
    assert set(sizes[1000:]) == {0, longest}


def test_prompts_come_in_sooner_where_more_wait_than_decode() -> None:
    longer = {}
    for n_filling in (1, 15):
        pace = PrefillBudget()
        alone_s = others_s = 0.0
        for i in range(1000):
            n = pace.chunk(1, n_filling) if i >= 10 else 0
            seconds = 0.01 + n * 1e-4
            pace.observe(seconds, n)
            alone_s, others_s = alone_s + 0.01, others_s + seconds - 0.01
        longer[n_filling] = others_s / alone_s
    assert 0.5 < longer[1] < 0.9
    assert 5.0 * longer[1] < longer[15] < 15 * 0.9
