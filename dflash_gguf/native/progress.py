"""Progress callbacks of long calls, from C to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._ffi import Error, ffi, lib

Progress = Callable[[int, int], None]
"""A callback with (done, total), in bytes or tokens. Raises an exception to cancel the call."""


def interruptible(_done: int, _total: int) -> None:
    """A progress callback for calls without one: Ctrl-C then ends the call at a micro-batch."""


@contextmanager
def c_callback(progress: Progress | None) -> Iterator[Any]:
    """Wraps `progress` for C; an exception of `progress` replaces the core's Error of the call."""
    if progress is None:
        yield ffi.NULL
        return
    raised: list[BaseException] = []

    def on_progress(_user: Any, done: int, total: int) -> int:
        progress(done, total)
        return 0

    def keep(_kind: object, error: BaseException, _trace: object) -> None:
        raised.append(error)  # exceptions cannot pass through C

    lib()
    try:
        # A signal during the call is raised at the start of the callback, before any `try` in it.
        yield ffi.callback("dfl_progress", on_progress, error=1, onerror=keep)
    except Error:
        if raised:
            raise raised[0] from None
        raise
    if raised:  # the last callback raised after the work was done
        raise raised[0]
