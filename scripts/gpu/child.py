"""A process that prints lines, under a time limit; what it says last is its error."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from dflash_gguf.convert.errors import ConvertError

from dflash_gguf import native

from .setting import Figures

ERROR = re.compile(r"GGML_ASSERT|error", re.IGNORECASE)
"""Lines of ggml that name what went wrong."""
PATIENCE_S = 3.0
"""A build tool ends its compilers meanwhile, which are no part of its process group."""


def report(name: str, lines: Iterator[Figures]) -> None:
    """Prints a part's figures as they come, in the process of that part."""
    try:
        for figures in lines:
            print(json.dumps({"part": name, **figures}), flush=True)
    except (native.Error, ConvertError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except SystemExit as error:  # of the scripts that build
        sys.exit(f"error: {error.code}")


class Child:
    """Starts at once, in a session of its own so that what it starts ends with it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], limit_s: float
    ) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._limit_s, self._started = limit_s, time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.error: str | None = None
        self.seconds = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as output:
                for line in output:
                    self._lines.put(line.rstrip("\n"))
        self.seconds = time.monotonic() - self._started
        self._lines.put(None)

    def lines(self) -> Iterator[str]:
        """Yields its lines until it ends or is ended; then `error` and `seconds` are known."""
        is_late = False
        try:
            while True:
                left = self._started + self._limit_s - time.monotonic()
                try:
                    line = self._lines.get(timeout=max(left, 0.0))
                except queue.Empty:
                    if is_late:
                        break
                    is_late = True
                    self._end()
                    self._limit_s += PATIENCE_S + 5.0  # for what it had printed
                    continue
                if line is None:
                    break
                yield line
            self._end()
            status = self._process.wait()
            self._reader.join()
            if is_late:
                self.error = f"stopped after {self.seconds:.0f} s"
            elif status != 0:
                self.error = self._reason(status)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends it, however far it is."""
        self._end()
        self._process.wait()
        self._reader.join()
        self._stderr.close()

    def _end(self) -> None:
        """Ends it and its children, which may first end their own."""
        for how, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 0.0)):
            until = time.monotonic() + patience_s
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
                while time.monotonic() < until:
                    self._process.poll()
                    os.killpg(self._process.pid, 0)
                    time.sleep(0.02)

    def _reason(self, status: int) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        if not lines:
            return f"ended with status {status} and said nothing"
        of_ours = next((line for line in lines if line.startswith("error: ")), None)
        if of_ours is not None or lines[0].startswith("Traceback"):
            return (of_ours or lines[-1]).removeprefix("error: ")
        return next((line for line in lines if ERROR.search(line)), lines[-1])
