"""Runs a function of a C library that recurses deeply in a thread with a large stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()  # the stack size of new threads is a setting of the whole process


def run_with_stack(run: Callable[[], T], n_bytes: int) -> T:
    """Returns run(), which runs in a thread with n_bytes of stack; MemoryError if memory is short.

    An exception of `run` is raised here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    with _lock:
        before = threading.stack_size(n_bytes // 4096 * 4096)
        try:
            thread.start()
        except RuntimeError:
            raise MemoryError(f"no memory for a stack of {n_bytes} bytes") from None
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
