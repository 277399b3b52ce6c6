"""A sequence told what its timeline should be: what it keeps of it, and that the rest is right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from pairs import N_UBATCH, Pair, make_pair, open_pair, random_tokens

from dflash_gguf.config import LoadConfig
from dflash_gguf.core import Engine, Error, Model, Sequence
from dflash_gguf.decoder import Decoder

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
    """A token that is not this one."""
    return (token + 1) % VOCAB_SIZE


def ask(sequence: Sequence, prompt: list[int]) -> tuple[int, np.ndarray[Any, Any]]:
    """How many tokens of a prompt were there, and the row after it."""
    there = sequence.sync(prompt)
    assert sequence.position == there
    row = sequence.prefill(prompt[there:]).logits()
    assert sequence.position == len(prompt)
    return there, row


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there(tiny_gguf: Tiny, kind: str) -> None:
    """With attention alone any beginning, with recurrent layers a prompt but its last token."""
    sequence = start(tiny_gguf(kind))
    recurs = sequence.engine.model.n_recurrent > 0
    parted = [*PROMPT[:30], other(PROMPT[30]), *PROMPT[31:]]
    for prompt, there, hybrid in (
        (PROMPT, 0, 0),  # an empty sequence
        (PROMPT, 39, 39),  # the same
        ([*PROMPT[:39], other(PROMPT[39])], 39, 39),
        ([*PROMPT[:39], other(PROMPT[39]), 5], 40, 40),  # one token more
        ([*PROMPT, 5, 6, 7], 39, 39),  # longer
        ([*PROMPT, 5, 6, 7], 42, 42),
        (PROMPT[:20], 19, 0),  # a beginning
        (PROMPT[:21], 20, 20),
        (PROMPT[:20], 19, 19),
        (parted, 20, 20),
        (PROMPT, 30, 19),  # parts in the middle
        ([other(PROMPT[0]), *PROMPT[1:]], 0, 0),  # at once
        (PROMPT[:1], 0, 0),
        (PROMPT[:1], 0, 0),
        (PROMPT[:2], 1, 1),
        (PROMPT[:2], 1, 1),
        (PROMPT[:1], 0, 0),
    ):
        assert ask(sequence, prompt)[0] == (hybrid if recurs else there)
    sequence.reset()
    assert sequence.sync(PROMPT) == 0
    sequence.sync(PROMPT)
    sequence.prefill(PROMPT[:17])
    assert sequence.sync(PROMPT) == 17  # nothing to forget
    sequence.prefill(PROMPT[17:])
    assert sequence.sync(PROMPT) == 39


def test_recurrent_layers_go_back_to_the_two_newest_prompts(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("qwen35"))
    for n in (10, 20, 30):
        ask(sequence, PROMPT[:n])
    assert sequence.engine.bytes_of("kept") == 2 * sequence.engine.bytes_of("recurrent")
    assert sequence.sync([*PROMPT[:25], 1]) == 19
    assert sequence.sync(PROMPT[:15]) == 0
    ask(sequence, PROMPT)
    assert sequence.sync(PROMPT[:30]) == 0  # nobody asked for it on this timeline


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_in_parts_keeps_what_one_call_keeps(tiny_gguf: Tiny, kind: str) -> None:
    rows = []
    for cuts in ([0, 40], [0, 39, 40], [0, 7, 30, 40], [*range(41)]):
        sequence = start(tiny_gguf(kind))
        sequence.sync(PROMPT)
        for first, end in pairwise(cuts):
            row = sequence.prefill(PROMPT[first:end]).logits()
        rows.append(row)
        assert sequence.sync(PROMPT) == 39
        rows.append(sequence.prefill(PROMPT[39:]).logits())
        if sequence.engine.model.n_recurrent:
            np.testing.assert_array_equal(rows[-1], rows[-2])
    np.testing.assert_allclose(rows, [rows[0]] * len(rows), atol=1e-4)


def test_the_logits_of_all_tokens_are_computed_as_ever(tiny_gguf: Tiny) -> None:
    sequence, fresh = start(tiny_gguf("qwen35")), start(tiny_gguf("qwen35"))
    sequence.sync(PROMPT)
    np.testing.assert_array_equal(sequence.logits(PROMPT), fresh.logits(PROMPT))
    assert sequence.sync(PROMPT) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_verify_is_closed(tiny_gguf: Tiny, kind: str) -> None:
    sequence, fresh = start(tiny_gguf(kind)), start(tiny_gguf(kind))
    sequence.engine.reserve_verify(4)
    _, expected = ask(fresh, PROMPT)
    for there in (0, 39, 39):
        sequence.verify([1, 2, 3])
        found, row = ask(sequence, PROMPT)
        assert found == there
        np.testing.assert_allclose(row, expected, atol=1e-4)
    sequence.verify([1, 2, 3])
    assert sequence.sync([*PROMPT, 1, 2]) == 40  # not committed
    sequence.decode(1)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_tokens_change_nothing(tiny_gguf: Tiny, kind: str) -> None:
    sequence = start(tiny_gguf(kind))
    sequence.engine.reserve_verify(2)
    ask(sequence, PROMPT)
    sequence.verify([1, 2])
    for tokens, sentence in (
        ([], "there are no tokens to run"),
        ([*PROMPT, VOCAB_SIZE], "token id 421 is outside the vocabulary of 421"),
        ([-1], "token id -1 is outside the vocabulary of 421"),
        ([1] * 65, "65 tokens after 0 do not fit into a context of 64"),
    ):
        with pytest.raises(Error, match=sentence):
            sequence.sync(tokens)
    sequence.commit(2)
    assert sequence.sync([*PROMPT, 1, 2, 3]) == 42


def test_a_callback_cannot_sync(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("qwen35"))

    def progress(_done: int, _total: int) -> None:
        with pytest.raises(Error, match="the engine is busy: an earlier call of it has not"):
            sequence.sync(PROMPT)

    sequence.prefill(PROMPT, progress)
    assert sequence.position == 40


def test_rows_are_gone_with_a_sync(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("llama"))
    rows = sequence.prefill(PROMPT)
    sequence.sync([*PROMPT, 1])
    with pytest.raises(Error, match="these rows are gone"):
        rows.argmax()


def test_a_conversation_computes_each_token_once(tiny_gguf: Tiny) -> None:
    """Turns that hold the answer before, and a last one asked again."""
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
    assert counts == [10, 3, 3, 1, 1]  # the answer's last token is not in the caches


# --- anything in any order -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


class Walk:
    """Calls in a random order, with the timeline as they should leave it."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sequence = open_pair(pair, n_ctx=96)
        self.sequence.engine.reserve_verify(6)
        self.fresh = open_pair(pair, n_ctx=96)
        self.timeline: list[int] = []
        self.prompts = [PROMPT[:20]]
        self.n_back = 0

    def run(self, n_steps: int) -> None:
        """So many calls; the row after each prompt and its drafts are those of a fresh sequence."""
        for _ in range(n_steps):
            step = self.rng.choice([self.ask, self.cancel, self.decode, self.verify, self.leave])
            step()
            assert self.sequence.position == len(self.timeline)

    def tokens(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, VOCAB_SIZE, n)]

    def prompt(self) -> list[int]:
        """The last one again, but for its last token; or one that begins as something before."""
        start, n = self.prompts[-1], len(self.prompts[-1]) - 1
        if self.rng.random() < 0.5:
            start = [*self.prompts, self.timeline][int(self.rng.integers(len(self.prompts) + 1))]
            n = int(self.rng.integers(len(start) + 1))
        found = [*start[:n], *self.tokens(int(self.rng.integers(8)))][:70] or [1]
        self.prompts = [*self.prompts, found][-6:]
        return found

    def sync(self, prompt: list[int]) -> None:
        same = next(
            (i for i, (a, b) in enumerate(zip(self.timeline, prompt, strict=False)) if a != b),
            min(len(self.timeline), len(prompt)),
        )
        same = min(same, len(prompt) - 1)
        there = self.sequence.sync(prompt)
        if self.sequence.engine.model.n_recurrent and same < len(self.timeline):
            assert there <= same
        else:
            # Back to where a pass began whose rows were never read.
            assert same - N_UBATCH < there <= same
        self.n_back += 0 < there < len(self.timeline)
        self.timeline = prompt[:there]

    def ask(self) -> None:
        prompt = self.prompt()
        self.sync(prompt)
        rows = self.sequence.prefill(prompt[len(self.timeline) :])
        self.timeline = list(prompt)
        self.fresh.reset()
        expected = self.fresh.prefill(prompt)
        np.testing.assert_allclose(rows.logits(), expected.logits(), atol=1e-4)
        found, known = (x.draft(7, 3, 4) for x in (self.sequence, self.fresh))
        np.testing.assert_allclose(found.logits, known.logits, atol=1e-4)

    def cancel(self) -> None:
        prompt, done = self.prompt(), 0
        self.sync(prompt)
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
        """Verifies a small tree: a root, two children, and one below each."""
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
        """A verify that nobody commits."""
        self.open()
        self.ask()


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_any_walk_leaves_what_a_fresh_sequence_has(pair: Pair, seed: int) -> None:
    walk = Walk(pair, seed)
    walk.run(120)
    assert walk.n_back > 3
