"""An answer in the making, and the callbacks of whoever reads it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from .engine.jobs import Job
from .outputs import Result, Step
from .speculative.speculator import Progress


class Runner(Protocol):
    """The decoder of a stream, as the stream uses it."""

    def _step(self, job: Job, taken: list[Step], *, run: bool) -> None: ...
    def _end(self, job: Job) -> None: ...
    def _finish(self, result: Result) -> Result: ...


class Callbacks:
    """What asks and tells whoever wants an answer. Any other's reader may run the round.

    So what they raise ends the answer, and goes to its own reader.
    """

    def __init__(self, cancelled: Callable[[], bool] | None, on_prefill: Progress | None) -> None:
        self._cancelled, self._on_prefill = cancelled, on_prefill
        self.reader: weakref.ref[Stream] | None = None
        """The stream: once that is gone, nobody will read the answer."""
        self._is_dropped = False
        self._error: BaseException | None = None

    def drop(self) -> None:
        """Nobody will read the answer."""
        self._is_dropped = True

    def cancelled(self) -> bool:
        """Whether the answer is to end."""
        is_gone = self.reader is not None and self.reader() is None
        if is_gone or self._is_dropped or self._error is not None:
            return True
        try:
            return self._cancelled is not None and self._cancelled()
        except KeyboardInterrupt:  # no callback's own
            raise
        except BaseException as error:
            self._error = error
            return True

    def on_prefill(self, done: int, total: int) -> None:
        """The prompt has come so far."""
        try:
            if self._on_prefill is not None:
                self._on_prefill(done, total)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._error = error

    def take_error(self) -> BaseException | None:
        """What one of them raised, once."""
        error, self._error = self._error, None
        if error is not None:
            self._is_dropped = True
        return error


class Stream:
    """An answer in the making: iterate for its steps; `result()` is its account so far."""

    def __init__(self, decoder: Runner, job: Job, calls: Callbacks) -> None:
        self._decoder = decoder
        self._job = job
        self._calls = calls

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return self._read(run=True, waits=True)[0]

    def poll(self, *, run: bool) -> Step | None:
        """The next step; if it is not there, after one round for all, if `run`.

        None where that brought it none. Who reads several streams learns with it of each step as
        soon as its round is over, also while a long prompt of one of them is computed.
        Errors: StopIteration where the answer is over; what one of its callbacks raised.
        """
        taken = self._read(run=run, waits=False)
        return taken[0] if taken else None

    def _read(self, *, run: bool, waits: bool) -> list[Step]:
        taken: list[Step] = []
        try:
            while True:
                try:
                    self._decoder._step(self._job, taken, run=run)
                finally:
                    self._raise_error()
                if taken or not waits:
                    return taken
        except BaseException:
            # The step did not reach its reader. One call, which no further interruption divides.
            self._job.steps.extendleft(taken)
            self._job.n_unread += sum([len(step.tokens) for step in taken])
            raise

    def _raise_error(self) -> None:
        """What one of its callbacks raised."""
        if (error := self._calls.take_error()) is not None:
            self.close()
            raise error

    def close(self) -> None:
        """Ends the answer where it is."""
        self._decoder._end(self._job)

    def result(self) -> Result:
        """The account so far; final once the iteration has ended."""
        return self._decoder._finish(self._job.writing.result())
