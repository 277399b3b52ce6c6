"""Runs a part of the GPU measurement in a child process under a time limit."""

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
"""Pattern of the lines on stderr with which ggml reports a failure."""
PATIENCE_S = 3.0
"""Seconds between SIGTERM and SIGKILL, so that a build tool can end its compilers, which are in
process groups of their own."""


def report(name: str, lines: Iterator[Figures]) -> None:
    """Prints measured figures as JSON lines; an error ends this process with a message."""
    try:
        for figures in lines:
            print(json.dumps({"part": name, **figures}), flush=True)
    except (native.Error, ConvertError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except SystemExit as error:  # a failed build raises SystemExit(message)
        sys.exit(f"error: {error.code}")


class Child:
    """A running process with a session of its own, so that its children can be ended with it."""

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
        """Yields stdout lines until the end or the time limit; then sets `error`, `seconds`."""
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
                    self._limit_s += PATIENCE_S + 5.0  # time to read the ended process's last lines
                    continue
                if line is None:
                    break
                yield line
            self._end()
            status = self._process.wait()
            self._reader.join()
            if is_late:
                self.error = f"stopped at the time limit, after {self.seconds:.0f} s"
            elif status != 0:
                self.error = self._reason(status)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the process if it runs, and closes its pipes."""
        self._end()
        self._process.wait()
        self._reader.join()
        self._stderr.close()

    def _end(self) -> None:
        """Ends the process group by SIGTERM, and after PATIENCE_S by SIGKILL."""
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
            return f"ended with status {status} and no message"
        of_ours = next((line for line in lines if line.startswith("error: ")), None)
        if of_ours is not None or lines[0].startswith("Traceback"):
            return (of_ours or lines[-1]).removeprefix("error: ")
        return next((line for line in lines if ERROR.search(line)), lines[-1])
