"""Answers from cached prefixes equal computed ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CLASSES, VOCAB_SIZE
from device import DEVICE
from pairs import N_UBATCH, make_pair, open_decoder, random_tokens

from dflash_gguf.kv_cache import prefix_cache
from dflash_gguf.native import Sequence
from dflash_gguf.text.chat import ChatPrompt

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")


SETTINGS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 5}


def turns(n: int) -> list[list[int]]:
    return [random_tokens(70 if turn == 0 else 5 + 7 * (turn % 4), seed=turn) for turn in range(n)]


@pytest.mark.parametrize("kind", CLASSES)
def test_found_prefixes_give_the_tokens_of_computed_ones(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    with open_decoder(pair) as found, open_decoder(pair) as fresh:

        def same(prompt: list[int], draft: str = "tree") -> Any:
            fresh.reset()
            expected = fresh.generate(prompt, draft="none", **SETTINGS)
            assert expected.n_cached == 0
            result = found.generate(prompt, draft=draft, **SETTINGS)
            assert result.tokens == expected.tokens
            return result

        prompt = random_tokens(150, seed=99)
        assert [same(prompt).n_cached for _ in range(5)] == [0, 149, 149, 149, 149]
        text: list[int] = []
        for turn in turns(10):
            n_before, text = len(text), [*text, *turn]
            result = same(text)
            # The last token of an answer is not in the caches yet.
            assert result.n_cached == max(0, n_before - 1)
            text += result.tokens
        n = len(text) - len(result.tokens)
        assert same(text[:n], "chain").n_cached == n - 1
        edited = [*text[: n - 10], *random_tokens(12, seed=77)]
        n_cached = same(edited).n_cached
        divides = found.engine.partial_prefix_ok
        assert n_cached == n - 10 if divides else 0 < n_cached <= n - 10
        again = [*edited[:-1], (edited[-1] + 1) % VOCAB_SIZE]
        assert same(again).n_cached == len(again) - 1
        if not divides:
            third = [*text[: n - 10], *random_tokens(9, seed=78)]
            parted = n - 10 - n_cached >= prefix_cache.MIN_BRANCH
            assert same(third).n_cached == (n - 10 if parted else n_cached)


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
def test_drafts_after_a_hit_are_those_of_a_fresh_sequence(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    prompt, longer = random_tokens(140), random_tokens(30, seed=3)
    with open_decoder(pair) as found, open_decoder(pair) as fresh:
        for store in (found._prefix_cache, fresh._prefix_cache):
            assert not len(store)
        found.generate(prompt, **SETTINGS)
        found.generate(random_tokens(20, seed=1), **SETTINGS)
        for tokens in (prompt, [*prompt[:-1], *longer]):
            match = found._prefix_cache.match(tokens)
            begun = found._prefix_cache.start(found.sequence, match)
            assert begun.n_cached == begun.n_draft_context == len(prompt) - 1
            fresh.sequence.reset()
            rows = [
                sequence.prefill(tokens[n:]).logits()
                for sequence, n in ((found.sequence, begun.n_cached), (fresh.sequence, 0))
            ]
            np.testing.assert_array_equal(*rows)
            drafts = [x.sequence.draft(7, 5, 8) for x in (found, fresh)]
            for a, b in zip(*drafts, strict=True):
                np.testing.assert_array_equal(a, b)
            found.sequence.reset()
        results = [
            x.generate(prompt, draft="tree", tree_budget=12, max_tokens=340, ignore_eos=True)
            for x in (found, fresh)
        ]
        assert results[0].n_cached == len(prompt) - 1
        assert results[0].n_draft_context == len(prompt) - 1
        assert results[0].tokens == results[1].tokens
        assert results[0].accept_histogram == results[1].accept_histogram
        assert results[0].rounds >= 200


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
def test_an_answer_may_begin_with_nothing_and_others_lose_nothing(
    tmp_path: Path, kind: str, n_parallel: int
) -> None:
    pair = make_pair(tmp_path, kind)
    prompt, other = random_tokens(150), random_tokens(120, seed=1)
    with open_decoder(pair, n_parallel) as decoder:
        expected = [decoder.generate(text, **SETTINGS) for text in (prompt, other)]
        fresh = decoder.generate(prompt, cache_prompt=False, **SETTINGS)
        assert (fresh.n_cached, fresh.n_prefilled) == (0, 150)
        for text, first in zip((prompt, other), expected, strict=True):
            again = decoder.generate(text, **SETTINGS)
            assert (again.n_cached, again.tokens) == (len(text) - 1, first.tokens)
        assert fresh.tokens == expected[0].tokens
        decoder.reset()
        decoder.generate(prompt, cache_prompt=False, **SETTINGS)
        assert decoder._speculative.proposers[-1]._memories == {}
        assert decoder.generate(prompt, **SETTINGS).n_cached == 0
        batch = decoder.generate_batch([prompt] * 3, cache_prompt=[True, False, False], **SETTINGS)
        assert [one.n_cached for one in batch] == [149, 0, 0]


def test_turns_of_a_chat_are_kept(tmp_path: Path) -> None:
    with open_decoder(make_pair(tmp_path, "qwen35")) as decoder:
        prompt = random_tokens(120, seed=8)
        decoder.generate(ChatPrompt(prompt, None, [70, 110]), **SETTINGS)
        for n in (70, 110):
            other = [*prompt[:n], (prompt[n] + 1) % VOCAB_SIZE, *random_tokens(9, seed=n)]
            assert decoder.generate(other, **SETTINGS).n_cached == n


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
def test_sixteen_share_a_system_prompt(tmp_path: Path, kind: str) -> None:
    """The pool holds the system prompt once, but not 16 times."""
    pair = make_pair(tmp_path, kind)
    system = random_tokens(200, seed=50)
    prompts = [[*system, *random_tokens(6 + i, seed=i)] for i in range(16)]
    with open_decoder(pair) as one:
        expected = [one.generate(prompt, draft="none", **SETTINGS).tokens for prompt in prompts]
    with open_decoder(pair, 16, 2048) as many:
        n_passes = many.engine.info().n_passes
        results = many.generate_batch(prompts, draft="tree", **SETTINGS)
        assert [result.tokens for result in results] == expected
        assert sum(result.n_cached >= len(system) for result in results) == 15
        assert many.engine.info().n_passes - n_passes < 16 * len(system) // N_UBATCH
        again = many.generate_batch(prompts, draft="none", **SETTINGS)
        assert [result.tokens for result in again] == expected
        assert all(result.n_prefilled == 1 for result in again)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_what_many_share_is_more_than_a_drafter_holds(tmp_path: Path, kind: str) -> None:
    """The drafter keeps rows per sequence: the largest one gives up its oldest rows."""
    pair = make_pair(tmp_path, kind)
    system = random_tokens(1500, seed=50)
    prompts = [[*system, *random_tokens(6 + i, seed=i)] for i in range(8)]
    with open_decoder(pair, 1, 2048) as one, open_decoder(pair, 8, 2048) as many:
        expected = [one.generate(prompt, draft="none", **SETTINGS).tokens for prompt in prompts]
        for _ in range(2):
            results = many.generate_batch(prompts, draft="tree", **SETTINGS)
            assert [result.tokens for result in results] == expected
            assert sum(result.n_cached >= len(system) for result in results) >= 7


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("n_ubatch", [1, 63, 64, 65])
def test_a_prompt_that_was_cut_short_is_begun_with(
    tmp_path: Path, n_ubatch: int, n_parallel: int
) -> None:
    pair = make_pair(tmp_path, "llama")
    prompt = random_tokens(200, seed=3)
    with (
        open_decoder(pair, n_parallel, n_ubatch=n_ubatch) as found,
        open_decoder(pair, n_parallel, n_ubatch=n_ubatch) as fresh,
    ):
        for n_done in (1, 2, 63, 64, 65, 129):
            found.reset()
            fresh.reset()
            done = [0]
            result = found.generate(
                prompt,
                cancelled=lambda done=done, n=n_done: done[0] >= n,
                on_prefill=lambda n, _, done=done: done.__setitem__(0, n),
                **SETTINGS,
            )
            assert result.tokens == ()
            text = [*prompt[: min(n_done, done[0])], *random_tokens(9, seed=4)]
            expected = fresh.generate(text, draft="none", **SETTINGS)
            again = found.generate(text, draft="tree", **SETTINGS)
            assert again.tokens == expected.tokens
            assert again.n_cached == min(n_done, done[0])


def test_room_is_made_at_the_cost_of_rows_that_two_prefixes_have(tmp_path: Path) -> None:
    """The older of two overlapping prefixes goes to host memory, with part of the newer."""
    pair = make_pair(tmp_path, "llama")
    common = random_tokens(128, seed=1)
    first, second = ([*common, *random_tokens(20 + i, seed=2 + i)] for i in range(2))
    with open_decoder(pair) as found, open_decoder(pair) as fresh:
        for prompt in (first, second, random_tokens(388, seed=5)):
            found.generate(prompt, draft="none", **SETTINGS)
        text = [*second, *random_tokens(5, seed=6)]
        expected = fresh.generate(text, draft="none", **SETTINGS)
        result = found.generate(text, draft="tree", **SETTINGS)
        assert result.tokens == expected.tokens
        assert result.n_cached >= 128


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
@pytest.mark.parametrize("n_bytes", [0, 150_000, 1_000_000])
def test_any_use_stays_below_the_limit_and_leaks_nothing(
    tmp_path: Path, kind: str, n_bytes: int
) -> None:
    pair = make_pair(tmp_path, kind)
    rng = np.random.default_rng(n_bytes)
    with open_decoder(pair, 3, n_bytes=n_bytes) as many, open_decoder(pair, n_bytes=0) as alone:
        store, engine = many._prefix_cache, many.engine
        texts = [random_tokens(30, seed=i) for i in range(3)]
        n_cached = n_spilled = 0
        for _ in range(30):
            start = texts[int(rng.integers(len(texts)))]
            n = int(rng.integers(1, len(start) + 1))
            new = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 60))).tolist()
            prompts = [[*start[:n], *new][:150], start, [*start[:n], *new[:3]]][: 1 + n % 3]
            results = many.generate_batch(prompts, draft="tree", **SETTINGS)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.tokens == alone.generate(prompt, draft="none", **SETTINGS).tokens
                n_cached += result.n_cached
                texts = [*texts, [*prompt, *result.tokens][:150]][-8:]
            assert engine.prefix_bytes <= n_bytes
            n_spilled += any(prefix.cells_needed(prefix.n_tokens) > 64 for prefix in store)
        assert n_cached > 100 or n_bytes < 1_000_000
        assert n_cached == 0 or n_bytes > 0
        assert n_spilled > 0 or n_bytes < 1_000_000
        many.reset()
        assert (engine.prefix_bytes, engine.n_free_cells, len(store)) == (0, 512, 0)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_rows_that_two_sequences_kept_are_idle_when_both_are_gone(
    tmp_path: Path, kind: str
) -> None:
    with open_decoder(make_pair(tmp_path, kind), 2) as decoder:
        engine, first = decoder.engine, decoder.sequence
        second = Sequence(engine)
        first.prefill(random_tokens(200)).argmax()
        common = first.snapshot()
        second.attach(common, 200)
        common.close()
        kept = [one.snapshot() for one in (first, second)]
        for one in (first, second):
            one.reset()
        assert engine.n_free_cells == 512 - 192
        assert not engine.offload(512, 0)
        kept[0].keep_in_cells(True)
        assert engine.offload(512, 1 << 30)
        assert engine.n_free_cells == 512 - 192
        kept[0].keep_in_cells(False)
        assert engine.offload(64, 1 << 30)
        assert engine.n_free_cells == 512 - 128
        assert [prefix.cells_needed(192) for prefix in kept] == [64, 64]
        assert engine.offload(512, 1 << 30)
        assert engine.n_free_cells == 512
        n_bytes = engine.prefix_bytes
        kept[1].close()
        assert 0 < engine.prefix_bytes <= n_bytes
        first.attach(kept[0], 200)
        assert np.isfinite(first.decode(5).logits()).all()
        for one in (kept[0], first, second):
            one.close()
        assert (engine.prefix_bytes, engine.n_free_cells) == (0, 512)


def test_of_prefixes_in_cells_the_longest_unused_go_first(tmp_path: Path) -> None:
    """Rows shared with a prefix that stays are not offloaded."""
    with open_decoder(make_pair(tmp_path, "llama")) as decoder:
        store, sequence = decoder._prefix_cache, decoder.sequence
        texts = [random_tokens(128, seed=seed) for seed in range(3)]
        texts.append([*texts[0][:64], *random_tokens(64, seed=3)])
        for text in texts:
            start = store.start(sequence, store.match(text)).n_cached
            sequence.prefill(text[start:]).argmax()
            store.release(sequence)
        kept = [store.find(text) for text in texts]

        def moved() -> list[int]:
            return [-1 if prefix is None else prefix.cells_needed(128) for prefix in kept]

        n_free = decoder.engine.n_free_cells
        for n, expected in (
            (64, [0, 64, 0, 0]),
            (256, [0, 128, 128, 0]),
            (320, [64, 128, 128, 0]),
            (448, [128, 128, 128, 128]),
        ):
            assert store.make_room(n_free + n)
            assert moved() == expected
