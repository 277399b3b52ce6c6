"""Non-finite numbers do not spread: the next prompt is answered as by a fresh sequence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import Parts, edited, spoil
from pairs import Pair, make_pair, open_decoder, random_tokens

from dflash_gguf.config import DecodeConfig, LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import BatchEntry, Drafter, Engine, Error, Model, Sequence
from dflash_gguf.sampling.sampler import Sampler
from dflash_gguf.speculative.cost_model import Round

BAD = 5
"""Token with a non-finite embedding."""
CLEAN = [token + (token == BAD) for token in random_tokens(90)]
POISONED = [*CLEAN[:20], BAD, *CLEAN, *CLEAN[:60]]
NOT_FINITE = "the logits of row 0 are not finite numbers; the sequence is now empty"
READS: dict[str, Callable[[Sequence], Any]] = {
    "argmax": lambda sequence: sequence.prefill(POISONED).argmax(),
    "logits": lambda sequence: sequence.prefill(POISONED).logits(),
    "decode": lambda sequence: (sequence.prefill(CLEAN[:9]), sequence.decode(BAD).argmax()),
    "verify": lambda sequence: (
        sequence.prefill(CLEAN[:9]),
        sequence.verify([BAD, 1, 2]).argmax(0),
    ),
}


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=[np.nan, np.inf])
def poisoned(
    pair: Pair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """A pair whose target has a non-finite embedding of BAD."""
    path = tmp_path_factory.mktemp("poisoned") / "target.gguf"
    return replace(
        pair, target=edited(pair.target, path, spoil("token_embd.weight", request.param, BAD))
    )


def start(pair: Pair, **settings: Any) -> Sequence:
    # More rows than our kernels take: ggml's multiply masked values by 0, and 0 * NaN is NaN.
    config = LoadConfig(**{"n_ctx": 256, "n_ubatch": 128, "n_threads": 1, **settings})
    model = Model(str(pair.target), config)
    return Sequence(Engine(model, drafter=Drafter(str(pair.drafter), model)))


def assert_like_fresh(sequence: Sequence, pair: Pair, **settings: Any) -> None:
    """Compares a prompt's row, a draft and a verify with those of a fresh sequence."""

    def says(sequence: Sequence) -> list[Any]:
        found = [sequence.prefill(CLEAN).logits(), *sequence.draft(7, 3, 4)]
        rows = sequence.verify_tree([7, 8, 9], [-1, 0, 0])
        found += [rows.logits(node) for node in range(3)]
        sequence.commit_path([0, 2])
        return [*found, sequence.decode(4).logits()]

    for found, expected in zip(says(sequence), says(start(pair, **settings)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
def test_the_next_prompt_is_right(poisoned: Pair, cache_type: str, read: str) -> None:
    settings = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    sequence = start(poisoned, **settings)
    sequence.prefill(CLEAN[:8]).argmax()
    with pytest.raises(Error, match=NOT_FINITE):
        READS[read](sequence)
    assert sequence.position == 0
    assert_like_fresh(sequence, poisoned, **settings)


def test_rows_of_all_tokens_are_checked(poisoned: Pair) -> None:
    sequence = start(poisoned)
    with pytest.raises(Error, match=r"the logits of row \d+ are not finite"):
        sequence.logits(POISONED)
    assert sequence.position == 0
    assert_like_fresh(sequence, poisoned)


@pytest.mark.parametrize("n_ubatch", [7, 100])
def test_a_prompt_ends_at_the_first_rows_that_are_not_finite(poisoned: Pair, n_ubatch: int) -> None:
    sequence = start(poisoned, n_ubatch=n_ubatch)
    sequence.prefill(CLEAN[:8])
    done: list[int] = []
    with pytest.raises(Error, match=NOT_FINITE):
        sequence.prefill(POISONED, lambda n, _: done.append(n))
    assert done == list(range(n_ubatch, 21, n_ubatch))
    assert sequence.position == 0
    assert_like_fresh(sequence, poisoned, n_ubatch=n_ubatch)


def test_a_piece_of_a_prompt_is_not_finite_beside_others(poisoned: Pair) -> None:
    settings = {"n_parallel": 3, "n_ctx": 768}
    sequence = start(poisoned, **settings)
    others = [Sequence(sequence.engine) for _ in range(2)]
    fresh = start(poisoned, **settings)
    for one in (sequence, *others, fresh):
        one.prefill(CLEAN[:9])
    kept = others[0].snapshot()
    sequence.attach(kept, 9)
    pieces = [BatchEntry(sequence, POISONED[:30], n_remaining=9), BatchEntry(others[1], [4])]
    bad, good = sequence.engine.run([*pieces, BatchEntry(others[0], [4, 5], is_verify=True)])[:2]
    good.check()
    expected = fresh.decode(4).logits()
    np.testing.assert_array_equal(good.logits(), expected)
    assert (sequence.position, others[1].position) == (0, 10)
    with pytest.raises(Error, match=NOT_FINITE):
        bad.check()
    bad.check()
    others[0].commit(1)
    sequence.attach(kept, 9)
    np.testing.assert_array_equal(sequence.decode(4).logits(), expected)
    expected = fresh.decode(6).logits()
    for one in (sequence, *others):
        np.testing.assert_array_equal(one.decode(6).logits(), expected)


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("path", [[0, 1], [0], []])
def test_a_branch_that_is_not_finite_leaves_nothing_in_its_cells(
    poisoned: Pair, path: list[int], cache_type: str
) -> None:
    settings = {"cache_type_k": cache_type, "cache_type_v": cache_type}

    def says(branch: int) -> list[Any]:
        sequence = start(poisoned, **settings)
        sequence.prefill(CLEAN).argmax()
        rows = sequence.verify_tree([7, 8, branch, 9, 10, 11], [-1, 0, 0, 2, 3, 4])
        found = [rows.logits(node) for node in path]
        sequence.commit_path(path)
        sequence.reset()
        return [*found, sequence.prefill(CLEAN[:80]).logits()]

    for found, expected in zip(says(BAD), says(10), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_minus_infinity_bans_a_token(pair: Pair, tmp_path: Path) -> None:
    """Some logits of a row may be -inf, but not all."""

    def ban(parts: Parts) -> None:
        values = np.array(parts.tensors["output_norm.weight"][0])
        head = np.array(parts.tensors["output.weight"][0])
        head[3:, 0] = 0.0
        head[:3] = 0.0
        head[:3, 0] = -np.inf
        parts.f32("output.weight", head)
        parts.f32("output_norm.weight", np.abs(values))

    banned = replace(pair, target=edited(pair.target, tmp_path / "banned.gguf", ban))
    sequence = start(banned)
    seen = set()
    for token in CLEAN[:8]:
        try:
            rows = sequence.decode(token)
            row = rows.logits()
        except Error:  # a negative first hidden value gives logits of +inf
            seen.add("inf")
            continue
        seen.add("-inf")
        assert np.isneginf(row[:3]).all()
        assert rows.argmax() == row.argmax()
    assert seen == {"inf", "-inf"}


@pytest.mark.parametrize("n_probs", [0, 1])
def test_a_scored_prompt_fails_alone(poisoned: Pair, n_probs: int) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "draft": "none"}
    scored = {"n_probs": n_probs, "prompt_logprobs": True, "cache_prompt": False}
    with open_decoder(poisoned, 2) as decoder:
        honest = decoder.add_request(decoder.request(CLEAN[:20], **settings))
        decoder.step()
        bad = decoder.add_request(decoder.request(POISONED, **settings, **scored))
        while not (honest.is_finished and bad.is_finished):
            decoder.step()
            honest.steps.clear()
        assert (honest.error, len(honest.output.tokens)) == (None, 20)
        assert bad.error is not None


def test_a_decoder_answers_the_next_prompt(poisoned: Pair) -> None:
    decoder = Decoder(start(poisoned), None)
    fresh = Decoder(start(poisoned), None)
    settings: dict[str, Any] = {"max_tokens": 12, "draft": "tree"}
    expected = fresh.generate(CLEAN, **settings)
    assert decoder.generate(CLEAN, **settings).tokens == expected.tokens
    for temperature in (0.0, 0.8):
        with pytest.raises(Error, match=NOT_FINITE):
            decoder.generate(POISONED, temperature=temperature, **settings)
        for n_computed in (1, len(CLEAN)):
            found = decoder.generate(CLEAN, **settings)
            assert found.tokens == expected.tokens
            assert found.n_prefilled == n_computed
            decoder.reset()
        decoder.generate(CLEAN, **settings)


@pytest.mark.parametrize("draft", ["chain", "tree", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_fails_is_said_once_and_left(
    pair: Pair, tmp_path: Path, draft: str, temperature: float
) -> None:
    broken = edited(pair.drafter, tmp_path / "nan.gguf", spoil("enc.output_norm.weight", np.nan))
    sequence = start(replace(pair, drafter=broken))
    decoder = Decoder(sequence, None)
    settings: dict[str, Any] = {"temperature": temperature, "seed": 4, "max_tokens": 40}
    expected = decoder.generate(CLEAN, draft="none", **settings)
    for _ in range(2):
        for _ in range(300):
            decoder._speculative._auto.observe(Round(len(CLEAN), n_tokens=1, pass_s=1.0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = decoder.generate(CLEAN, draft=draft, draft_type="dflash", **settings)
        assert found.tokens == expected.tokens
        assert found.n_drafted == 0
        assert [str(x.message) for x in caught] == [
            "the drafter's scores are not finite numbers: decoding goes on without it"
        ]


def test_a_draw_stops_before_a_row_that_is_not_finite(poisoned: Pair) -> None:
    sequence = start(poisoned)
    last = sequence.prefill(CLEAN[:9]).argmax()
    greedy, sampled = Sampler(DecodeConfig()), Sampler(DecodeConfig(temperature=1.0, seed=1))
    for drawer in (greedy, sampled):
        sequence.verify([last, BAD])
        (drawn,) = sequence.engine.sample([drawer.sample_request(sequence, [*CLEAN[:9], last], 2)])
        assert len(drawn) == 1
        sequence.commit(0)
        rows = sequence.verify([BAD, 1, 2])
        assert sequence.engine.sample([drawer.sample_request(sequence, [*CLEAN[:9], BAD], 3)]) == [
            []
        ]
        assert sequence.position == 9
        if drawer is greedy:
            sequence.commit(0)
    with pytest.raises(Error, match="the logits of row 0 are not finite numbers"):
        rows.logits(0)
    assert sequence.position == 0
    sequence.prefill(CLEAN[:9])
    sequence.verify([last, BAD])
    with pytest.raises(Error, match="the logits of row 1 are not finite numbers"):
        sequence.commit(2)
    assert sequence.position == 0
