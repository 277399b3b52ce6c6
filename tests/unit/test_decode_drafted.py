"""Rounds with candidates: the text of plain decoding, exact counts, no leftovers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from half_right import HalfRight
from scripted import STOP, Said, Scripted

from dflash_gguf.config import DecodeConfig
from dflash_gguf.speculative.controller import (
    AutoController,
    Controller,
    ControllerState,
    FixedController,
)
from dflash_gguf.speculative.proposers.proposer import CHAIN, MAIN_CHAIN, TREE

PROMPT = [1, 2, 3]
SCRIPT = b"The quick brown fox jumps over."
RIGHT = 99


def plain(n_ctx: int = 64, script: bytes = SCRIPT, **config: Any) -> tuple[Said, Scripted]:
    sequence = Scripted(script, n_ctx)
    generation = Said(sequence, PROMPT, DecodeConfig(**config))
    list(generation)
    return generation, sequence


def drafted(
    known: tuple[int, ...],
    controller: Controller,
    wrong: Callable[[int], int] = lambda _: RIGHT,
    settings: dict[str, Any] | None = None,
    *,
    n_ctx: int = 64,
    script: bytes = SCRIPT,
    cancelled: Callable[[], bool] | None = None,
    **config: Any,
) -> tuple[Said, Scripted, HalfRight]:
    sequence, proposer = (
        Scripted(script, n_ctx),
        HalfRight(known, len(PROMPT), wrong, **(settings or {})),
    )
    generation = Said(
        sequence,
        PROMPT,
        DecodeConfig(**{"draft": "chain", **config}),
        proposers=[proposer],
        controller=controller,
        cancelled=cancelled,
    )
    return generation, sequence, proposer


SAMPLED = {"temperature": 1.0, "seed": 3, "min_p": 0.0, "repeat_penalty": 1.3}
ENDS: dict[str, dict[str, Any]] = {
    "stop token": {},
    "stop token of the request": {"stop_token_ids": [ord("j")]},
    "stop token of the request, eos ignored": {"stop_token_ids": [ord("j")], "ignore_eos": True},
    "stop token at once": {"script": b""},
    "stop text": {"stop": ["fox j"]},
    "stop text of one character": {"stop": "T"},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "max_tokens 9": {"max_tokens": 9},
    "context": {"n_ctx": 14},
    "context at once": {"n_ctx": 3},
    "eos ignored": {"ignore_eos": True, "max_tokens": 45},
    "sampled": {**SAMPLED, "max_tokens": 40},
    "sampled to the context": {**SAMPLED, "n_ctx": 30, "ignore_eos": True},
}


RULES: dict[str, tuple[Controller, dict[str, Any]]] = {
    "chain 1": (FixedController(CHAIN, 1, 1), {}),
    "chain 2": (FixedController(CHAIN, 2, 2), {}),
    "chain 5": (FixedController(CHAIN, 5, 5), {}),
    "chain 15": (FixedController(CHAIN, 15, 15), {}),
    "tree 1": (FixedController(TREE, 1, 15), {"width": 3}),
    "tree 9": (FixedController(TREE, 9, 15), {"width": 3, "rank": lambda i: i % 3}),
    "tree 22": (FixedController(TREE, 22, 3), {"width": 2, "rank": lambda _: 1}),
    "tree 40": (FixedController(MAIN_CHAIN, 40, 7), {"width": 4, "rank": lambda i: 3 * i % 4}),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", RULES)
def test_every_end_is_that_of_plain_decoding(end: str, name: str) -> None:
    expected, after = plain(**ENDS[end])
    controller, settings = RULES[name]
    for wrong in (lambda _: RIGHT, lambda _: 0, lambda r: r % 7, lambda r: 3 * r % 5):
        known = expected.result().tokens
        generation, sequence, proposer = drafted(known, controller, wrong, settings, **ENDS[end])
        steps = list(generation)
        result, goal = generation.result(), expected.result()
        assert (result.tokens, result.text) == (goal.tokens, goal.text)
        assert (result.stop_reason, result.n_decoded) == (goal.stop_reason, goal.n_decoded)
        assert sequence.left == after.left == generation.history[:-1]
        assert not sequence.open
        assert proposer.observed == list(result.tokens[1:])
        assert "".join(step.text for step in steps) == result.text
        assert sum(step.n_accepted for step in steps) == result.n_accepted
        assert sum(step.n_drafted for step in steps) == result.n_drafted
        histogram = result.accept_histogram
        assert histogram is not None
        assert sum(histogram) == result.rounds == len(steps) - 1


def test_all_accepted_lengths_occur_and_are_counted() -> None:
    expected, _ = plain()
    generation, sequence, _ = drafted(
        expected.result().tokens, FixedController(CHAIN, 4, 4), lambda r: r % 5
    )
    steps = list(generation)
    result = generation.result()
    assert [step.n_accepted for step in steps[1:]] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert result.accept_histogram == (3, 2, 2, 2, 2)
    assert result.rounds == 11
    assert result.tau == 31 / 11
    assert result.draft == "chain"
    assert sequence.verified == [5] * 11


def test_paths_leave_the_spine_at_every_depth() -> None:
    expected, _ = plain()
    known = expected.result().tokens
    left = set()
    for at in range(len(known)):
        settings = {"width": 3, "rank": lambda i, at=at: 2 if i == at else 0}
        generation, sequence, _ = drafted(
            known, FixedController(TREE, 120, 4), settings=settings, n_ctx=256
        )
        steps = list(generation)
        assert generation.result().tokens == known
        assert sequence.left == generation.history[:-1]
        assert [step.n_accepted for step in steps[1:6]] == [4] * 5
        left.add((at - 1) % 5)
    assert left == set(range(5))
    assert (generation.result().rounds_by_draft or {})["tree 120"] >= 5


def test_a_tree_that_is_a_chain_is_verified_as_one() -> None:
    expected, _ = plain()
    generation, _, _ = drafted(expected.result().tokens, FixedController(TREE, 4, 15))
    list(generation)
    assert generation.result().rounds_by_draft == {"chain 4": 7}


def test_a_tree_fits_the_sequence_and_the_context() -> None:
    expected, _ = plain(n_ctx=20)
    known, settings = expected.result().tokens, {"width": 3, "rank": lambda i: i % 3}
    generation, sequence, _ = drafted(
        known, FixedController(TREE, 40, 15), settings=settings, n_ctx=20
    )
    sequence.engine.max_verify = 9
    list(generation)
    assert generation.result().tokens == known
    assert max(sequence.verified) == 9
    assert sequence.verified[-1] < 9


def test_a_stop_token_inside_a_span_cuts_the_commit() -> None:
    generation, sequence, _ = drafted(
        (*b"abc", STOP, *b"def"), FixedController(CHAIN, 6, 6), script=b"abc"
    )
    steps = list(generation)
    assert [step.tokens for step in steps] == [(ord("a"),), (ord("b"), ord("c"), STOP)]
    assert (steps[1].n_drafted, steps[1].n_accepted) == (6, 3)
    assert sequence.left == [*PROMPT, *b"abc"]


def test_the_last_token_is_not_drafted() -> None:
    expected, _ = plain(max_tokens=4)
    generation, sequence, _ = drafted(
        expected.result().tokens, FixedController(CHAIN, 9, 9), max_tokens=4
    )
    list(generation)
    assert sequence.verified == [3]
    assert generation.result().n_drafted == 2
    generation, sequence, _ = drafted((), FixedController(CHAIN, 9, 9, 3), max_tokens=4)
    list(generation)
    assert sequence.verified == []


def test_greedy_copies_no_row() -> None:
    expected, _ = plain()
    generation, sequence, _ = drafted(expected.result().tokens, FixedController(CHAIN, 3, 3))
    list(generation)
    assert not any(rows.n_fetched for rows in sequence.rows)


def test_sampling_copies_only_the_rows_it_walks() -> None:
    expected, _ = plain(**SAMPLED)
    generation, sequence, _ = drafted(
        expected.result().tokens, FixedController(CHAIN, 5, 5), lambda r: r % 3, **SAMPLED
    )
    list(generation)
    result = generation.result()
    assert sum(rows.n_fetched for rows in sequence.rows) == result.n_tokens


@pytest.mark.parametrize("n", range(1, 12))
def test_a_cancelled_answer_commits_what_it_keeps(n: int) -> None:
    expected, _ = plain()
    said: list[Said] = []
    generation, sequence, _ = drafted(
        expected.result().tokens,
        FixedController(CHAIN, 4, 4),
        lambda r: r % 5,
        cancelled=lambda: len(said[0].state.output.tokens) >= n,
    )
    said.append(generation)
    list(generation)
    result = generation.result()
    assert (result.stop_reason, result.n_tokens >= n) == ("cancelled", True)
    assert result.tokens == expected.result().tokens[: result.n_tokens]
    assert sequence.left == generation.history[:-1] == [*PROMPT, *result.tokens[:-1]]


def test_budgeted_lengths_give_the_same_text() -> None:
    expected, after = plain(**SAMPLED, ignore_eos=True, n_ctx=600)
    known = ControllerState()
    for _ in range(2):
        generation, sequence, _ = drafted(
            expected.result().tokens,
            AutoController(known, 15, 63),
            lambda r: r % 9,
            n_ctx=600,
            **{**SAMPLED, "ignore_eos": True, "draft": "auto"},
        )
        list(generation)
        assert generation.result().tokens == expected.result().tokens
        assert sequence.left == after.left
        assert generation.result().draft == "auto"
