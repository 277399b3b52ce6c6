"""Measured acceptance of a drafter in training: rounds, prompt lookup, repetition."""

from __future__ import annotations

from typing import Any

from dflash_gguf.train.acceptance import Acceptance, measure, prompt_lookup, repeated_share


def test_rounds_follow_the_references_rule() -> None:
    answer = list(range(12))
    drafts = {2: [3, 4, 99], 5: [99, 7, 8], 6: [7, 8, 9], 10: [11, 12, 13]}
    asked: list[int] = []

    def draft(places: Any) -> list[list[int]]:
        asked.extend(place for _, place in places)
        return [drafts[place] for _, place in places]

    result = measure([(answer, 2)], draft)
    assert asked == [2, 5, 6, 10]
    assert (result.rounds, result.tokens) == (4, 9)
    assert result.accepted == [3, 2, 1]
    assert result.tau == 9 / 4
    assert Acceptance().tau == 0


def test_prompt_lookup_takes_the_last_of_the_longest_matches() -> None:
    assert prompt_lookup([1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3], 4) == [5, 9, 2, 3]
    assert prompt_lookup([1, 2, 3, 7, 8, 1, 2, 3], 2) == [7, 8]
    assert prompt_lookup([1, 2, 3], 4) == []


def test_repetition_is_counted_within_an_answer() -> None:
    assert repeated_share([[1, 2, 3, 1, 2, 3]], size=3) == 1 / 4
    assert repeated_share([[1, 2, 3], [1, 2, 3]], size=3) == 0
    assert repeated_share([[]]) == 0
