"""Stores measurements of this machine as JSON files. An unreadable file counts as missing."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from ._files import check_file, write_text

SENSELESS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions raised while reading a stored value that is valid JSON of an unexpected form."""


def cache_folder() -> Path:
    """Returns dflash-gguf in $XDG_CACHE_HOME or ~/.cache; an unusable path if there is no home."""
    base: str | Path = os.environ.get("XDG_CACHE_HOME") or os.devnull
    if base == os.devnull:
        with contextlib.suppress(RuntimeError):
            base = Path.home() / ".cache"
    return Path(base) / "dflash-gguf"


def cpu_name() -> str:
    """Returns the name of the CPU model, which stored measurements belong to."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()


def read(name: str, identity: Any) -> Any:
    """Returns a cached value; None if its file names another identity, such as another CPU."""
    with contextlib.suppress(OSError, *SENSELESS):
        file = cache_folder() / name
        check_file(file)
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.get("identity") == identity:
            return stored.get("value")
    return None


def write(name: str, identity: Any, value: Any) -> None:
    """Stores a value atomically; does nothing if the cache folder cannot be written."""
    file = cache_folder() / name
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"identity": identity, "value": value}))
