"""The engine process's loop on a made-up decoder with several live streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import Error
from dflash_gguf.outputs import Result, Step
from dflash_gguf.serve.messages import (
    Cancel,
    Channel,
    Ended,
    Failed,
    FromEngine,
    Message,
    Run,
    Started,
    Stepped,
    ToEngine,
    frame,
    from_engine,
    length,
)
from dflash_gguf.serve.worker import Worker

HANGS_S = 60.0


class Pipe:
    """Both ends of a channel."""

    def __init__(self) -> None:
        self._to: queue.Queue[ToEngine | None] = queue.Queue()
        self.said: list[Any] = []
        self.n_writes = 0
        self._changed = threading.Condition()
        self._n_read = 0

    def read(self) -> ToEngine | None:
        if self._n_read:  # who reads on has dealt with the message before
            self._to.task_done()
        self._n_read += 1
        return self._to.get(timeout=HANGS_S)

    def wait_read(self) -> None:
        """Waits until the worker has taken all messages."""
        deadline = time.monotonic() + HANGS_S
        while self._to.unfinished_tasks:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def write(self, *messages: Message) -> None:
        with self._changed:
            self.said += messages
            self.n_writes += 1
            self._changed.notify_all()

    def tell(self, *messages: ToEngine | None) -> None:
        for message in messages:
            self._to.put(message)

    def wait(self, condition: Callable[[list[Any]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.said), HANGS_S), self.said


class Stream:
    """Says the tokens 0 to n - 1, n the first token of its prompt; a round serves all streams."""

    def __init__(self, prompt: list[int], cancelled: Callable[[], bool], decoder: Many) -> None:
        self.n, self.tokens, self._cancelled = prompt[0], [], cancelled
        self.steps: list[Step] = []
        self._decoder = decoder
        self.n_to_fill = len(prompt) // 10
        self.is_closed = False

    def poll(self, *, run: bool) -> Step | None:
        if self.n == 99:
            raise Error("the device is gone")
        if self.steps:
            return self.steps.pop(0)
        if self.is_closed or len(self.tokens) >= self.n or self._cancelled():
            raise StopIteration
        if run:
            self._decoder.round()
        return None

    def work(self) -> None:
        """Its part of a round."""
        if self.n_to_fill:
            self.n_to_fill -= 1
        elif len(self.tokens) < self.n and not self.is_closed:
            self.tokens.append(len(self.tokens))
            self.steps.append(Step((self.tokens[-1],), "x"))

    def close(self) -> None:
        self.is_closed = True

    def result(self) -> Result:
        reason = "cancelled" if self.is_closed and len(self.tokens) < self.n else "length"
        tokens = tuple(self.tokens)
        return Result(tokens, "", 1, 1, len(tokens), len(tokens), 0.0, 0.0, reason, "none", 0)


class Many:
    """A decoder that may have any number of live streams. Each round waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(1000)
        self.streams: list[Stream] = []

    def round(self) -> None:
        self.gate.acquire(timeout=HANGS_S)
        for stream in self.streams:
            stream.work()

    def stream(self, prompt: list[int], config: DecodeConfig, **settings: Any) -> Stream:
        if config.draft == "tree":
            raise ValueError("draft is 'tree', which needs a drafter")
        settings["on_prefill"](0, len(prompt))
        self.streams.append(Stream(list(prompt), settings["cancelled"], self))
        return self.streams[-1]


def run(number: int, n_tokens: int, *, draft: str = "auto") -> Run:
    return Run(number, [n_tokens], {"draft": draft}, None, False)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def start(pipe: Pipe, n_parallel: int) -> tuple[Many, threading.Thread]:
    decoder: Any = Many()
    worker = Worker(decoder, pipe, n_parallel)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return decoder, thread


def of(said: list[Any], kind: type, number: int | None = None) -> list[Any]:
    return [m for m in said if isinstance(m, kind) and number in (None, m.id)]


