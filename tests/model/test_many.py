"""Several sequences in one engine get the rows, drafts and states that each gets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CLASSES, KINDS
from device import DEVICE
from pairs import N_UBATCH, go_back, load_target, make_pair, open_pair, random_tokens

import dflash_gguf
from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import BatchEntry, Drafter, DraftRequest, Engine, Error, Sequence
from dflash_gguf.sampling.sampler import Sampler
from dflash_gguf.speculative.tree import Tree

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")

N_PARALLEL = 5
N_CTX = 384
N_STEPS = 60


def engine_of(pair: Any, n_parallel: int, **settings: Any) -> Engine:
    model = load_target(pair.target, **settings)
    drafter = Drafter(str(pair.drafter), model)
    config = model.config.__class__(
        n_ctx=N_CTX,
        n_ubatch=N_UBATCH,
        n_threads=2,
        cache_type_k="f32",
        cache_type_v="f32",
        n_parallel=n_parallel,
    )
    return Engine(model, N_CTX, drafter, config=config)


class Beside:
    """Sequences of one engine, compared with a sequence that runs alone."""

    def __init__(self, pair: Any, seed: int) -> None:
        self.engine = engine_of(pair, N_PARALLEL)
        self.engine.reserve_verify(48)
        self.alone = open_pair(pair, n_ctx=N_CTX)
        self.random = np.random.default_rng(seed)
        self.draws = np.random.default_rng(seed)
        self.sequences = [Sequence(self.engine) for _ in range(N_PARALLEL)]
        self.tokens: list[list[int]] = [[] for _ in range(N_PARALLEL)]
        self.n_compared = 0
        self.n_drafts = self.n_drawn = self.n_deep = 0

    def below(self, n: int) -> int:
        return int(self.random.integers(n))

    def chance(self, n: int) -> int:
        return int(self.draws.integers(n))

    def row_alone(self, tokens: list[int]) -> Any:
        there = go_back(self.alone, tokens)
        return self.alone.prefill(tokens[there:]).logits()

    def check(self, rows: Any, index: int, tokens: list[int]) -> None:
        np.testing.assert_array_equal(rows.logits(index), self.row_alone(tokens))
        self.n_compared += 1

    def make_room(self) -> None:
        while self.engine.n_free_cells < 64 * N_PARALLEL:
            longest = max(range(N_PARALLEL), key=lambda i: len(self.tokens[i]))
            self.sequences[longest].reset()
            self.tokens[longest] = []

    def step(self) -> None:
        """Runs a pass of some sequences: appends of any length, chains and trees."""
        self.make_room()
        items, what = [], []
        left = N_UBATCH
        for i in self.random.permutation(N_PARALLEL)[: 1 + self.below(N_PARALLEL)]:
            sequence, n = self.sequences[i], 1 + self.below(8)
            new = random_tokens(n, seed=self.below(1 << 20))
            kind = self.below(4)
            if kind >= 2 and self.chance(2):
                # Repeated tokens make samples meet candidates.
                new = [new[self.chance(2) % n] for _ in new]
            if kind < 2 or not self.tokens[i]:
                new = new[: 1 if kind == 0 else max(1, min(left, n))]
                left -= len(new)
                if left < 0:
                    break
                items.append(BatchEntry(sequence, new))
                what.append((i, new, None))
            elif kind == 2:
                items.append(BatchEntry(sequence, new, is_verify=True))
                what.append((i, new, [-1, *range(n - 1)]))
            else:
                parents = [-1, *(self.below(j) for j in range(1, n))]
                items.append(BatchEntry(sequence, new, is_verify=True, parents=parents))
                what.append((i, new, parents))
        if not items:
            return
        all_rows = self.engine.run(items)
        found = [[rows.logits(j) for j in range(len(rows))] for rows in all_rows]
        self.compare_draws(what, found)
        paths = []
        for (i, new, parents), rows in zip(what, found, strict=True):
            before = self.tokens[i]
            if parents is None:
                done = self.sequences[i].position - len(before)
                self.tokens[i] = before + new[:done]
                assert len(rows) == (done == len(new)) and done > 0
                if rows:
                    self.compare(rows[0], self.tokens[i])
                continue
            lines = []
            for j, parent in enumerate(parents):
                lines.append(([] if parent < 0 else lines[parent]) + [j])
                self.compare(rows[j], before + [new[node] for node in lines[j]])
            path = lines[self.below(len(lines))][: self.below(4)]
            paths.append((self.sequences[i], path))
            self.tokens[i] = before + [new[node] for node in path]
        if paths:
            self.engine.commit(paths)

    def compare_draws(self, what: Any, found: list[list[Any]]) -> None:
        """Compares sampling of all rows of a pass in one call with sampling from copied rows."""
        walks, expected = [], []
        for (i, new, parents), rows in zip(what, found, strict=True):
            if not rows:
                continue
            config = DecodeConfig(
                temperature=self.chance(3) / 2,
                top_k=self.chance(2) * 40,
                top_p=(0.9, 1.0)[self.chance(2)],
                repeat_penalty=(1.0, 1.4)[self.chance(2)],
                presence_penalty=self.chance(2) / 2,
                repeat_last_n=5,
                logit_bias={} if self.chance(3) == 0 else dict.fromkeys(new, 9.0),
                seed=self.chance(1 << 20),
            )
            drawer = Sampler(config, banned=[self.chance(400)])
            seen = [*self.tokens[i], *([*new] if parents is None else new[:1])]
            walks.append(drawer.sample_request(self.sequences[i], seen, len(rows)))
            tree = Tree.of(new, parents) if parents else Tree.of([seen[-1]])
            drawn: list[int] = []

            def choose(
                node: int,
                rows: Any = rows,
                drawn: Any = drawn,
                drawer: Any = drawer,
                seen: Any = seen,
            ) -> int:
                text = [*seen, *drawn]
                drawn.append(drawer.sample(rows[node], text, len(text)).token)
                return drawn[-1]

            tree.follow(choose, lambda _: False)
            expected.append(drawn)
        if walks:
            assert self.engine.sample(walks) == expected
        self.n_drawn += sum(map(len, expected))
        self.n_deep += sum(len(drawn) > 2 for drawn in expected)

    def compare(self, row: Any, tokens: list[int]) -> None:
        np.testing.assert_array_equal(row, self.row_alone(tokens))
        self.n_compared += 1

    def draft(self) -> None:
        chosen = [i for i in self.random.permutation(N_PARALLEL) if self.tokens[i]]
        chosen = chosen[: 1 + self.below(3)]
        requests = [
            DraftRequest(self.sequences[i], self.below(400), 1 + self.below(self.engine.max_draft))
            for i in chosen
        ]
        if not requests:
            return
        for i, request, found in zip(chosen, requests, self.engine.draft(requests, 5), strict=True):
            there = go_back(self.alone, [*self.tokens[i], request.last_token])
            if there < len(self.tokens[i]):
                self.alone.prefill(self.tokens[i][there:])
            expected = self.alone.draft(request.last_token, request.n_draft, 5)
            for mine, its in zip(found, expected, strict=True):
                np.testing.assert_array_equal(mine, its)
            self.n_drafts += 1

    def move(self) -> None:
        i = self.below(N_PARALLEL)
        way = self.below(3)
        if way == 0:
            prompt = self.tokens[i][: self.below(len(self.tokens[i]) + 1)] + random_tokens(2)
            there = go_back(self.sequences[i], prompt)
            self.tokens[i] = prompt[:there]
        elif way == 1:
            self.sequences[i].close()
            self.sequences[i], self.tokens[i] = Sequence(self.engine), []
        elif self.tokens[i]:
            sequence = self.sequences[i]
            sequence.verify(random_tokens(3))
            sequence.commit(0)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_has_what_it_has_alone(tmp_path: Path, kind: str) -> None:
    beside = Beside(make_pair(tmp_path, kind), seed=KINDS.index(kind))
    for _ in range(N_STEPS):
        beside.step()
        if beside.below(2):
            beside.draft()
        if beside.below(4) == 0:
            beside.move()
    assert beside.n_compared > 5 * N_STEPS and beside.n_drafts > N_STEPS // 2
    assert beside.n_drawn > 2 * N_STEPS and beside.n_deep > 2, (
        beside.n_drawn,
        beside.n_deep,
    )
    for sequence in beside.sequences:
        sequence.close()
    assert beside.engine.n_free_cells == 512


def test_bad_items_run_nothing(tmp_path: Path) -> None:
    engine = engine_of(make_pair(tmp_path, "qwen35"), 2)
    a, b = Sequence(engine), Sequence(engine)
    with pytest.raises(Error, match=r"has 2 sequences already, and holds 2 at a time"):
        Sequence(engine)
    a.prefill(random_tokens(200))
    for items, sentence in [
        ([], "the batch is empty"),
        ([BatchEntry(a, [1]), BatchEntry(a, [2])], "entries 0 and 1 have the same sequence"),
        ([BatchEntry(a, [1]), BatchEntry(b, [421])], "token id 421 is outside"),
        ([BatchEntry(a, [1]), BatchEntry(b, [])], "the list of tokens is empty"),
        (
            [BatchEntry(a, [1]), BatchEntry(b, [1] * 385)],
            "385 tokens after 0 do not fit into a context of 384",
        ),
        ([BatchEntry(b, [1] * 300)], "320 more K/V cells, and 256 of 512 are free"),
        (
            [BatchEntry(a, [1] * 9), BatchEntry(b, [2] * 9)],
            "the pass appends 18 tokens, the limit is 16",
        ),
        (
            [BatchEntry(a, [1] * 9, True), BatchEntry(b, [2] * 20, True)],
            "29 rows are to be verified, memory is reserved for",
        ),
        ([BatchEntry(a, [1]), BatchEntry(b, [1, 2], True, [-1, 1])], "parent of node 1"),
    ]:
        with pytest.raises(Error, match=sentence):
            engine.run(items)
        assert (a.position, b.position) == (200, 0)
    other = engine_of(make_pair(tmp_path / "other", "llama"), 1)
    with pytest.raises(Error, match="entries: the sequence of number 0 belongs to another engine"):
        other.run([BatchEntry(a, [1])])
    rows = engine.run([BatchEntry(a, [1]), BatchEntry(b, [1, 2], True)])
    with pytest.raises(Error, match="the sequence has a verify of 2 rows, commit it first"):
        engine.run([BatchEntry(a, [1]), BatchEntry(b, [1])])
    b.commit(1)
    engine.run([BatchEntry(a, [1])])
    with pytest.raises(Error, match="these logits are gone"):
        rows[0].argmax()
    assert (a.position, b.position) == (202, 1)


def test_answers_share_a_prompt_longer_than_the_draft_window() -> None:
    """Room was made for the window's rows alone, and K/V blocks are attached whole."""
    with (
        pytest.warns(UserWarning, match="trained for 2048"),
        dflash_gguf.load("python-tiny", n_ctx=8192, n_parallel=4, n_threads=1) as decoder,
    ):
        prompt = random_tokens(5000, seed=1)
        answers = decoder.generate_batch([prompt] * 4, max_tokens=3, draft="none")
    assert min(x.n_draft_context for x in answers[1:]) >= 4096
    assert len({x.tokens for x in answers}) == 1
