"""The engine process's loop with a made-up decoder."""

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
    Accepted,
    Ask,
    AskedPrompt,
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
from dflash_gguf.serve.worker import Job, Worker
from dflash_gguf.text.reasoning import OutputPart

HANGS_S = 60.0


class Pipe:
    def __init__(self) -> None:
        self._to: queue.Queue[ToEngine | None] = queue.Queue()
        self.said: list[Any] = []
        self.n_writes = 0
        self._changed = threading.Condition()
        self._n_read = 0

    def read(self) -> ToEngine | None:
        if self._n_read:  # the previous message has been handled
            self._to.task_done()
        self._n_read += 1
        return self._to.get(timeout=HANGS_S)

    def wait_read(self) -> None:
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


class State:
    """A request that yields tokens 0 to n - 1; n is the first token of its prompt."""

    def __init__(self, prompt: list[int], settings: dict[str, Any]) -> None:
        self.n, self.history = prompt[0], list(prompt)
        self.n_prompt, self.n_to_fill = len(prompt), len(prompt) // 10
        self.cancelled, self.on_prefill = settings["cancelled"], settings["on_prefill"]
        self.steps: list[Step] = []
        self.error: Exception | None = None
        self.is_finished = self.has_begun = self.is_throttled = False
        self.prompt_logprobs: list[Any] = []

    @property
    def sequence(self) -> object:
        return object() if self.has_begun and not self.is_finished else None

    def work(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.on_prefill(0, self.n_prompt)
        if self.n == 99:
            self.error, self.is_finished = Error("the device is gone"), True
        elif self.n_to_fill:
            self.n_to_fill -= 1
        else:
            self.steps.append(Step((self.n_tokens,), (OutputPart("x"),)))
            self.history.append(self.n_tokens)
            self.is_finished = self.n_tokens == self.n

    @property
    def n_tokens(self) -> int:
        return len(self.history) - self.n_prompt


class Many:
    """A decoder that runs n_parallel requests at once; each batch waits for `gate`."""

    def __init__(self, n_parallel: int) -> None:
        self.gate = threading.Semaphore(1000)
        self.n_parallel = n_parallel
        self.states: list[State] = []

    def request(self, prompt: list[int], config: DecodeConfig, **names: str) -> list[int]:
        assert names.keys() == {"scope", "client"}
        if config.draft == "tree":
            raise ValueError("draft is 'tree', which needs a drafter")
        return prompt

    def add_request(self, prompt: list[int], **settings: Any) -> State:
        self.states.append(State(prompt, settings))
        return self.states[-1]

    def step(self) -> None:
        self.gate.acquire(timeout=HANGS_S)
        for state in self.states:
            state.is_finished = state.is_finished or state.cancelled()
        self.states = [state for state in self.states if not state.is_finished]
        for state in self.states[: self.n_parallel]:
            state.work()

    def abort(self, state: State) -> None:
        state.is_finished = True

    def result(self, state: State) -> Result:
        reason = "length" if state.n_tokens == state.n else "cancelled"
        tokens = tuple(state.history[state.n_prompt :])
        return Result(tokens, "", 1, 1, len(tokens), len(tokens), 0.0, 0.0, reason, "none", 0)


def run(number: int, *tokens: int, draft: str = "auto") -> Ask:
    return Ask([Run(number, 0, 1)], [AskedPrompt(list(tokens))], {"draft": draft})


class Compiling(Many):
    """A decoder whose compiler waits for `may_compile` before each constraint."""

    def __init__(self, n_parallel: int) -> None:
        super().__init__(n_parallel)
        self.may_compile = threading.Semaphore(0)
        self.compiled: list[str | None] = []

    def compile_constraint(self, config: DecodeConfig, tools: object) -> object:
        assert tools is None
        self.compiled.append(config.regex)
        assert self.may_compile.acquire(timeout=HANGS_S)
        if config.regex == "bad":
            raise ValueError("regex: bad")
        return object()


def constrained(number: int, regex: str, client: str) -> Ask:
    return Ask([Run(number, 0, 1)], [AskedPrompt([2])], {"regex": regex}, client=client)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def start(pipe: Pipe, n_parallel: int, kind: type[Many] = Many) -> tuple[Any, threading.Thread]:
    decoder: Any = kind(n_parallel)
    worker = Worker(decoder, pipe, n_parallel)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return decoder, thread


def of(said: list[Any], kind: type, number: int | None = None) -> list[Any]:
    return [m for m in said if isinstance(m, kind) and number in (None, m.id)]


def test_live_answers_take_turns_and_the_others_wait_in_order(pipe: Pipe) -> None:
    decoder, thread = start(pipe, 2)
    decoder.gate = threading.Semaphore(0)
    pipe.tell(run(1, 6), run(2, 6), run(3, 2), run(4, 1))
    pipe.wait_read()
    decoder.gate.release(1000)
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


def test_an_answer_that_moves_within_a_step_gets_another_slot(pipe: Pipe) -> None:
    """One answer loses its place to another and gets a new one, all in one step."""
    decoder: Any = Many(2)
    worker = Worker(decoder, pipe, 2)
    jobs = [Job(run(i, 9), run(i, 9).runs[0], DecodeConfig()) for i in range(2)]
    for job in jobs:
        worker._add(job)
    first, second = (job.state for job in jobs)
    assert isinstance(first, State)
    assert isinstance(second, State)
    first.has_begun = True
    worker._take_slot(jobs[0])
    first.has_begun, second.has_begun = False, True
    worker._take_slot(jobs[1])
    first.has_begun = True
    worker._take_slot(jobs[0])
    assert [job.slot for job in jobs] == [1, 0]


def test_what_a_round_says_comes_at_once(pipe: Pipe) -> None:
    decoder, _ = start(pipe, 8)
    decoder.gate = threading.Semaphore(0)
    pipe.tell(*(run(number, 40) for number in range(8)))
    pipe.wait_read()
    decoder.gate.release(1000)
    pipe.wait(lambda said: len(of(said, Ended)) == 8)
    assert len(of(pipe.said, Stepped)) == 320
    assert pipe.n_writes < 100
    pipe.tell(None)


def test_a_long_prompt_does_not_hold_back_the_others(pipe: Pipe) -> None:
    start(pipe, 2)
    pipe.tell(run(1, 20), run(2, *[3] * 300))
    pipe.wait(lambda said: len(of(said, Ended)) == 2)
    first = next(i for i, m in enumerate(pipe.said) if isinstance(m, Stepped) and m.id == 2)
    assert len(of(pipe.said[:first], Stepped, 1)) == 20
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
    with pytest.raises(ValueError, match=r"takes 4294967295 bytes .* the limit is"):
        length(b"\xff\xff\xff\xff")


def test_clients_take_turns_at_the_compiler_and_free_answers_do_not_wait(pipe: Pipe) -> None:
    decoder, thread = start(pipe, 4, Compiling)
    pipe.tell(*(constrained(i, f"a{i}", "many") for i in range(1, 5)))
    pipe.wait_read()
    pipe.tell(constrained(6, "b", "one"), constrained(7, "bad", "third"), Cancel(3), run(5, 1))
    pipe.wait(lambda said: bool(of(said, Ended, 5)))
    assert decoder.compiled == ["a1"]
    decoder.may_compile.release(9)
    pipe.wait(lambda said: len(of(said, Ended)) == 5 and len(of(said, Failed)) == 2)
    assert decoder.compiled == ["a1", "b", "bad", "a2", "a4"]
    assert [m.id for m in of(pipe.said, Accepted)] == [1, 6, 2, 4]
    assert {m.id: m.sentence for m in of(pipe.said, Failed)} == {
        3: "the client left before the constraint was compiled",
        7: "regex: bad",
    }
    pipe.tell(None)
    thread.join(HANGS_S)
