"""Rounds of a scripted sequence: every way to end an answer, and the state after errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import N_TOP, STOP, Bytes, Said, Scripted

from dflash_gguf.config import DecodeConfig
from dflash_gguf.outputs import Step
from dflash_gguf.sampling.sampler import Sampler


def answer(
    script: Sequence[int],
    *,
    n_ctx: int = 64,
    cancelled: Callable[[], bool] | None = None,
    **config: Any,
) -> tuple[Said, list[Step], Scripted]:
    sequence = Scripted(script, n_ctx)
    generation = Said(sequence, [1, 2, 3], DecodeConfig(**config), cancelled=cancelled)
    return generation, list(generation), sequence


def test_a_stop_token_ends_the_answer_and_is_not_text() -> None:
    generation, steps, sequence = answer(b"hello")
    result = generation.result()
    assert result.text == "hello" == "".join(step.text for step in steps)
    assert result.tokens == (*b"hello", STOP)
    assert result.stop_reason == "token"
    assert (result.n_prompt, result.n_prefilled) == (3, 3)
    assert (result.rounds, result.n_decoded) == (5, 5)
    assert sequence.left == [1, 2, 3, *b"hello"] == generation.history[:-1]


def test_greedy_copies_no_row() -> None:
    _, _, sequence = answer(b"hello")
    assert not any(row.n_fetched for row in sequence.rows)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_max_tokens_ends_the_answer(n: int) -> None:
    generation, steps, sequence = answer(b"hello world", max_tokens=n)
    result = generation.result()
    assert result.text == "hello world"[:n]
    assert (len(steps), result.rounds, result.stop_reason) == (n, n - 1, "length")
    assert len(sequence.left) == 3 + n - 1


def test_zero_tokens_only_prefill() -> None:
    generation, steps, sequence = answer(b"x", max_tokens=0)
    assert steps == []
    assert generation.result().stop_reason == "length"
    assert len(sequence.left) == 3


def test_the_end_of_the_context_ends_the_answer() -> None:
    generation, _, sequence = answer(b"hello world", n_ctx=6)
    assert generation.result().text == "hell"
    assert generation.result().stop_reason == "context"
    assert len(sequence.left) == 6


def test_a_prompt_that_fills_the_context_still_gives_one_token() -> None:
    generation, _, _ = answer(b"hello", n_ctx=3)
    assert (generation.result().text, generation.result().stop_reason) == ("h", "context")


def test_a_stop_text_that_began_in_earlier_steps_is_taken_back() -> None:
    generation, steps, _ = answer(b"one STOP two", stop=["STOP"])
    result = generation.result()
    assert result.text == "one " == "".join(step.text for step in steps)
    assert bytes(result.tokens) == b"one STOP"
    assert result.stop_reason == "text"


def test_the_beginning_of_a_stop_text_is_released_when_it_goes_on_otherwise() -> None:
    generation, steps, _ = answer(b"STOLEN", stop="STOP")
    assert generation.result().text == "STOLEN"
    assert [step.text for step in steps] == ["", "", "", "STOL", "E", "N", ""]


def test_a_split_character_is_held_back_and_replaced_only_at_the_end() -> None:
    generation, steps, _ = answer("né€".encode())
    assert [step.text for step in steps] == ["n", "", "é", "", "", "€", ""]
    assert generation.result().text == "né€"
    broken, steps, _ = answer("€".encode()[:2], max_tokens=2)
    assert [step.text for step in steps] == ["", "\ufffd"]
    assert broken.result().text == "\ufffd"


def test_suppressed_tokens_are_never_drawn() -> None:
    class Quiet(Bytes):
        suppressed_tokens = frozenset(b"l")

    generation = Said(Scripted(b"hello"), [1, 2, 3], DecodeConfig(max_tokens=5), vocabulary=Quiet())
    list(generation)
    tokens = bytes(generation.result().tokens[:2])
    assert tokens == b"he"
    assert ord("l") not in generation.result().tokens


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_ignore_eos_never_draws_a_stop_token(temperature: float) -> None:
    generation, _, _ = answer(
        b"ab", max_tokens=30, ignore_eos=True, temperature=temperature, seed=1
    )
    result = generation.result()
    assert result.n_tokens == 30
    assert not Bytes.stop_tokens & set(result.tokens)
    assert bytes(result.tokens[:2]) == b"ab"


def test_sampling_uses_position_and_history() -> None:
    config = DecodeConfig(temperature=2.0, seed=5, repeat_penalty=1.5, max_tokens=6)
    sequence = Scripted(b"abcdefgh")
    generation = Said(sequence, [1, 2, 3], config)
    list(generation)
    seen = [1, 2, 3]
    for row, token in zip(sequence.rows, generation.result().tokens, strict=True):
        assert Sampler(config).sample(row.logits(), seen, len(seen)).token == token
        seen.append(token)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"top_k": 7, "min_p": 0.0},
        {"ignore_eos": True},
        {"presence_penalty": 1.5, "top_k": 20},
        {"repeat_penalty": 1.1, "temperature": 0.0},
        {"logit_bias": {104: -3.0}},
    ],
)
def test_sampling_among_the_best_of_a_row_draws_as_from_all_of_it(config: dict[str, Any]) -> None:
    def run(n_top: int) -> tuple[list[int], int]:
        sequence = Scripted(b"abcdefgh", n_ctx=64)
        sequence.engine.max_top_k = n_top
        settings = DecodeConfig(**{"temperature": 3.0, "seed": 5, "max_tokens": 40, **config})
        generation = Said(sequence, [1, 2, 3], settings)
        for _ in generation:
            pass
        return list(generation.result().tokens), sum(rows.n_fetched for rows in sequence.rows)

    whole, n_whole = run(0)
    best, n_best = run(N_TOP)
    assert best == whole
    assert len(set(whole)) > 5
    assert n_whole == len(whole)
    assert n_best == 0


@pytest.mark.parametrize(
    "config", [{"top_k": 0}, {"top_k": 65}, {"repeat_penalty": 0.9}, {"temperature": 0.0}]
)
def test_draws_that_need_more_than_the_best_do_not_ask_for_them(config: dict[str, Any]) -> None:
    sequence = Scripted(b"ab")
    sequence.engine.max_top_k = N_TOP
    asked: list[int] = []
    sequence.engine.set_top_k = lambda k: bool(asked.append(k))  # type: ignore[func-returns-value]
    for _ in Said(sequence, [1, 2, 3], DecodeConfig(**{"temperature": 1.0, **config})):
        pass
    assert asked == [0]


def test_the_seed_is_reported() -> None:
    generation, _, _ = answer(b"ab", temperature=1.0, seed=77)
    assert generation.result().seed == 77
    assert answer(b"ab")[0].result().seed >= 0


@pytest.mark.parametrize("n_calls", [0, 2])
def test_a_cancelled_prefill_stops_between_micro_batches(n_calls: int) -> None:
    answers = iter([False] * n_calls + [True] * 9)
    generation, steps, sequence = answer(b"hello", cancelled=lambda: next(answers))
    assert steps == []
    assert generation.result().stop_reason == "cancelled"
    result = generation.result()
    assert (result.n_prefilled, result.n_cached) == (len(sequence.left), 0)
    assert sequence.left == [1, 2, 3][:n_calls]


def test_a_cancelled_answer_keeps_what_was_said() -> None:
    sequence = Scripted(b"hello")
    generation = Said(sequence, [1, 2, 3], DecodeConfig(), cancelled=lambda: sequence.position == 6)
    assert len(list(generation)) == 4
    assert generation.result().text == "hell"
    assert generation.result().stop_reason == "cancelled"
    assert sequence.left == [1, 2, 3, *b"hel"]


def test_closing_ends_the_answer() -> None:
    generation = Said(Scripted(b"hello"), [1], DecodeConfig())
    next(generation)
    generation.close()
    assert list(generation) == []


@pytest.mark.parametrize(
    ("there", "n_cached"),
    [([], 0), ([1, 2], 2), ([1, 2, 3], 2), ([1, 2, 3, 4], 2), ([1, 9, 3], 1), ([9, 2, 3], 0)],
)
def test_what_the_sequence_holds_of_the_prompt_is_not_computed_again(
    there: list[int], n_cached: int
) -> None:
    sequence = Scripted(b"hello")
    sequence.tokens = there
    seen: list[tuple[int, int]] = []
    generation = Said(
        sequence,
        [1, 2, 3],
        DecodeConfig(),
        on_prefill=lambda *progress: seen.append(progress),
    )
    list(generation)
    assert generation.result().text == "hello"
    assert (generation.result().n_prompt, generation.result().n_prefilled) == (3, 3 - n_cached)
    n_new = 3 - n_cached
    assert seen == [(done, n_new) for done in range(n_new + 1)]
