"""What answers leave behind: a found prefix gives the tokens of a computed one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS, VOCAB_SIZE
from device import DEVICE
from pairs import N_UBATCH, make_pair, open_decoder, random_tokens

from dflash_gguf.kv_cache import prefix_cache
from dflash_gguf.kv_cache.prefix_cache import PrefixCache
from dflash_gguf.native import Sequence
from dflash_gguf.text.chat import ChatPrompt

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")


SETTINGS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 5}


def turns(n: int) -> list[list[int]]:
    """What is asked in the turns of a conversation, most of it short."""
    return [random_tokens(70 if turn == 0 else 5 + 7 * (turn % 4), seed=turn) for turn in range(n)]


@pytest.mark.parametrize("kind", KINDS)
def test_found_prefixes_give_the_tokens_of_computed_ones(tmp_path: Path, kind: str) -> None:
    """A request five times, a chat of ten turns, its last turn regenerated and edited."""
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
            # The last token of an answer is not in the caches.
            assert result.n_cached == max(0, n_before - 1)
            text += result.tokens
        n = len(text) - len(result.tokens)
        assert same(text[:n], "chain").n_cached == n - 1  # regenerated
        edited = [*text[: n - 10], *random_tokens(12, seed=77)]
        n_cached = same(edited).n_cached
        divides = found.engine.partial_prefix_ok
        assert n_cached == n - 10 if divides else 0 < n_cached <= n - 10
        again = [*edited[:-1], (edited[-1] + 1) % VOCAB_SIZE]
        assert same(again).n_cached == len(again) - 1
        if not divides:  # where they parted all is kept now, if it was worth it
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
            begun = found._prefix_cache.start(found.sequence, tokens)
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
        assert decoder.generate(prompt, **SETTINGS).n_cached == 149
        batch = decoder.generate_batch(  # none waits for another that computes its prompt
            [prompt] * 3, cache_prompt=[True, False, False], **SETTINGS
        )
        assert [one.n_cached for one in batch] == [149, 0, 0]


def test_turns_of_a_chat_are_kept(tmp_path: Path) -> None:
    """Where the last user turn begins and ends, whatever a client puts in its place."""
    with open_decoder(make_pair(tmp_path, "qwen35")) as decoder:
        prompt = random_tokens(120, seed=8)
        decoder.generate(ChatPrompt(prompt, None, [70, 110]), **SETTINGS)
        for n in (70, 110):
            other = [*prompt[:n], (prompt[n] + 1) % VOCAB_SIZE, *random_tokens(9, seed=n)]
            assert decoder.generate(other, **SETTINGS).n_cached == n


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
def test_sixteen_share_a_system_prompt(tmp_path: Path, kind: str) -> None:
    """In a pool that holds the prompt once, but not sixteen times."""
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
    """It remembers rows of each of them: who has the most gives up its oldest."""
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
    """Wherever it parts from the next one, about the ends of pages too."""
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
    """The older of two that begin alike goes to main memory, and part of the newer with it."""
    pair = make_pair(tmp_path, "llama")
    common = random_tokens(128, seed=1)
    first, second = ([*common, *random_tokens(20 + i, seed=2 + i)] for i in range(2))
    with open_decoder(pair) as found, open_decoder(pair) as fresh:
        for prompt in (first, second, random_tokens(388, seed=5)):  # which wants nearly all cells
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
    """Forks, evictions and spills in a pool of 512 cells; some prefixes held by others."""
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
        assert engine.offload(512, 1 << 30, kept[0])
        assert engine.n_free_cells == 512 - 192
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


def test_of_rows_in_cells_the_longest_unused_go_first(tmp_path: Path) -> None:
    with open_decoder(make_pair(tmp_path, "llama")) as decoder:
        engine, sequence = decoder.engine, decoder.sequence
        kept = []
        for seed in range(3):
            sequence.prefill(random_tokens(128, seed=seed)).argmax()
            kept.append(sequence.snapshot())
            sequence.reset()
        sequence.attach(kept[0], 64)  # of it the first page alone
        sequence.reset()

        def moved() -> list[int]:
            return [prefix.cells_needed(128) for prefix in kept]

        for expected in ([64, 0, 0], [64, 64, 0], [64, 128, 0], [64, 128, 64], [64, 128, 128]):
            assert engine.offload(1, 1 << 30)
            assert moved() == expected
        for prefix in kept:
            prefix.close()


# --- the store itself ----------------------------------------------------------------------------


class Model:
    """An engine, a sequence and prefixes in numbers: pages of 64 tokens have holders."""

    cell_bytes = 8

    def __init__(self, n_pages: int, *, divides: bool) -> None:
        self.partial_prefix_ok = divides
        self.n_pages = n_pages
        self.n_in_place = self.n_asked = 0
        self.prefixes: set[ModelPrefix] = set()
        self.lines: list[ModelLine] = []

    @property
    def n_free_cells(self) -> int:
        held = {page for one in (*self.prefixes, *self.lines) for page in one.pages}
        n_here = sum(page.is_here for page in held)
        return (self.n_pages - n_here) * 64 - sum(line.n_own for line in self.lines)

    @property
    def prefix_bytes(self) -> int:
        kept = {page for one in self.prefixes for page in one.pages}
        n_spilled = sum(not page.is_here for page in kept)
        ends = sum(one.n_tokens % 64 * Model.cell_bytes + 50 for one in self.prefixes)
        return n_spilled * PAGE_BYTES + ends

    def offload(self, n_cells: int, n_bytes: int, spared: Any = None) -> bool:
        self.n_asked += 1
        stay = {page for line in self.lines for page in line.pages}
        stay.update(spared.pages if spared is not None else ())
        for page in {page: None for one in self.prefixes for page in one.pages}:
            if page.is_here and page not in stay and n_cells > 0:
                if n_bytes < PAGE_BYTES:
                    return False
                page.is_here = False
                n_cells, n_bytes = n_cells - 64, n_bytes - PAGE_BYTES
        return True


PAGE_BYTES = 64 * Model.cell_bytes


class Page:
    """Of 64 tokens: in the pool, or moved to main memory."""

    def __init__(self) -> None:
        self.is_here = True


class ModelLine:
    def __init__(self, engine: Model) -> None:
        self.engine = engine
        self.tokens = np.empty(0, dtype=np.int32)
        self.pages: list[Page] = []
        self.n_own = 0
        engine.lines.append(self)

    @property
    def position(self) -> int:
        return len(self.tokens)

    def append(self, tokens: list[int]) -> bool:
        wanted = self.cells_needed(len(tokens))
        if wanted > self.engine.n_free_cells:
            return False
        self.tokens = np.append(self.tokens, np.asarray(tokens, dtype=np.int32))
        self.n_own += wanted
        return True

    def cells_needed(self, n: int) -> int:
        return max(0, -(-(len(self.tokens) + n) // 64) * 64 - len(self.pages) * 64 - self.n_own)

    def snapshot_bytes(self) -> int:
        return len(self.tokens) % 64 * Model.cell_bytes + 50

    def keep(self) -> ModelPrefix:
        while len(self.pages) < len(self.tokens) // 64:
            self.pages.append(Page())
            self.n_own -= 64
        return ModelPrefix(self.engine, self)

    def attach(self, prefix: ModelPrefix, n: int) -> None:
        assert not prefix.is_closed
        assert n == prefix.n_tokens or self.engine.partial_prefix_ok
        if len(self.tokens):
            np.testing.assert_array_equal(self.tokens[:n], prefix.tokens[:n])
            self.engine.n_in_place += 1
            self.pages, self.n_own = [], 0
        assert prefix.cells_needed(n) <= self.engine.n_free_cells
        self.pages = prefix.pages[: n // 64]
        for page in self.pages:
            page.is_here = True
        self.tokens = prefix.tokens[:n]
        self.n_own = 64 if n % 64 else 0

    def reset(self) -> None:
        self.tokens, self.pages, self.n_own = np.empty(0, dtype=np.int32), [], 0


class ModelPrefix:
    n_draft = 0

    def __init__(self, engine: Model, line: ModelLine) -> None:
        self.engine, self.tokens = engine, line.tokens
        self.pages = list(line.pages)
        self.n_tokens = self.n_proven = len(line.tokens)
        self.is_closed = False
        engine.prefixes.add(self)

    def info(self) -> ModelPrefix:
        assert not self.is_closed
        return self

    def cells_needed(self, n: int) -> int:
        n_spilled = sum(not page.is_here for page in self.pages[: n // 64])
        return n_spilled * 64 + (64 if n % 64 else 0)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.engine.prefixes.remove(self)


def test_room_is_found_without_asking_every_prefix() -> None:
    engine = Model(40, divides=True)
    store = PrefixCache(engine, 1 << 20)
    line = ModelLine(engine)
    for i in range(300):
        tokens = [i, *range(64)]
        assert store.start(line, tokens).n_cached == 0
        assert store.make_room(128)
        assert line.append(tokens)
        store.release(line)
    assert len(store) == 300
    assert engine.n_asked < 300
    engine.n_asked = 0
    assert store.make_room(39 * 64)
    assert not store.make_room(41 * 64)
    assert engine.n_asked == 2
    assert len(store) == 300


def test_what_is_too_large_to_be_kept_takes_nothing_of_others() -> None:
    engine = Model(40, divides=True)
    store = PrefixCache(engine, 300)
    lines = [ModelLine(engine) for _ in range(2)]
    for line, n in zip(lines, (64 + 10, 64 + 40), strict=True):
        assert line.append(random_tokens(n, seed=n))
        store.release(line)
    assert [prefix.n_tokens for prefix in store] == [64 + 10]


@pytest.mark.parametrize("divides", [True, False])
def test_ten_thousand_random_operations(divides: bool) -> None:
    """Never above the limit, no leak, nothing found that is not there, all that is known found."""
    rng = np.random.default_rng(3)
    engine = Model(40, divides=divides)
    store = PrefixCache(engine, 6_000)
    lines = [ModelLine(engine) for _ in range(4)]
    resting: list[ModelLine] = []
    store.parked = lambda: resting
    texts: list[list[int]] = [[]]
    n_found = n_dropped = 0
    for i in range(5000):
        line = lines[int(rng.integers(4))]
        text = texts[int(rng.integers(len(texts)))]
        cut = int(rng.integers(len(text) + 1))
        tokens = [*text[:cut], *rng.integers(0, 3, int(rng.integers(1, 150))).tolist()][:500]
        way = int(rng.integers(10))
        if way < 7 and line in resting:
            resting.remove(line)
        if way < 4:
            known = {bytes(prefix.tokens[: prefix.n_tokens]) for prefix in engine.prefixes}
            begun = store.start(line, tokens)
            n_found += begun.n_cached > 0
            assert begun.n_cached < len(tokens)
            np.testing.assert_array_equal(line.tokens, tokens[: begun.n_cached])
            ids = np.asarray(tokens, dtype=np.int32)
            if not divides and begun.n_cached:
                assert bytes(ids[: begun.n_cached]) in known | {
                    bytes(prefix.tokens) for prefix in engine.prefixes
                }
            assert list(begun.snapshot_positions) == sorted(set(begun.snapshot_positions))
            assert all(begun.n_cached < stop < len(tokens) for stop in begun.snapshot_positions)
            if store.make_room(len(tokens) + 64):
                line.append(tokens[begun.n_cached :])
            texts = [*texts, tokens][-6:]
        elif way < 7 and line.position:
            store.insert(line)
        elif way == 7 and i % 2:
            store.release(line)
            assert not line.position
        elif way == 7:
            store.park(line)
            assert store.nearest([line], [*line.tokens, 1]) is line
            resting = [one for one in (*resting, line) if one is not line] + [line]
        elif way == 8:
            n_cells = int(rng.integers(40 * 64))
            assert store.make_room(n_cells) == (engine.n_free_cells >= n_cells)
        else:
            n_dropped += store.forget_text(text)
        assert engine.prefix_bytes <= store.limit
        assert set(store) == engine.prefixes
        assert engine.n_free_cells >= 0
    assert n_found > (200 if divides else 80)
    assert n_dropped > 5
    assert engine.n_in_place > 20
    for line in lines:
        line.reset()
    store.forget()
    assert not engine.prefixes
    assert not store._root.children
    assert engine.n_free_cells == 40 * 64
