"""Layers with a sliding window drop old positions, and give the rows of layers that keep all.

Tested on one timeline, after going back, and beside other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import DEVICE
from gguf import GGUFValueType
from gguf_files import Parts, edited
from pairs import go_back, make_pair, random_tokens
from trees import path_to, scattered

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import BatchEntry, Drafter, Engine, Error, Model, Prefix, Sequence

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")

Tiny = Callable[[str], Path]
KEPT_BY = {"gpt-oss": (2, 2), "gemma4e": (4, 2)}
"""Bytes per token, in units of ROW, of full layers and of layers with a window of 8."""
KINDS = tuple(KEPT_BY)
ROW = 2 * 4 * 64
"""Bytes of one token's key and value in a layer."""
REACH = 64
"""Tokens that a sequence can go back without a copy."""
N_CTX = 2048
KEEP_ALL = 12
"""Number of sequences whose windows exceed N_CTX, so that nothing is dropped."""
TEXT = random_tokens(1500)


def engine_of(path: Path, n_parallel: int = 1, **settings: Any) -> Engine:
    config = {"n_ctx": N_CTX, "n_ubatch": 48, "n_threads": 1, "n_gpu_layers": 0, **settings}
    types = {"cache_type_k": "f32", "cache_type_v": "f32"}
    engine = Engine(Model(str(path), LoadConfig(n_parallel=n_parallel, **types, **config)))
    engine.reserve_verify(64)
    assert forgets(engine) == (config["n_ctx"] > 512 and n_parallel < KEEP_ALL)
    return engine


def forgets(engine: Engine) -> bool:
    return not engine.partial_prefix_ok


def both(path: Path) -> Iterator[Sequence]:
    """Yields a sequence that drops old positions, and one that keeps all."""
    return (Sequence(engine_of(path, n)) for n in (1, KEEP_ALL))


def sliding_throughout(parts: Parts) -> None:
    key = "gpt-oss.attention.sliding_window_pattern"
    parts.metadata[key] = (GGUFValueType.ARRAY, [True] * 4, GGUFValueType.BOOL)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_windows_does_not_grow(tiny_gguf: Tiny, kind: str) -> None:
    path, (full, sliding) = tiny_gguf(kind), KEPT_BY[kind]
    cells = 512  # for window, REACH, partly filled pages, and a padded verify of 256 rows
    for n_ctx in (1024, 4096, 65536):
        engine = engine_of(path, n_ctx=n_ctx)
        assert engine.bytes_of("kv") == ROW * (full * n_ctx + sliding * cells)
        assert engine.n_free_cells == n_ctx
        sequence = Sequence(engine)
        sequence.prefill(TEXT[: 11 * 64 + 6]).argmax()
        # A snapshot copies the window less one position, from the start of a page on, and the last
        # partly filled page of full layers.
        assert sequence.snapshot_bytes() == ROW * (sliding * (7 + 63) + full * 6)
    assert engine_of(path, n_ctx=512).bytes_of("kv") == ROW * (full + sliding) * 512
    many = engine_of(path, 4, n_ctx=65536)
    assert many.bytes_of("kv") == ROW * (full * 65536 + sliding * 1280)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_layers_that_keep_all(tiny_gguf: Tiny, kind: str) -> None:
    sequence, keeping = both(tiny_gguf(kind))
    random = np.random.default_rng(3)
    n_rows = 0
    while sequence.position < N_CTX - 70:
        way, n = random.integers(4), int(random.integers(1, 65))
        tokens = random_tokens(n, seed=int(random.integers(1 << 20)))
        if way == 0:
            found, expected = (x.logits(tokens) for x in (sequence, keeping))
            np.testing.assert_array_equal(found, expected)
        elif way == 1:
            for token in tokens[:9]:
                found, expected = (x.decode(token).logits() for x in (sequence, keeping))
                np.testing.assert_array_equal(found, expected)
        else:
            parents = list(range(-1, n - 1)) if way == 2 else scattered(n, random)
            rows, others = (x.verify_tree(tokens, parents) for x in (sequence, keeping))
            for i in range(n):
                np.testing.assert_array_equal(rows.logits(i), others.logits(i))
            path = path_to(parents, int(random.integers(n)))[: int(random.integers(n + 1))]
            sequence.commit_path(path)
            keeping.commit_path(path)
        n_rows += n
    assert n_rows > N_CTX
    rest = random_tokens(N_CTX - sequence.position)
    found, expected = (x.prefill(rest).logits() for x in (sequence, keeping))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(Error, match="1 tokens after 2048 do not fit"):
        sequence.decode(1)