def test_live_answers_take_turns_and_the_others_wait_in_order(pipe: Pipe) -> None:
    _, thread = start(pipe, 2)
    pipe.tell(run(1, 6), run(2, 6), run(3, 2), run(4, 1))
    pipe.wait(lambda said: len(of(said, Ended)) == 4)
    pipe.tell(None)
    thread.join(HANGS_S)
    assert not thread.is_alive()
    said = pipe.said
    assert [m.id for m in of(said, Started)] == [1, 2, 3, 4]
    assert [m.slot for m in of(said, Started)][:2] == [0, 1]
    first_end = next(i for i, m in enumerate(said) if isinstance(m, Ended))
    ids = [m.id for m in said[:first_end] if isinstance(m, Stepped)]
    assert abs(ids.count(1) - ids.count(2)) <= 1
    assert not of(said[:first_end], Started, 3)
    for number, n in ((1, 6), (2, 6), (3, 2), (4, 1)):
        assert [m.tokens for m in of(said, Stepped, number)] == [[i] for i in range(n)]
        (end,) = of(said, Ended, number)
        assert (end.stats.n_tokens, end.stats.stop_reason) == (n, "length")


def test_what_a_round_says_comes_at_once(pipe: Pipe) -> None:
    decoder, _ = start(pipe, 8)
    decoder.gate = threading.Semaphore(0)
    pipe.tell(*(run(number, 40) for number in range(8)))
    pipe.wait_read()
    decoder.gate.release(1000)
    pipe.wait(lambda said: len(of(said, Ended)) == 8)
    assert len(of(pipe.said, Stepped)) == 320
    assert pipe.n_writes < 100  # a beginning each, 40 rounds, an end
    pipe.tell(None)


def test_a_long_prompt_does_not_hold_back_the_others(pipe: Pipe) -> None:
    start(pipe, 2)
    long = Run(2, [3] * 300, {"draft": "auto"}, None, False)
    pipe.tell(run(1, 20), long)
    pipe.wait(lambda said: len(of(said, Ended)) == 2)
    first = next(i for i, m in enumerate(pipe.said) if isinstance(m, Stepped) and m.id == 2)
    assert len(of(pipe.said[:first], Stepped, 1)) == 20  # the prompt took 30 rounds
    pipe.tell(None)


def test_a_cancelled_answer_ends_and_gives_its_place_away(pipe: Pipe) -> None:
    decoder, _ = start(pipe, 1)
    decoder.gate = threading.Semaphore(3)
    pipe.tell(run(1, 50), run(2, 50), run(3, 2))
    pipe.wait(lambda said: len(of(said, Stepped, 1)) == 3)
    pipe.tell(Cancel(1), Cancel(2), Cancel(77))
    pipe.wait_read()
    decoder.gate.release(10)
    pipe.wait(lambda said: len(of(said, Ended)) == 3)
    assert not of(pipe.said, Started, 2)
    assert [m.stats.stop_reason for m in of(pipe.said, Ended)] == [
        "cancelled",
        "cancelled",
        "length",
    ]
    assert len(of(pipe.said, Stepped, 1)) <= 4
    pipe.tell(None)


def test_what_fails_fails_alone(pipe: Pipe) -> None:
    _, _ = start(pipe, 3)
    pipe.tell(run(1, 3), run(2, 99), run(3, 2, draft="tree"), run(4, 1))
    pipe.wait(lambda said: len(of(said, Ended)) == 2 and len(of(said, Failed)) == 2)
    failures = {m.id: (m.status, m.sentence) for m in of(pipe.said, Failed)}
    assert failures == {
        2: (500, "the device is gone"),
        3: (400, "draft is 'tree', which needs a drafter"),
    }
    pipe.tell(None)


def test_frames_come_out_as_they_went_in() -> None:
    import socket

    messages: list[FromEngine] = [Started(1, 0), Failed(3, 500, "é")]
    for message in messages:
        data = frame(message)
        assert length(data[:4]) == len(data) - 4
        assert from_engine(data[4:]) == message
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        ours.sendall(frame(run(5, 7)) + frame(Cancel(5)))
        assert channel.read() == run(5, 7)
        assert channel.read() == Cancel(5)
        ours.shutdown(socket.SHUT_WR)
        assert channel.read() is None
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        length(b"\xff\xff\xff\xff")
