"""A Python function as the progress callback of a long call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._ffi import Error, ffi, lib

Progress = Callable[[int, int], None]
"""Called with the part done and the whole. It may raise, to cancel."""


@contextmanager
def c_callback(progress: Progress | None) -> Iterator[Any]:
    """`progress` as a C callback; what it raises comes out of the with block instead of Error."""
    if progress is None:
        yield ffi.NULL
        return
    raised: list[BaseException] = []

    def on_progress(_user: Any, done: int, total: int) -> int:
        try:
            progress(done, total)
        except BaseException as error:  # C must not see it; it is raised below
            raised.append(error)
            return 1
        return 0

    lib()
    try:
        yield ffi.callback("dfl_progress", on_progress)
    except Error:
        if raised:
            raise raised[0] from None
        raise
    if raised:  # raised at the very end, when there was nothing left to cancel
        raise raised[0]
