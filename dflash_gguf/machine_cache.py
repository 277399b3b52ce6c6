"""Small JSON files of what is measured once a machine. An unreadable file counts as missing."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

from .convert.schema import SPLIT_ENDING

N_HEADER = 1 << 16
"""Bytes at a file's start that tell it from another of the same size and time."""


def cache_folder() -> Path:
    """Folder for what is measured once a machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflash-gguf"


def cpu_name() -> str:
    """What tells this kind of CPU from others."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()


def files_of(path: str) -> list[str]:
    """The files of a model: this one, and those that follow it if it is the first of several."""
    found = re.search(r"-00001-of-(\d{5})\.gguf$", path)
    if found is None:
        return [path]
    prefix, n = path[: found.start()], int(found[1])
    others = (prefix + SPLIT_ENDING % (i, n) for i in range(2, n + 1))
    return [path, *itertools.takewhile(os.path.exists, others)]


def model_identity(path: str) -> list[str]:
    """What tells a model's files from others, a line a file.

    Errors: OSError for a file that cannot be read.
    """
    return [_file_identity(part) for part in files_of(path)]


def _file_identity(path: str) -> str:
    stat = os.stat(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(N_HEADER)).hexdigest()
    return f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns} {digest}"


def read(name: str, identity: Any) -> Any:
    """What was stored under a name for the same identity; None if nothing was, or no longer is."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        stored = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        if stored.get("identity") == identity:
            return stored.get("value")
    return None


def write(name: str, identity: Any, value: Any) -> None:
    """Stores a value, whole or not at all; where the folder cannot be written, not at all."""
    file = cache_folder() / name
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as out:
            json.dump({"identity": identity, "value": value}, out)
        Path(out.name).replace(file)
