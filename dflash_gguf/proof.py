"""Which of ggml's extra CPU buffer types run on this machine, proven once in a child process.

A kernel built for instructions the machine or its operating system lacks kills the process that
tries it (GCC 12 builds ggml's AMX kernels that way), so the trial is left to a child, and what it
found is remembered for this very build of ggml on this kind of CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_REFUTED = 86
_TRIAL = f"""
import sys
from dflash_gguf.core import Error, probe_buffer_type
try:
    probe_buffer_type(sys.argv[1])
except Error as error:
    print(error, file=sys.stderr)
    sys.exit({_REFUTED})
"""
_TRIAL_SECONDS = 60


def cache_folder() -> Path:
    """Folder for what is measured once a machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflash-gguf"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()


def _identity(library: Path) -> str:
    stat = library.stat()
    return f"{library} {stat.st_size} {stat.st_mtime_ns} {_cpu_name()} {platform.release()}"


def _runs(name: str) -> bool | None:
    """Whether the kernels run; None if the child failed for a reason of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, name], capture_output=True, timeout=_TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return True
    return False if done.returncode < 0 or done.returncode == _REFUTED else None


def proven_buffer_types(names: Sequence[str], library: Path) -> list[str]:
    """Those of names whose kernels run and multiply rightly. library: the file that holds them."""
    file = cache_folder() / "buffer-types.json"
    identity = _identity(library)
    known: dict[str, bool] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.get("identity") == identity:
            known = {str(k): v is True for k, v in stored["runs"].items()}
    missing = [name for name in names if name not in known]
    if missing:
        # What was not settled is tried again by the next process.
        known |= {name: runs for name in missing if (runs := _runs(name)) is not None}
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, delete=False, encoding="utf-8"
            ) as out:
                json.dump({"identity": identity, "runs": known}, out)
            Path(out.name).replace(file)
    return [name for name in names if known.get(name, False)]
