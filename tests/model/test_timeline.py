"""A sequence that goes back and attaches prefixes gives the rows of a fresh sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from pairs import Pair, go_back, make_pair, open_pair, random_tokens

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Engine, Model, Prefix, Sequence

Tiny = Callable[[str], Path]
PROMPT = random_tokens(40)
KINDS = ("llama", "qwen35")
N_WALKS = 4


def start(path: Path, **settings: Any) -> Sequence:
    config = LoadConfig(
        **{
            "n_ctx": 64,
            "n_ubatch": 16,
            "n_threads": 1,
            "cache_type_k": "f32",
            "cache_type_v": "f32",
            **settings,
        }
    )
    return Sequence(Engine(Model(str(path), config)))


def other(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


def test_what_waits_for_the_drafter_gives_way_to_a_prefix(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    sequence, fresh = open_pair(pair), open_pair(pair)
    sequence.prefill(PROMPT)
    kept = sequence.snapshot()
    sequence.reset()
    for token in PROMPT:
        sequence.decode(token)
    sequence.attach(kept, 39)
    fresh.prefill(PROMPT[:39])
    for found, expected in zip(
        sequence.draft(PROMPT[39], 3, 5), fresh.draft(PROMPT[39], 3, 5), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    sequence.snapshot()
    sequence.reset()
    assert sequence.position == 0


def test_a_conversation_computes_each_token_once(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("qwen35"), n_ctx=128)
    decoder = Decoder(sequence, None)
    turn, counts = PROMPT[:10], []
    for _ in range(3):
        result = decoder.generate(turn, max_tokens=4, ignore_eos=True)
        counts.append(result.n_prefilled)
        turn = [*turn, *result.tokens, 5, 6]
    turn = turn[:-6]
    counts.append(decoder.generate(turn, max_tokens=4).n_prefilled)
    counts.append(decoder.generate([*turn[:-1], other(turn[-1])], max_tokens=4).n_prefilled)
    assert counts == [10, 3, 3, 1, 1]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


def n_common(tokens: list[int], prompt: list[int]) -> int:
    """Returns the number of leading tokens that a prompt shares, except its last token."""
    pairs = zip(tokens, prompt[:-1], strict=False)
    most = min(len(tokens), len(prompt) - 1)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), most)


class Walk:
    """Random calls on a sequence, with a model of its expected tokens."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sequence = open_pair(pair, n_ctx=96)
        self.sequence.engine.reserve_verify(6)
        self.fresh = open_pair(pair, n_ctx=96)
        self.timeline: list[int] = []
        self.prompts = [PROMPT[:20]]
        self.kept: list[tuple[list[int], Prefix]] = []
        self.n_back = 0
        self.n_adopted = 0

    def run(self, n_steps: int) -> None:
        """Makes n_steps calls; rows and drafts after each prompt must equal a fresh sequence's."""
        for _ in range(n_steps):
            ways = [self.ask, self.cancel, self.decode, self.verify, self.leave, self.keep]
            self.rng.choice(ways)()
            assert self.sequence.position == len(self.timeline)

    def tokens(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, VOCAB_SIZE, n)]

    def prompt(self) -> list[int]:
        """Returns the last prompt with another last token, or one with an earlier prefix."""
        start, n = self.prompts[-1], len(self.prompts[-1]) - 1
        if self.rng.random() < 0.5:
            start = [*self.prompts, self.timeline][int(self.rng.integers(len(self.prompts) + 1))]
            n = int(self.rng.integers(len(start) + 1))
        if self.kept and self.rng.random() < 0.4:
            start, _ = self.kept[int(self.rng.integers(len(self.kept)))]
            n = len(start)
        found = [*start[:n], *self.tokens(int(self.rng.integers(8)))][:70] or [1]
        self.prompts = [*self.prompts, found][-6:]
        return found

    def begin(self, prompt: list[int]) -> None:
        """Starts a prompt from the sequence's own tokens, or from a longer snapshot."""
        common = n_common(self.timeline, prompt)
        there = go_back(self.sequence, prompt)
        if self.sequence.engine.model.n_recurrent and common < len(self.timeline):
            assert there == 0
        else:
            assert there == common
        divides = self.sequence.engine.partial_prefix_ok
        for tokens, prefix in self.kept:
            n = n_common(tokens, prompt)
            if n > there and (divides or n == len(tokens)):
                self.sequence.reset()
                self.sequence.attach(prefix, n)
                there = n
                self.n_adopted += 1
        self.n_back += 0 < there < len(self.timeline)
        self.timeline = prompt[:there]

    def keep(self) -> None:
        if self.timeline:
            self.kept = [*self.kept, (list(self.timeline), self.sequence.snapshot())][-4:]

    def ask(self) -> None:
        prompt = self.prompt()
        self.begin(prompt)
        rows = self.sequence.prefill(prompt[len(self.timeline) :])
        self.timeline = list(prompt)
        self.fresh.reset()
        expected = self.fresh.prefill(prompt)
        np.testing.assert_allclose(rows.logits(), expected.logits(), atol=1e-4)
        found, known = (x.draft(7, 3, 4) for x in (self.sequence, self.fresh))
        np.testing.assert_allclose(found.logits, known.logits, atol=1e-4)

    def cancel(self) -> None:
        prompt, done = self.prompt(), 0
        self.begin(prompt)
        n = int(self.rng.integers(len(prompt) - len(self.timeline) + 1))

        def progress(n_done: int, _total: int) -> None:
            nonlocal done
            done = n_done
            if n_done >= n:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.sequence.prefill(prompt[len(self.timeline) :], progress)
        self.timeline = prompt[: len(self.timeline) + done]

    def decode(self) -> None:
        if len(self.timeline) < self.sequence.n_ctx:
            (token,) = self.tokens(1)
            self.sequence.decode(token)
            self.timeline.append(token)

    def open(self) -> list[int]:
        tree = self.tokens(5)
        if len(self.timeline) + len(tree) > self.sequence.n_ctx:
            return []
        self.sequence.verify_tree(tree, [-1, 0, 0, 1, 2])
        return tree

    def verify(self) -> None:
        tree = self.open()
        if tree:
            path = [0, 2, 4][: int(self.rng.integers(4))]
            self.sequence.commit_path(path)
            self.timeline += [tree[node] for node in path]

    def leave(self) -> None:
        self.open()
        self.ask()


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_any_walk_leaves_what_a_fresh_sequence_has(pair: Pair, seed: int) -> None:
    walk = Walk(pair, seed)
    walk.run(120)
    assert walk.n_adopted > 3
    assert walk.n_back > 3
