"""The HTTP process's side of an engine process: starts it, feeds it, starts it anew if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from .._run_module import module_command
from .messages import (
    Cancel,
    Ended,
    Failed,
    FromEngine,
    Load,
    Loading,
    Message,
    Ready,
    Refused,
    ResultStats,
    Run,
    SlotAction,
    SlotDone,
    Started,
    Stepped,
    frame,
    from_engine,
    length,
)

State = Literal["unloaded", "loading", "ready", "closed"]

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Before a process is started anew: twice as long after each that did not come to be ready."""
STDERR = 2
CLOSE_S = 2.0
"""What a process may take to end before it is killed."""
N_TIMED = 16
"""Requests whose mean time says when to ask again."""
MAX_RETRY_S = 60


class BusyError(Exception):
    """The queue is full. retry_s: when to ask again."""

    def __init__(self, n_waiting: int, retry_s: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting, which is the limit: ask again later")
        self.retry_s = retry_s


class NotReadyError(Exception):
    """The model is not loaded (yet)."""


class ClientGone(Message, frozen=True):
    """The client has closed its connection."""


class KeepAlive(Message, frozen=True):
    """Nothing came for a while: a sign of life is due."""


Event = FromEngine | ClientGone | KeepAlive


class Submission:
    """One HTTP request's prompts, each a `Run`, and their events."""

    def __init__(self, engine: EngineClient, runs: Sequence[Run]) -> None:
        self.runs = {run.id: index for index, run in enumerate(runs)}
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.began = time.monotonic()
        self._engine = engine
        self.open = set(self.runs)

    def cancel(self) -> None:
        """Ends what is not over yet; harmless where all is."""
        for run in sorted(self.open):
            self._engine.send(Cancel(run))


class Slot:
    """Slot of the engine, as /slots shows it. n_decoded: tokens of its present or last answer."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.last: Run | None = None
        self.n_decoded = 0


class EngineClient:
    """One model and the process that has it."""

    def __init__(
        self,
        load: Load,
        max_waiting: int,
        log: Callable[[str], None],
        on_stats: Callable[[ResultStats], None],
    ) -> None:
        """max_waiting: requests that may wait. on_account: is told of every answer that ended."""
        self.load = load
        self.state: State = "unloaded"
        self.ready: Ready | None = None
        self.refusal: str | None = None
        self.progress = 0.0
        self.n_deaths = 0
        self.slots: list[Slot] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._max_waiting = max_waiting
        self._log = log
        self._on_stats = on_stats
        self._requests: set[Submission] = set()
        self._by_run: dict[int, tuple[Submission, Run]] = {}
        self._seconds: deque[float] = deque(maxlen=N_TIMED)
        self._asked: dict[int, asyncio.Future[SlotDone | Failed]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self.new_id = itertools.count(1).__next__
        """Returns a number for a `Run`."""

    @property
    def n_requests(self) -> int:
        """Requests being answered or waiting."""
        return len(self._requests)

    @property
    def n_processing(self) -> int:
        """Answers being made."""
        return sum(slot.run is not None for slot in self.slots)

    @property
    def n_deferred(self) -> int:
        """Answers that wait."""
        return len(self._by_run) - self.n_processing

    def require_ready(self) -> Ready:
        """What is known of the loaded model. NotReadyError before that."""
        if self.state != "ready" or self.ready is None:
            raise NotReadyError("the model is being loaded")
        return self.ready

    def start(self) -> None:
        """Has the model loaded; see `wait`."""
        if self._task is None:
            self.state = "loading"
            self._task = asyncio.create_task(self._live())

    async def wait(self) -> None:
        """Until the model is loaded or cannot be.

        Raises:
            NotReadyError: it cannot be.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.state != "loading" or self.refusal)
        if self.state != "ready":
            raise NotReadyError(self.refusal or "the model was unloaded")

    async def close(self) -> None:
        """Ends the process; requests in flight get an error."""
        self.state = "closed"
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._task = None
        await self._tell()

    def check_room(self) -> None:
        """BusyError if one more request would be one too many, NotReadyError while loading."""
        n_waiting = len(self._requests) - self.require_ready().n_parallel
        if n_waiting >= self._max_waiting:
            mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
            retry = mean * (n_waiting + 1) / max(len(self.slots), 1)
            raise BusyError(n_waiting, min(max(round(retry), 1), MAX_RETRY_S))

    def submit(self, runs: Sequence[Run]) -> Submission:
        """Has prompts answered; events of all of them come in one queue, to an end for each.

        Raises:
            BusyError, NotReadyError: see `check_room`.
        """
        self.check_room()
        request = Submission(self, runs)
        self._requests.add(request)
        for run in runs:
            self._by_run[run.id] = request, run
            self.send(run)
        return request

    async def act(self, slot: int, action: str, path: str) -> SlotDone | Failed:
        """Has the engine save, restore or erase what a slot's last text left behind.

        Raises:
            NotReadyError: the model is not loaded.
        """
        self.require_ready()
        number = self.new_id()
        answer: asyncio.Future[SlotDone | Failed] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.send(SlotAction(number, slot, action, path))
        try:
            return await answer
        finally:
            del self._asked[number]

    def send(self, message: Message) -> None:
        """Passes a message on. What a request may hold, and the queue, bound what is buffered."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _live(self) -> None:
        """Keeps a process running."""
        pause = MIN_PAUSE_S
        while True:
            self.state, self.refusal, self.progress = "loading", None, 0.0
            try:
                why = await self._one_life()
            finally:
                self._forget("the server is being shut down")
            was_ready, self.ready = self.ready is not None, None
            self.state = "loading"
            self.n_deaths += 1
            self.refusal = why if not was_ready else None
            self._log(f"engine: {why}")
            await self._tell()
            pause = MIN_PAUSE_S if was_ready else min(2 * pause, MAX_PAUSE_S)
            await asyncio.sleep(pause)

    async def _one_life(self) -> str:
        """Runs a process to its end; says why it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*module_command("dflash_gguf.serve.worker"), str(theirs.fileno())]
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                )
            except OSError as error:  # no memory for one, or too many: later there may be
                ours.close()
                return f"the process cannot be started: {error.strerror}"
        self.process = process
        reader, self._writer = await asyncio.open_connection(sock=ours)
        refused = None
        try:
            self.send(self.load)
            while True:
                try:
                    n = length(await reader.readexactly(4))
                    message = from_engine(await reader.readexactly(n))
                except (asyncio.IncompleteReadError, ConnectionError):
                    break
                if isinstance(message, Refused):
                    refused = message.sentence
                else:
                    await self._take(message)
        finally:
            self._writer.close()
            self._writer = None
            code = await asyncio.to_thread(_end, process)
        if refused is not None:
            return refused
        sentence = _why(code)
        self._forget(f"the engine process ended: {sentence}")
        return f"the process ended: {sentence}"

    async def _take(self, message: FromEngine) -> None:
        if isinstance(message, Loading):
            self.progress = message.done / max(message.total, 1)
        elif isinstance(message, Ready):
            self.ready, self.state = message, "ready"
            self.slots = [Slot() for _ in range(message.n_parallel)]
            await self._tell()
        elif isinstance(message, (SlotDone, Failed)) and message.id in self._asked:
            self._asked[message.id].set_result(message)
        elif not isinstance(message, (Refused, SlotDone)):
            request, run = self._by_run[message.id]
            if isinstance(message, Started):
                slot = self.slots[message.slot]
                slot.run, slot.n_decoded = run, 0
            elif isinstance(message, Stepped):
                # Skip the slot if another run has started in it meanwhile.
                for slot in self.slots:
                    slot.n_decoded += len(message.tokens) * (slot.run is run)
            elif isinstance(message, (Ended, Failed)):
                self._end_run(request, run)
                if isinstance(message, Ended):
                    self._on_stats(message.stats)
            request.events.put_nowait(message)

    def _end_run(self, request: Submission, run: Run) -> None:
        del self._by_run[run.id]
        request.open.discard(run.id)
        for slot in self.slots:
            if slot.run is run:
                slot.run, slot.last = None, run
        if not request.open:
            self._requests.discard(request)
            self._seconds.append(time.monotonic() - request.began)

    def _forget(self, sentence: str) -> None:
        """Ends all that is in flight with an error."""
        for request, run in list(self._by_run.values()):
            self._end_run(request, run)
            request.events.put_nowait(Failed(run.id, 500, sentence))
        for number, answer in self._asked.items():
            if not answer.done():
                answer.set_result(Failed(number, 500, sentence))
        self.slots = [Slot() for _ in self.slots]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process whose socket is closed; it is killed if it does not end."""
    try:
        return process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _why(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
