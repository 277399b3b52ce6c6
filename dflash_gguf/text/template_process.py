"""Renders chat templates in a child process with limits on time and memory.

A template is a program that came with a model file. Jinja's sandbox keeps it from files and from
Python, but neither from endless loops nor from large texts, and a thread cannot be ended.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO

from .._run_module import module_command
from .chat import check_template, render

MAX_RENDER_S = 10.0
"""Most seconds of a template, parsing included. Most take less than a hundredth of a second."""
MAX_MEMORY = 1 << 30
"""Most bytes of memory of a template, beyond those of the process before it."""
MAX_PROMPT_BYTES = 1 << 27
"""Most bytes of a rendered prompt, in UTF-8."""
FUNCTIONS: dict[str, Callable[..., str | None]] = {"render": render, "check": check_template}
DONE, FAILED = b"+", b"-"
_length = struct.Struct("<Q")


class TemplateProcess:
    """Calls `chat.render` and `chat.check_template` in a child process. Threads may share it.

    The process starts with the first call, and again after a template was ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    def render(self, *args: Any, **settings: Any) -> str:
        """Returns what `chat.render` does; ValueError also for a template that exceeds a limit."""
        return self._call("render", *args, **settings)

    def check(self, template: str) -> None:
        """Raises ValueError for a text that is no Jinja template or exceeds a limit."""
        self._call("check", template)

    def close(self) -> None:
        """Ends the process. A call that waits for its result raises ValueError."""
        if (end := self._end) is not None:
            end()

    def _call(self, name: str, *args: Any, **settings: Any) -> str:
        try:
            request = pickle.dumps((name, args, settings))
        except Exception as error:  # values of any type, given to the Python interface
            raise ValueError(f"a value for the chat template cannot be copied: {error}") from None
        with self._lock:
            process = self._started()
            try:
                status, data = self._answer(process, request)
            except TimeoutError:
                self._kill()
                raise ValueError(
                    f"the chat template fails: it takes longer than {MAX_RENDER_S:g} s"
                ) from None
            except (OSError, EOFError):
                self._kill()
                raise ValueError("the chat template fails: it ended its process") from None
        text = data.decode("utf-8", "surrogatepass")
        if status != DONE:
            raise ValueError(text)
        return text

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            try:
                self._process = subprocess.Popen(
                    module_command("dflash_gguf.text.template_process"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise ValueError(
                    f"the chat template needs a process, none can be started: {error.strerror}"
                ) from None
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._end()
            self._process = None

    def _answer(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
        assert process.stdin is not None
        assert process.stdout is not None
        ends_at = time.monotonic() + MAX_RENDER_S
        process.stdin.write(_length.pack(len(request)) + request)
        process.stdin.flush()
        descriptor = process.stdout.fileno()
        (n,) = _length.unpack(_read(descriptor, _length.size, ends_at))
        if n > MAX_PROMPT_BYTES + 1:
            raise OSError  # what a sandbox that was left may send
        data = _read(descriptor, n, ends_at)
        return data[:1], data[1:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()


def _read(descriptor: int, n: int, ends_at: float) -> bytes:
    """Reads n bytes of a pipe. TimeoutError after ends_at, EOFError at the end of the pipe."""
    data = io.BytesIO()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while data.tell() < n:
            if not selector.select(max(0.0, ends_at - time.monotonic())):
                raise TimeoutError
            part = os.read(descriptor, min(n - data.tell(), 1 << 20))
            if not part:
                raise EOFError
            data.write(part)
    return data.getvalue()


def _limit(kind: str, value: int) -> None:
    """Sets a soft limit of this process where the system has it."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        number = getattr(resource, kind)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def _answered(request: bytes) -> bytes:
    name, args, settings = pickle.loads(request)
    try:
        text = FUNCTIONS[name](*args, **settings) or ""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_PROMPT_BYTES:
            raise ValueError(
                f"the chat template fails: it makes more than {MAX_PROMPT_BYTES} bytes"
            )
    except ValueError as error:
        return FAILED + str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return FAILED + f"the chat template needs more than {MAX_MEMORY >> 20} MiB".encode()
    except Exception as error:  # the code of a template may raise anything
        return FAILED + f"the chat template fails: {error}".encode("utf-8", "surrogatepass")
    return DONE + data


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until their end; the child process's side."""
    while len(head := requests.read(_length.size)) == _length.size:
        # Without a limit a template with an endless loop would run on after the parent was killed.
        _limit("RLIMIT_CPU", int(time.process_time() + MAX_RENDER_S) + 2)
        answer = _answered(requests.read(_length.unpack(head)[0]))
        answers.write(_length.pack(len(answer)) + answer)
        answers.flush()


def main() -> None:
    """Serves the parent process over standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        _limit("RLIMIT_AS", int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