def answer(sequence: Sequence, n: int) -> list[int]:
    tokens = random_tokens(n, seed=n)
    for token in tokens:
        sequence.decode(token).argmax()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_ways_back(tiny_gguf: Tiny, kind: str) -> None:
    sequence, keeping = both(tiny_gguf(kind))

    def ask(prompt: list[int], kept: Prefix | None = None) -> Prefix:
        if kept is None:
            sequence.reset()
        else:
            sequence.attach(kept, kept.n_tokens)
        keeping.reset()
        keeping.prefill(prompt[:-1])
        if sequence.position < len(prompt) - 1:
            sequence.prefill(prompt[sequence.position : -1])
        kept = sequence.snapshot()
        found, expected = (x.prefill(prompt[-1:]).logits() for x in (sequence, keeping))
        np.testing.assert_array_equal(found, expected)
        return kept

    prompt = TEXT[:300]
    longer = prompt + TEXT[600:900]
    kept = ask(prompt)
    kept_longer = ask(longer, kept)
    for n_after in (1, 30, REACH, REACH + 70, 300):
        for text, prefix in ((longer, kept_longer), (prompt, kept)):
            answer(sequence, n_after)
            ask(text, prefix)
        ask([*prompt[:-1], *TEXT[800:850]], kept)
        sequence.reset()
        ask(longer, kept_longer)
    for n in (2, 8, 9, 60, 101, 1000):
        kept = ask(TEXT[:n])
        answer(sequence, 40)
        ask(TEXT[:n], kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_the_same_whatever_passes_came_to_it(tiny_gguf: Tiny, kind: str) -> None:
    prompt = TEXT[:333]
    sequence, keeping = both(tiny_gguf(kind))
    expected = keeping.prefill(prompt).logits()
    for cuts in ((0, 332), (0, 100, 331, 332), (*range(0, 332, 3), 332)):
        sequence.reset()
        for first, end in pairwise(cuts):
            sequence.prefill(prompt[first:end])
        kept = sequence.snapshot()
        answer(sequence, 150)
        sequence.reset()
        sequence.attach(kept, 332)
        np.testing.assert_array_equal(sequence.decode(prompt[-1]).logits(), expected)
    keeping.prefill(TEXT[400:420])
    expected = keeping.decode(9).logits()
    sequence.reset()
    sequence.prefill(prompt[:320]).argmax()
    sequence.verify([*prompt[320:], *TEXT[400:403]])
    sequence.commit(13)
    sequence.verify([*TEXT[400:420], 3, 4])
    sequence.commit(20)
    kept = sequence.snapshot()
    for _ in range(20):
        sequence.verify(TEXT[:16])
        sequence.commit(16)
    sequence.reset()
    sequence.attach(kept, 353)
    np.testing.assert_array_equal(sequence.decode(9).logits(), expected)


class Beside:
    """Sequences of an engine that drops old positions, compared with one that keeps all."""

    def __init__(self, path: Path, n_parallel: int, n_ctx: int, seed: int) -> None:
        self.engine = engine_of(path, n_parallel, n_ctx=n_ctx, n_ubatch=64)
        self.engine.reserve_verify(256)
        assert forgets(self.engine)
        self.keeping = Sequence(engine_of(path, KEEP_ALL))
        self.random = np.random.default_rng(seed)
        self.sequences = [Sequence(self.engine) for _ in range(n_parallel)]
        self.tokens: list[list[int]] = [[] for _ in range(n_parallel)]
        self.n_compared = 0

    def below(self, n: int) -> int:
        return int(self.random.integers(n))

    def draw(self, n: int) -> list[int]:
        return random_tokens(n, seed=self.below(1 << 20))

    def compare(self, row: Any, tokens: list[int]) -> None:
        there = go_back(self.keeping, tokens)
        np.testing.assert_array_equal(row, self.keeping.prefill(tokens[there:]).logits())
        self.n_compared += 1

    def step(self) -> None:
        """Runs a pass of most sequences: prompt chunks, verifies of all sizes, single tokens."""
        while self.engine.n_free_cells < 64 * (len(self.sequences) + 5):
            longest = max(range(len(self.tokens)), key=lambda i: len(self.tokens[i]))
            self.sequences[longest].reset()
            self.tokens[longest] = []
        items, what = [], []
        room, left = 64, 250
        for i in self.random.permutation(len(self.sequences)):
            way = self.below(5)
            n = 1 if way < 2 else min(left if way > 2 else room, 1 + self.below(60))
            if n < 1 or (way < 3 and room < 1):
                continue
            new = self.draw(n)
            parents = scattered(n, self.random) if way == 4 else list(range(-1, n - 1))
            verifies = way > 2 and bool(self.tokens[i])
            if not verifies and n > room:
                continue
            left, room = (left - n, room) if verifies else (left, room - n)
            items.append(
                BatchEntry(self.sequences[i], new, verifies, parents if verifies else None)
            )
            what.append((i, new, parents if verifies else None))
        paths = []
        for (i, new, parents), rows in zip(what, self.engine.run(items), strict=True):
            if parents is None:
                self.tokens[i] = self.tokens[i] + new
                if self.below(4) == 0:
                    self.compare(rows.logits(), self.tokens[i])
                continue
            path = path_to(parents, self.below(len(new)))
            before = self.tokens[i]
            if self.below(4) == 0:
                self.compare(rows.logits(path[-1]), before + [new[node] for node in path])
            path = path[: self.below(len(path) + 1)]
            paths.append((self.sequences[i], path))
            self.tokens[i] = before + [new[node] for node in path]
        self.engine.commit(paths)

    def move(self) -> None:
        i = self.below(len(self.sequences))
        sequence, tokens = self.sequences[i], self.tokens[i]
        if self.below(3) == 0:
            sequence.close()
            self.sequences[i], self.tokens[i] = Sequence(self.engine), []
        elif tokens:
            kept = sequence.snapshot()
            sequence.prefill(self.draw(1 + self.below(100)))
            sequence.attach(kept, len(tokens))


@pytest.mark.parametrize(
    ("kind", "n_parallel", "n_ctx", "n_steps"),
    [("gpt-oss", 3, 1500, 120), ("gemma4", 2, 1400, 60), ("gemma4e", 3, 1500, 60)],
)
def test_many_beside_each_other(
    tiny_gguf: Tiny, kind: str, n_parallel: int, n_ctx: int, n_steps: int
) -> None:
    beside = Beside(tiny_gguf(kind), n_parallel, n_ctx, seed=n_parallel)
    for _ in range(n_steps):
        beside.step()
        if beside.below(3) == 0:
            beside.move()
    assert beside.n_compared > n_steps // 4
    for sequence in beside.sequences:
        sequence.close()
    assert beside.engine.n_free_cells == -(-n_ctx // 256) * 256


def test_sixteen_of_them_with_layers_that_all_slide(tiny_gguf: Tiny, tmp_path: Path) -> None:
    """The context alone limits the batch: windows never make a pass fail."""
    path = edited(tiny_gguf("gpt-oss"), tmp_path / "sliding.gguf", sliding_throughout)
    n_ctx = 16 * 260
    config = LoadConfig(n_ctx=n_ctx, n_ubatch=64, n_threads=1, n_gpu_layers=0, n_parallel=16)
    engine = Engine(Model(str(path), config))
    assert forgets(engine)
    assert engine.bytes_of("kv") == 3584 * 4 * 2 * 2 * 64
    engine.reserve_verify(256)
    sequences = [Sequence(engine) for _ in range(16)]
    for i, sequence in enumerate(sequences):
        sequence.prefill(random_tokens(140 + i, seed=i)).argmax()
    for size in (16, 15, 1, 16):
        engine.run([BatchEntry(x, [1] * size, is_verify=True) for x in sequences[:15]])
        rows = engine.run([BatchEntry(sequences[15], [2] * 4)])
        rows[0].argmax()
        engine.commit([(x, size) for x in sequences[:15]])
    engine.run([BatchEntry(x, [3] * 4) for x in sequences])
    alone = Sequence(Engine(Model(str(path), config)))
    alone.prefill(random_tokens(143, seed=3) + [1] * 48 + [3] * 4)
    np.testing.assert_array_equal(sequences[3].decode(9).logits(), alone.decode(9).logits())
    left = engine.n_free_cells
    assert left < 16 * 64
    with pytest.raises(Error, match="other sequences hold the rest"):
        sequences[0].prefill([1] * (left + 200))


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4e"])
def test_answers_of_many_prompts(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    texts = [random_tokens(40 + 90 * i, seed=i) for i in range(4)]
    prompts = [*texts, texts[1], texts[3], texts[2][:100] + texts[1]]
    settings: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "temperature": 0.8, "seed": 5}

    def decoder_of(n_parallel: int) -> Decoder:
        engine = engine_of(pair.target, n_parallel)
        drafter = Drafter(str(pair.drafter), engine.model)
        return Decoder(Sequence(Engine(engine.model, drafter=drafter)), None)

    with decoder_of(KEEP_ALL) as keeping:
        assert not forgets(keeping.engine)
        expected = [keeping.generate(x, draft="none", **settings).tokens for x in prompts]
    with decoder_of(3) as many, decoder_of(1) as one:
        assert forgets(many.engine) and forgets(one.engine)
        for draft in ("tree", "auto"):
            found = many.generate_batch(prompts, draft=draft, **settings)
            assert [x.tokens for x in found] == expected, draft
        results = [one.generate(x, draft="tree", **settings) for x in prompts]
        assert [x.tokens for x in results] == expected
        again = one.generate(prompts[-1], draft="tree", **settings)
        assert again.tokens == expected[-1]
        assert again.n_prefilled == 1
