"""The prefix cache with a made-up engine."""

from __future__ import annotations

import numpy as np
import pytest
from pairs import random_tokens

from dflash_gguf.kv_cache.prefix_cache import PrefixCache
from dflash_gguf.text.stream import n_common


class Model:
    """A made-up engine, whose sequences and prefixes only count holders of 64-token pages."""

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

    def offload(self, n_cells: int, n_bytes: int) -> bool:
        self.n_asked += 1
        stay = {page for line in self.lines for page in line.pages}
        stay |= {page for one in self.prefixes if one.is_kept for page in one.pages}
        for page in {page: None for one in self.prefixes for page in one.pages}:
            if page.is_here and page not in stay and n_cells > 0:
                if n_bytes < PAGE_BYTES:
                    return False
                page.is_here = False
                n_cells, n_bytes = n_cells - 64, n_bytes - PAGE_BYTES
        return True


PAGE_BYTES = 64 * Model.cell_bytes


class Page:
    """A page of 64 tokens, in the pool or in host memory."""

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

    def snapshot(self) -> ModelPrefix:
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
        self.n_tokens = len(line.tokens)
        self.is_closed = self.is_kept = False
        engine.prefixes.add(self)

    def keep_in_cells(self, keeps: bool) -> None:
        assert not self.is_closed
        self.is_kept = keeps

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
        assert store.start(line, store.match(tokens)).n_cached == 0
        assert store.make_room(128)
        assert line.append(tokens)
        store.release(line)
    assert len(store) == 300
    assert engine.n_asked < 3 * 300
    engine.n_asked = 0
    assert store.make_room(39 * 64)
    assert engine.n_asked <= 40
    assert not store.make_room(41 * 64)
    assert engine.n_asked <= 42
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
    rng = np.random.default_rng(3)
    engine = Model(40, divides=divides)
    store = PrefixCache(engine, 6_000)
    lines = [ModelLine(engine) for _ in range(4)]
    resting: list[ModelLine] = []
    store.parked = lambda: resting
    started: dict[str, list[list[int]]] = {"a": [], "b": []}
    n_found = n_dropped = 0
    for i in range(10_000):
        line = lines[int(rng.integers(4))]
        scope = "aaab"[int(rng.integers(4))]
        text = (started[scope] or [[]])[-int(rng.integers(1, 7)) :][0]
        cut = int(rng.integers(len(text) + 1))
        tokens = [*text[:cut], *rng.integers(0, 3, int(rng.integers(1, 150))).tolist()][:500]
        way = int(rng.integers(10))
        if way < 7 and line in resting:
            resting.remove(line)
        if way < 4:
            known = {bytes(prefix.tokens[: prefix.n_tokens]) for prefix in engine.prefixes}
            begun = store.start(line, store.match(tokens, scope))
            if i % 10 == 0:
                assert begun.n_cached <= max(
                    (n_common(tokens, one) for one in started[scope]), default=0
                )
            started[scope].append(tokens)
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
        elif way < 7 and line.position:
            store.insert(line)
        elif way == 7 and i % 2:
            store.release(line)
            assert not line.position
        elif way == 7:
            store.park(line)
            match = store.match([*line.tokens, 1], store._scopes.get(line, ""))
            assert store.nearest([line], match) is line
            resting = [one for one in (*resting, line) if one is not line] + [line]
        elif way == 8:
            n_cells = int(rng.integers(40 * 64))
            assert store.make_room(n_cells) == (engine.n_free_cells >= n_cells)
        else:
            n_dropped += store.forget_text(text, scope)
        assert engine.prefix_bytes <= store.limit
        assert set(store) == engine.prefixes
        assert engine.n_free_cells >= 0
    assert n_found > (200 if divides else 40)
    assert n_dropped > 5
    assert engine.n_in_place > 15
    for line in lines:
        line.reset()
    store.forget()
    assert not engine.prefixes
    assert not any(root.children for root in store._roots.values())
    assert engine.n_free_cells == 40 * 64


@pytest.mark.parametrize("divides", [True, False])
def test_a_text_is_found_in_its_scope_alone(divides: bool) -> None:
    engine = Model(40, divides=divides)
    store, lines = PrefixCache(engine, 6_000), [ModelLine(engine) for _ in range(3)]
    text = random_tokens(130)
    for line, scope in zip(lines, ("a", "b", "b"), strict=True):
        store.start(line, store.match(text, scope))
        line.append(text[line.position :])
        store.park(line)
    assert [len(store.match([*text, 1], scope).ids) for scope in "abc"] == [131] * 3
    assert [store.match([*text, 1], scope).n for scope in "abc"] == [130, 130, 0]
    store.forget_scope("b")
    assert [store.match([*text, 1], scope).n for scope in "abc"] == [130, 0, 0]
    assert len(engine.prefixes) == len(store) == 1
    # A sequence that holds another scope's tokens is emptied, and its text stays that scope's.
    assert store.start(lines[0], store.match([*text, 1], "c")).n_cached == 0
    assert not lines[0].position
    assert store.find(text, "a") is not None
