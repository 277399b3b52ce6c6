"""Concurrent requests get the answers that each gets alone, in any order of joining and leaving."""

from __future__ import annotations

import itertools
import threading
from asyncio import CancelledError
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CLASSES, VOCAB_SIZE
from device import DEVICE
from pairs import Pair, make_pair, open_decoder, random_tokens
from schedules import built_anew, play

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.engine import request, turns
from dflash_gguf.engine.prefill_budget import PrefillBudget
from dflash_gguf.engine.request import RequestState
from dflash_gguf.kv_cache.prefix_cache import PrefixCache
from dflash_gguf.native import BatchEntry, Error
from dflash_gguf.speculative.controller import AutoController, Controller
from dflash_gguf.speculative.cost_model import Round
from dflash_gguf.speculative.proposers import dflash
from dflash_gguf.stream import Stream
from dflash_gguf.text.chat import ChatPrompt

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")

DRAFTS = ("none", "chain", "tree", "auto")
N_ROUNDS = 2000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen35")


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Decoder:
    return open_decoder(pair, 1)


def settings_of(i: int) -> dict[str, Any]:
    return {
        "max_tokens": 5 + 7 * (i % 4),
        "temperature": 0.9 * (i % 2),
        "seed": i,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("kind", CLASSES)
def test_a_batch_has_the_answers_of_its_prompts(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    prompts = [random_tokens(3 + 5 * i, seed=i) for i in range(6)] + [random_tokens(9)] * 6
    with open_decoder(pair, 1) as one:
        expected = [
            one.generate(prompt, draft="none", **settings_of(i)).tokens
            for i, prompt in enumerate(prompts)
        ]
    columns = [settings_of(i) for i in range(len(prompts))]
    settings = {name: [column[name] for column in columns] for name in columns[0]}
    with open_decoder(pair, 5) as many:
        for draft in DRAFTS:
            results = many.generate_batch(prompts, draft=draft, **settings)
            assert [result.tokens for result in results] == expected, draft
            assert all(result.stop_reason == "length" for result in results)
        results = many.generate_batch(
            prompts, draft=[DRAFTS[i % 4] for i in range(len(prompts))], **settings
        )
        assert [result.tokens for result in results] == expected


class Use:
    """Random use of streams; each text must begin the answer that the prompt gets alone."""

    def __init__(self, many: Decoder, alone: Decoder, seed: int) -> None:
        self.many, self.alone = many, alone
        self.random = np.random.default_rng(seed)
        self.streams: dict[Stream, tuple[list[int], list[int], dict[str, Any]]] = {}
        self.stopped: set[Stream] = set()
        self.n_answers = 0

    def below(self, n: int) -> int:
        return int(self.random.integers(n))

    def join(self) -> None:
        prompt = random_tokens(1 + self.below(20), seed=self.below(20))
        if self.below(3) == 0 and self.streams:
            known, drawn, _ = list(self.streams.values())[self.below(len(self.streams))]
            prompt = (known + drawn)[:29]
        settings = {
            "max_tokens": 1 + self.below(100),
            "temperature": 0.8 * self.below(2),
            "seed": self.below(100),
            "ignore_eos": True,
            **self.sampling_class_of(),
        }
        stop: list[bool] = []
        draft = DRAFTS[self.below(4)]
        stream = self.many.stream(prompt, cancelled=lambda: bool(stop), draft=draft, **settings)
        stream.stop = stop  # type: ignore[attr-defined]
        self.streams[stream] = (prompt, [], settings)

    def sampling_class_of(self) -> dict[str, Any]:
        """Returns random top-k, top-p, min-p, penalties and biases, each in a third of cases."""
        ways: list[dict[str, Any]] = [
            {"top_k": (0, 3, 300)[self.below(3)]},
            {"top_p": 0.6, "top_k": 0},
            {"min_p": (0.0, 0.3)[self.below(2)]},
            {"repeat_penalty": 1.3, "repeat_last_n": 1 + self.below(70)},
            {"presence_penalty": 0.5, "frequency_penalty": -0.2},
            {"logit_bias": {self.below(300): 4.0, self.below(300): -np.inf}},
            {"n_probs": 2},
        ]
        found: dict[str, Any] = {}
        for way in ways:
            found |= way if self.below(3) == 0 else {}
        return found

    def read(self, stream: Stream) -> None:
        prompt, drawn, settings = self.streams[stream]
        step = next(stream, None)
        if step is not None:
            drawn.extend(step.tokens)
            return
        del self.streams[stream]
        expected = self.alone.generate(prompt, draft="none", **settings).tokens
        assert stream.result().tokens == tuple(drawn)
        n = len(drawn)
        assert tuple(drawn) == expected[:n]
        assert n == len(expected) or stream in self.stopped
        self.n_answers += 1

    def leave(self, stream: Stream) -> None:
        if self.below(2):
            self.stopped.add(stream)
            stream.stop.append(True)  # type: ignore[attr-defined]
        elif self.below(2):
            prompt, drawn, settings = self.streams.pop(stream)
            stream.close()
            expected = self.alone.generate(prompt, draft="none", **settings).tokens
            assert stream.result().tokens[: len(drawn)] == tuple(drawn)
            assert stream.result().tokens == expected[: len(stream.result().tokens)]
            self.n_answers += 1
        else:
            del self.streams[stream]


@pytest.mark.parametrize("seed", range(2))
def test_random_use(pair: Pair, alone: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Six requests outgrow a pool of 256 cells, with cancels and slow readers."""
    monkeypatch.setattr(request, "MAX_UNREAD_TOKENS", 24)
    with open_decoder(pair, 6, n_ctx=128) as many:
        use = Use(many, alone, seed)
        scheduler, happened = many._scheduler, Counter[str]()

        def counted(name: str, call: Any) -> Any:
            def calls(*args: Any) -> Any:
                happened[name] += 1
                happened["pauses"] += any(state.is_throttled for state in scheduler.running)
                return call(*args)

            return calls

        for of, name in ((many.engine, "commit"), (many.engine, "run"), (scheduler, "_preempt")):
            monkeypatch.setattr(of, name, counted(name, getattr(of, name)))
        while happened["run"] < N_ROUNDS or use.n_answers <= 50:
            if len(use.streams) < 9 and use.below(3) == 0:
                use.join()
            if use.streams:
                stream = list(use.streams)[use.below(len(use.streams))]
                if use.below(60) == 0:
                    use.leave(stream)
                else:
                    use.read(stream)
            stream = None  # type: ignore[assignment]
        while use.streams:
            use.read(next(iter(use.streams)))
        assert use.n_answers > 50
        assert min(happened[name] for name in ("commit", "pauses", "_preempt")) > 20
        many.reset()
        assert len(scheduler.running) <= 6 and not scheduler.waiting


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_joins_and_leaves_need_few_graphs(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    with open_decoder(pair, 5, n_ctx=1024) as many, open_decoder(pair, 1) as alone:
        counts = play(many, alone, seed=4, n_passes=800, most_prompt=40, draft="none")
        assert built_anew(counts, 300) <= 0.05


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe"])
def test_many_rounds_leave_what_a_prefill_does(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    with open_decoder(pair, 2, n_ctx=8192) as many, open_decoder(pair, 1, n_ctx=8192) as fresh:
        settings = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.8}
        streams = [
            many.stream(random_tokens(20, seed=i), draft=draft, seed=i, **settings)
            for i, draft in enumerate(("tree", "chain"))
        ]
        for _ in range(1 + N_ROUNDS):
            for stream in streams:
                next(stream)
        for stream in streams:
            job = stream.state
            assert stream.result().rounds >= N_ROUNDS
            rest, last = job.history[: job.sequence.position], job.history[-1]
            rows = fresh.engine.run([BatchEntry(fresh.sequence, rest)])
            assert np.isfinite(rows[0].logits()).all()
            found, expected = (x.draft(last, 5, 8) for x in (job.sequence, fresh.sequence))
            for one, two in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, two)
            row, alone = (x.decode(last).logits() for x in (job.sequence, fresh.sequence))
            np.testing.assert_array_equal(row, alone)
            fresh.sequence.reset()


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_newest_give_way(pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    """Three answers of 210 tokens in 512 cells: the newest are preempted, and lose nothing."""
    settings = {"max_tokens": 200, "ignore_eos": True, "temperature": [0.0, 0.8, 0.8]}
    prompts = [random_tokens(10, seed=i) for i in range(3)]
    with open_decoder(pair, 1) as one:
        expected = one.generate_batch(prompts, draft="none", seed=[1, 2, 3], **settings)
    with open_decoder(pair, 4) as many:
        scheduler, preempted = many._scheduler, []
        preempt = scheduler._preempt
        monkeypatch.setattr(
            scheduler,
            "_preempt",
            lambda state: (preempted.append(state.request.prompt), preempt(state)),
        )
        found = many.generate_batch(prompts, draft=draft, seed=[1, 2, 3], **settings)
        assert [result.tokens for result in found] == [result.tokens for result in expected]
        assert preempted and tuple(prompts[0]) not in preempted


def run_in_turns(
    decoder: Decoder, clients: str, n_tokens: int, **settings: Any
) -> tuple[list[RequestState], list[str]]:
    """Runs one request for each letter; returns them, and the clients that computed, by batch."""
    requests = [
        decoder.request(
            random_tokens(20, seed=i), max_tokens=n_tokens, ignore_eos=True, client=x, **settings
        )
        for i, x in enumerate(clients)
    ]
    states = [decoder.add_request(request) for request in requests]
    ran = []
    while not all(state.is_finished for state in states):
        decoder.step()
        ran.append("".join(x.request.client for x in decoder._scheduler.running))
        for state in states:
            state.steps.clear()
    return states, ran


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
def test_clients_take_turns_and_get_the_text_of_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)  # a turn ends with every batch
    pair = make_pair(tmp_path, kind)
    for n_parallel, clients in ((1, "aab"), (2, "aaaab"), (2, "abc")):
        with open_decoder(pair, n_parallel) as many, open_decoder(pair, 1) as one:
            states, ran = run_in_turns(many, clients, 12, draft="none", seed=5)
            for i, state in enumerate(states):
                expected = one.generate(
                    random_tokens(20, seed=i), max_tokens=12, ignore_eos=True, draft="none", seed=5
                )
                assert state.history[20:] == list(expected.tokens)
        # Before the last client has ended, it ran in a fair share of the batches.
        last = clients[-1]
        until = max(i for i, names in enumerate(ran) if last in names)
        share = sum(last in names for names in ran[: until + 1]) / (until + 1)
        assert share >= 0.3, ran


def test_a_client_alone_keeps_its_place(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    with open_decoder(pair, 1) as decoder:
        preempted: list[RequestState] = []
        monkeypatch.setattr(decoder._scheduler, "_preempt", preempted.append)
        run_in_turns(decoder, "aaa", 5, draft="none")
        run_in_turns(decoder, "a", 5, draft="none")
        assert not preempted


def test_an_answer_that_nobody_reads_gives_way_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_UNREAD_TOKENS", 4)
    settings: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "draft": "none"}
    with open_decoder(pair, 2) as decoder:
        unread, read, late = (
            decoder.add_request(decoder.request(random_tokens(20, seed=i), **settings))
            for i in range(3)
        )
        while not read.is_finished:
            decoder.step()
            read.steps.clear()
            late.steps.clear()
            if unread.is_throttled and not read.is_finished:
                decoder.step()
                assert unread.sequence is None
                assert late.sequence is not None
        unread.steps.clear()
        while not (unread.is_finished and late.is_finished):
            decoder.step()
            unread.steps.clear()
            late.steps.clear()
        for i, state in enumerate((unread, read, late)):
            assert state.history[20:] == list(
                decoder.generate(random_tokens(20, seed=i), **settings).tokens
            )


def test_a_turn_lasts_a_second_after_what_is_computed_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    with open_decoder(pair, 1) as decoder:
        for client in "ab":
            decoder.add_request(
                decoder.request(
                    random_tokens(20, seed=1), max_tokens=60, draft="none", client=client
                )
            )

        def running() -> str:
            for state in decoder._scheduler._states:
                state.steps.clear()
            decoder.step()
            return decoder._scheduler.running[0].request.client

        assert [running() for _ in range(5)] == ["a"] * 5
        now[0] += turns.TURN_S
        assert [running() for _ in range(5)] == ["b"] * 5
        now[0] += turns.TURN_S / 2
        assert running() == "b"
        now[0] += turns.TURN_S
        assert running() == "a"


def test_what_is_computed_anew_is_in_no_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, preempted = [random_tokens(10, seed=i) for i in range(3)], list[RequestState]()
    with open_decoder(make_pair(tmp_path, "llama"), 4, n_bytes=0, n_ubatch=15) as many:
        preempt = many._scheduler._preempt
        monkeypatch.setattr(
            many._scheduler, "_preempt", lambda x: (preempted.append(x), preempt(x))
        )
        results = many.generate_batch(prompts, max_tokens=200, draft="none", ignore_eos=True)
    assert preempted
    for result in results:
        total_s = result.prefill_s + result.decode_s
        assert sum(result.seconds_by_phase.values()) == pytest.approx(total_s, abs=1e-7, rel=0)


def test_a_long_answer_goes_on_beside_clients_that_ask_again_and_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    settings: dict[str, Any] = {"ignore_eos": True, "draft": "none"}
    with open_decoder(pair, 1) as decoder:

        def ask(client: str, n: int) -> RequestState:
            prompt = random_tokens(10, seed=n)
            return decoder.add_request(
                decoder.request(prompt, max_tokens=n, client=client, **settings)
            )

        long, short = ask("long", 100), [ask("a", 3), ask("b", 3)]
        for _ in range(2000):
            decoder.step()
            now[0] += 0.05
            long.steps.clear()
            short = [ask(x.request.client, 3) if x.is_finished else x for x in short]
            if long.is_finished:
                break
        assert long.is_finished


def test_a_short_prompt_shares_the_passes_of_a_long_one(pair: Pair) -> None:
    with open_decoder(pair, 2, n_ctx=1024) as decoder:
        long, short = (
            decoder.add_request(
                decoder.request(random_tokens(n, seed=n), max_tokens=4, client=str(n))
            )
            for n in (800, 20)
        )
        while not short.output.tokens:
            decoder.step()
        assert 20 <= long.sequence.position <= 4 * 20


def test_another_prompt_goes_before_one_that_waits_for_a_prefix(pair: Pair) -> None:
    shared = random_tokens(400, seed=0)
    with open_decoder(pair, 3, n_ctx=2048) as decoder:
        first, second, other = (
            decoder.add_request(decoder.request(prompt, max_tokens=5, client=client))
            for client, prompt in (
                ("a", [*shared, 1]),
                ("b", [*shared, 2]),
                ("c", random_tokens(10, seed=3)),
            )
        )
        while not other.output.tokens:
            decoder.step()
        assert first.sequence is not None
        assert second.sequence is None
        while not second.is_finished:
            decoder.step()
            second.steps.clear()
        assert second.n_cached >= 384


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
def test_an_interrupted_pass_loses_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings: dict[str, Any] = {"max_tokens": 2, "n_probs": 0, "prompt_logprobs": True}
    settings |= {"cache_prompt": False, "draft": "none", "ignore_eos": True}
    prompt = random_tokens(80, seed=1)
    with open_decoder(make_pair(tmp_path, kind), 1) as decoder:
        expected = decoder.generate(prompt, **settings).prompt_logprobs
        state = decoder.add_request(decoder.request(prompt, **settings))
        decoder.step()
        run = decoder.engine.run

        def interrupted(entries: Any) -> None:
            run(entries)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(decoder.engine, "run", interrupted)
            decoder.step()
        while not state.is_finished:
            decoder.step()
        assert decoder.result(state).prompt_logprobs == expected


def test_prompts_that_need_all_cells_run_one_after_the_other(pair: Pair) -> None:
    """Two prompts need more than all eight pages.

    A turn boundary cuts the first prompt early, so neither prompt fills its pages in whole chunks.
    """
    prompts = [
        ChatPrompt(random_tokens(500, seed=1), None, turn_boundaries=[5]),
        random_tokens(300, seed=2),
    ]
    settings = {"max_tokens": 4, "ignore_eos": True}
    with open_decoder(pair, 1) as one:
        expected = [one.generate(prompt, draft="none", **settings).tokens for prompt in prompts]
    with open_decoder(pair, 2) as many:
        streams = [many.stream(prompt, draft="none", **settings) for prompt in prompts]
        states = [stream.state for stream in streams]
        for _ in range(200):
            if all(state.is_finished for state in states):
                break
            many._scheduler.step()
            assert len(many._scheduler.running) <= 1
        assert [tuple(state.output.tokens) for state in states] == expected


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
def test_a_short_prompt_gets_cells_from_a_long_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Sequences are free, cells are not: the prompt waits for a turn, not for the answer's end."""
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    settings: dict[str, Any] = {"ignore_eos": True, "draft": "none"}
    prompts = [random_tokens(n, seed=n) for n in (300, 250)]
    with open_decoder(make_pair(tmp_path, kind), 3) as decoder:
        expected = [decoder.generate(x, max_tokens=40, **settings).tokens for x in prompts]
        decoder.reset()
        long, short = (
            decoder.add_request(decoder.request(prompt, max_tokens=40, client=str(i), **settings))
            for i, prompt in enumerate(prompts)
        )
        while not (long.is_finished and short.is_finished):
            decoder.step()
            long.steps.clear()
            short.steps.clear()
            assert not (long.sequence and short.sequence)
            now[0] += turns.TURN_S / 20
            if not short.output.tokens:
                waited = now[0]
        assert [tuple(x.output.tokens) for x in (long, short)] == expected
    assert waited < 3 * turns.TURN_S


def test_first_tokens_come_within_a_second_and_a_turn_for_each_client(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    first_s: dict[str, float] = {}
    with open_decoder(pair, 1) as decoder:
        states = [
            decoder.add_request(
                decoder.request(
                    random_tokens(20, seed=i),
                    max_tokens=300,
                    ignore_eos=True,
                    draft="none",
                    client=client,
                )
            )
            for i, client in enumerate("aabcde")
        ]
        while len(first_s) < 5:
            decoder.step()
            now[0] += 0.05
            for state in states:
                if state.output.tokens:
                    first_s.setdefault(state.request.client, now[0])
                state.steps.clear()
    most = turns.TURN_S + 5 * (turns.LATE_TURN_S + 0.05)
    assert max(first_s.values()) <= most, first_s


def test_threads_read_at_once(pair: Pair, alone: Decoder) -> None:
    prompts = [random_tokens(5 + i, seed=i) for i in range(6)]
    expected = [
        alone.generate(prompt, draft="none", **settings_of(i)).tokens
        for i, prompt in enumerate(prompts)
    ]
    found: dict[int, tuple[int, ...]] = {}
    with open_decoder(pair, 3) as many:

        def answer(i: int) -> None:
            stream = many.stream(prompts[i], draft="auto", **settings_of(i))
            found[i] = tuple(token for step in stream for token in step.tokens)

        threads = [threading.Thread(target=answer, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(len(prompts))] == expected


def test_a_reader_that_is_behind_keeps_its_place(pair: Pair) -> None:
    slow_settings = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "draft": "none"}
    with open_decoder(pair, 2, n_ctx=1024) as many, open_decoder(pair, 1, n_ctx=1024) as one:
        slow, fast = many.stream([1, 2], **slow_settings), many.stream([3], **slow_settings)
        next(slow)
        assert sum(len(step.tokens) for step in fast) == 400
        held = many._scheduler.running[0].sequence.position
        assert 256 <= held <= 260
        third = many.generate([5, 6, 7], **{**slow_settings, "max_tokens": 20})
        assert third.tokens == one.generate([5, 6, 7], **slow_settings).tokens[:20]
        assert many._scheduler.running[0].sequence.position == held
        rest = tuple(token for step in slow for token in step.tokens)
        assert slow.result().tokens[1:] == rest
        assert slow.result().tokens == one.generate([1, 2], **slow_settings).tokens


def test_all_places_pause_and_one_waits(pair: Pair) -> None:
    settings = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True, "draft": "none"}
    with open_decoder(pair, 2, n_ctx=1024) as many:
        alone = [many.generate([i], **settings).tokens for i in range(3)]
        streams = [many.stream([i], **settings) for i in range(2)]
        for stream in streams:
            next(stream)
        third = many.stream([2], **settings)
        assert tuple(token for step in third for token in step.tokens) == alone[2]
        for stream, expected in zip(streams, alone, strict=False):
            list(stream)
            assert stream.result().tokens == expected


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("on_prefill", OSError("mine")),
        ("cancelled", CancelledError("mine")),
        ("cancelled", SystemExit(3)),
    ],
)
def test_what_a_callback_raises_is_for_its_own_reader(
    pair: Pair, alone: Decoder, name: str, error: BaseException
) -> None:
    """A callback's error reaches its own stream, whichever thread runs the round."""
    settings = {"max_tokens": 30, "ignore_eos": True, "draft": "none"}
    n_calls = 0

    def fails(*_: int) -> bool:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 2:
            raise error
        return False

    with open_decoder(pair, 2) as many:
        running = many.stream([1, 2, 3], **settings)
        next(running)
        callback: dict[str, Any] = {name: fails}
        failing = many.stream(random_tokens(150), **callback, **settings)
        tokens = [token for step in running for token in step.tokens]
        assert (*running.result().tokens[:1], *tokens) == running.result().tokens
        assert running.result().tokens == alone.generate([1, 2, 3], **settings).tokens
        with pytest.raises(type(error)):
            list(failing)
        assert list(failing) == [] and failing.result().stop_reason == "cancelled"


def test_what_cannot_be(pair: Pair) -> None:
    with pytest.raises(ValueError, match="n_parallel is 0, must be at least 1"):
        LoadConfig(n_parallel=0)
    with pytest.raises(ValueError, match="n_parallel is 10000, must be at most 256"):
        LoadConfig(n_parallel=10000)
    with open_decoder(pair, 2, n_ctx=64) as many:
        running = many.stream([1, 2, 3], max_tokens=20, draft="none", ignore_eos=True)
        next(running)
        with pytest.raises(ValueError, match="the prompt has 65 tokens, the context holds 64"):
            many.stream([1] * 65)
        with pytest.raises(ValueError, match="seed has 2 values for 3 prompts"):
            many.generate_batch([[1], [2], [3]], seed=[1, 2])
        n_passes = many.engine.info().n_passes
        for prompts, settings, sentence in (
            ([[1], [1] * 65], {}, "prompt 2 of 2: the prompt has 65 tokens, the context holds 64"),
            ([[1], [1], [1], []], {}, "prompt 4 of 4: the prompt is empty, it must hold at least"),
            ([[1], [1.5]], {}, "prompt 2 of 2: a token id is 1.5, must be an integer"),
            ([[1, True]], {}, "prompt 1 of 1: a token id is True, must be an integer"),
            ([["a"]], {}, "prompt 1 of 1: a token id is 'a', must be an integer"),
            ([np.array([1.0])], {}, "prompt 1 of 1: a token id is 1.0, must be an integer"),
            ([[1], 5], {}, "prompt 2 of 2: the prompt is 5, must be a text or a list of token ids"),
            ([[1]] * 3, {"temperature": [0, 1, -1]}, "prompt 3 of 3: temperature is -1, must be"),
            ([[1]] * 2, {"draft_min": [1, -1]}, "prompt 2 of 2: draft_min is -1, must be at least"),
            (
                [[1]],
                {"logit_bias": {VOCAB_SIZE: 1.0}},
                f"prompt 1 of 1: a token of logit_bias is {VOCAB_SIZE}, must be at most",
            ),
        ):
            with pytest.raises(ValueError, match=sentence):
                many.generate_batch(prompts, **{"max_tokens": 3, **settings})
        assert many.engine.info().n_passes == n_passes
        assert many.generate_batch([np.array([1, 2], dtype=np.int64)], max_tokens=3)
        assert many.generate_batch([]) == []
        stop: list[bool] = []
        queued = [many.stream([4] * 40, cancelled=lambda: bool(stop)) for _ in range(3)]
        stop.append(True)
        for stream in queued:
            assert list(stream) == [] and stream.result().stop_reason == "cancelled"
        assert len(list(running)) > 0 and len(running.result().tokens) == 20
        assert len(many.logits([1, 2, 3])) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-28, "presence_penalty": -1e28},
        {"temperature": 0.8, "logit_bias": {5: 1e28, 6: 1e28}},
        {"temperature": 0.0, "frequency_penalty": 1e28, "repeat_penalty": 1e28},
    ],
)
def test_the_largest_changes_of_logits(alone: Decoder, settings: Any) -> None:
    settings = settings | {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    prompt = [1, 2, 3, 1, 2, 3]
    expected = alone.generate(prompt, draft="none", **settings).tokens
    for draft in ("chain", "tree", "auto"):
        assert alone.generate(prompt, draft=draft, **settings).tokens == expected


def test_what_fails_to_begin_tells_why(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PrefixCache.start

    def fail_once(*_args: Any, **_settings: Any) -> Any:
        monkeypatch.setattr(PrefixCache, "start", begin)
        raise Error("the cache is broken")

    with open_decoder(pair, 2) as many:
        monkeypatch.setattr(PrefixCache, "start", fail_once)
        with pytest.raises(Error, match="the cache is broken"):
            many.generate([1, 2, 3], max_tokens=2)
        assert len(many.generate([1, 2, 3], max_tokens=2, ignore_eos=True).tokens) == 2


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Rounds that controllers of `auto` observe."""
    rounds, observe = list[Round](), AutoController.observe

    def hear(controller: AutoController, done: Round) -> None:
        rounds.append(done)
        observe(controller, done)

    monkeypatch.setattr(AutoController, "observe", hear)
    return rounds


AUTO = {"draft": "auto", "ignore_eos": True, "seed": 1}
BESIDE: list[dict[str, Any]] = [{"draft": "none"}, {"draft_max": 2}, {"draft": "chain"}]


@pytest.mark.parametrize("settings", BESIDE)
def test_auto_learns_beside_answers_of_other_settings(
    pair: Pair, heard: list[Round], settings: dict[str, Any]
) -> None:
    with open_decoder(pair, 2, n_ctx=1024) as many:
        other = many.stream([3, 4], **{**AUTO, **settings, "max_tokens": 400})
        next(other)
        heard.clear()
        answer = many.stream([1, 2], max_tokens=100, **AUTO)
        for _ in answer:
            pass
        n_rounds = answer.result().rounds
        theirs = [done for done in heard if done.n_undrafted == 1 and done.n_sequences == 2]
        if settings != {"draft_max": 2}:
            assert n_rounds / 20 < len(theirs) <= n_rounds
        is_alone = [not done.is_timing_shared for done in theirs]
        if settings == {"draft": "none"}:
            assert is_alone.count(False) <= 1  # the first draft also injects the prompt
        else:
            assert not all(is_alone)
        assert settings == {"draft": "chain"} or any(is_alone)
        assert many._speculative.state.costs.knows_plain(2) == any(is_alone)
        other.close()


def test_a_decision_ends_while_a_prompt_comes_in(
    pair: Pair, heard: list[Round], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of 16 tokens in every round, whatever its duration.
    monkeypatch.setattr(PrefillBudget, "chunk", lambda *_: 16)
    with open_decoder(pair, 2, n_ctx=4096, n_ubatch=16) as many:
        many.generate([1, 2], max_tokens=100, **AUTO)
        answer = many.stream([1, 2], max_tokens=400, **AUTO)
        next(answer)
        heard.clear()
        long = many.stream(random_tokens(2000), max_tokens=3, **AUTO)
        next(long)
        for stream in (answer, long):
            stream.close()  # reports skipped rounds to the controller
        shared = [done for done in heard if done.is_timing_shared]
        assert len(shared) > 5
        assert sum(done.n_positions > 0 for done in shared) < len(shared) / 2


def test_drafts_are_filed_under_the_rows_that_they_had(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers are nearly complete, and need fewer candidates or none."""
    heard, rows, draft_for_all = list[Round](), list[int](), dflash.draft_for_all

    def drafts(requests: Any, *args: Any, **settings: Any) -> Any:
        rows.append(sum(request.n_positions + 1 for request in requests))
        return draft_for_all(requests, *args, **settings)

    monkeypatch.setattr(dflash, "draft_for_all", drafts)
    monkeypatch.setattr(Controller, "observe", lambda _, done: heard.append(done))
    with open_decoder(pair, 4) as many:
        lengths, prompts = [30, 6, 6, 9, 8, 5, 7, 6], [[i] for i in range(8)]
        many.generate_batch(prompts, max_tokens=lengths, draft="chain", ignore_eos=True)
    assert [done.n_draft_rows for done in heard if done.n_positions] == rows


def test_a_batch_keeps_all_slots_busy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_UNREAD_TOKENS", 8)
    with open_decoder(pair, 3) as many:
        before, done = many.engine.info().n_passes, list[int]()
        many.generate_batch(
            [[i + 1] for i in range(6)],
            max_tokens=60,
            draft="none",
            ignore_eos=True,
            progress=lambda n, _: done.append(n),
        )
        assert many.engine.info().n_passes - before < 2 * 60 + 20
        assert done == [1, 2, 3, 4, 5, 6]


def test_of_a_batch_as_many_join_as_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch joins as many requests as can run: more would slow rounds and delay streams."""
    with open_decoder(pair, 3) as many:
        most, n_rounds, step = 0, 0, many._scheduler.step

        def stepped() -> None:
            nonlocal most, n_rounds
            most = max(most, len(many._scheduler._states))
            n_rounds += 1
            step()

        monkeypatch.setattr(many._scheduler, "step", stepped)
        ended: dict[int, Any] = {}
        results = many.generate_batch(
            [[i + 1] for i in range(200)],
            max_tokens=[3, *[3 - i % 2 for i in range(199)]],
            ignore_eos=True,
            on_result=ended.__setitem__,
        )
        assert [ended[i] for i in range(200)] == results
        assert list(ended) != sorted(ended)
        assert most == 3
        assert n_rounds < 200 * 3 / 3 + 10
        assert {len(result.tokens) for result in results} == {2, 3}
        assert not many._scheduler._states


def test_a_batch_of_one_at_a_time_ends_no_stream_that_came_later(pair: Pair) -> None:
    with open_decoder(pair, 1) as one:
        later: list[Any] = []

        def watch(done: int, _: int) -> None:
            if done == 1:
                later.append(one.stream([9, 9], max_tokens=5, ignore_eos=True))

        earlier = one.stream([1], max_tokens=50, ignore_eos=True)
        next(earlier)
        results = one.generate_batch(
            [[1], [2], [3]], max_tokens=4, ignore_eos=True, draft="none", progress=watch
        )
        assert [len(result.tokens) for result in results] == [4, 4, 4]
        assert sum(len(step.tokens) for step in later[0]) == 5
        with pytest.raises(RuntimeError, match="ended by a later call"):
            list(earlier)


def test_close_tells_those_who_still_read(pair: Pair) -> None:
    many = open_decoder(pair, 2, n_ctx=4096)
    stream = many.stream([1, 2], max_tokens=2000, ignore_eos=True)
    found = list(next(stream).tokens)

    def close(_done: int, _total: int) -> None:
        threading.Thread(target=many.close).start()

    settings: dict[str, Any] = {"max_tokens": [3, 2000], "ignore_eos": True, "progress": close}
    with pytest.raises(RuntimeError, match="closed before this answer was finished"):
        many.generate_batch([[3], [4]], **settings)
    for call in (many.generate, many.logits):
        with pytest.raises(Error, match="the decoder is closed"):
            call([1, 2])
    with pytest.raises(RuntimeError, match="closed before this answer was finished"):
        for step in stream:
            found += step.tokens
    assert stream.result().tokens == tuple(found)
    assert stream.result().stop_reason == "cancelled"


def test_a_request_of_another_decoder_goes_on(pair: Pair) -> None:
    with open_decoder(pair, 1) as mine, open_decoder(pair, 1) as other:
        state = mine.add_request(mine.request([1, 2], max_tokens=3, ignore_eos=True))
        with pytest.raises(ValueError, match="the request is another decoder's"):
            other.abort(state)
        while not state.is_finished:
            mine.step()
        assert mine.result(state).n_tokens == 3
    with pytest.raises(Error, match="the decoder is closed"):
        mine.step()


def test_who_drops_a_stream_ends_its_answer(pair: Pair) -> None:
    with open_decoder(pair, 2) as many:
        dropped = many.stream([1, 2], max_tokens=200, ignore_eos=True)
        next(dropped)
        del dropped
        many.generate([3, 4], max_tokens=3)
        assert not many._scheduler._states


def test_logits_take_the_room_of_what_is_merely_kept(pair: Pair) -> None:
    prompt = random_tokens(150)
    with open_decoder(pair, 1, n_ctx=192) as decoder:
        expected = decoder.logits(prompt)
        decoder.generate(random_tokens(150, seed=2), max_tokens=8, ignore_eos=True)
        assert np.array_equal(decoder.logits(prompt), expected)


def test_logits_beside_answers_that_hold_every_cell(pair: Pair) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True}
    prompts = [random_tokens(60, seed=seed) for seed in range(3)]
    with open_decoder(pair, 1) as alone:
        expected = [alone.generate(prompt, **asked).tokens for prompt in prompts]
        row = alone.logits(random_tokens(9))
    with open_decoder(pair, 3, n_ctx=256) as many:
        streams = [many.stream(prompt, **asked) for prompt in prompts]
        found = [next(stream).tokens for stream in streams]
        while many.engine.n_free_cells:
            found = [old + next(x).tokens for old, x in zip(found, streams, strict=True)]
        assert np.array_equal(many.logits(random_tokens(9)), row)
        for old, stream, tokens in zip(found, streams, expected, strict=True):
            assert old + tuple(itertools.chain.from_iterable(x.tokens for x in stream)) == tokens
