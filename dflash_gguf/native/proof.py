"""Tests once, in a child process, which of ggml's extra CPU buffer types run on this machine.

A kernel with instructions that the CPU or the operating system lacks kills its process (GCC 12
builds ggml's AMX kernels that way). The result is cached for this build of ggml and this CPU.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .. import _cache_dir
from .._run_module import module_command

FILE = "buffer-types.json"
REFUTED = 86
"""Exit code of the child process if a buffer type multiplies wrongly."""
_TRIAL_SECONDS = 60


def _identity(library: Path) -> str:
    stat = library.stat()
    machine = f"{_cache_dir.cpu_name()} {platform.release()}"
    return f"{library} {stat.st_size} {stat.st_mtime_ns} {machine}"


def _runs(name: str) -> bool | None:
    """True if a buffer type's kernels run; None if the child failed for another reason."""
    try:
        command = [*module_command("dflash_gguf.native.trial"), name]
        done = subprocess.run(command, capture_output=True, timeout=_TRIAL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return True
    return False if done.returncode < 0 or done.returncode == REFUTED else None


def proven_buffer_types(names: Sequence[str], library: Path) -> list[str]:
    """Returns the buffer types whose kernels run and multiply correctly. library: ggml's file."""
    identity = _identity(library)
    stored = _cache_dir.read(FILE, identity)
    known = {}
    if isinstance(stored, dict):
        known = {str(name): runs is True for name, runs in stored.items()}
    missing = [name for name in names if name not in known]
    if missing:
        # Types without a result are left out: the next process tests them again.
        known |= {name: runs for name in missing if (runs := _runs(name)) is not None}
        _cache_dir.write(FILE, identity, known)
    return [name for name in names if known.get(name, False)]
