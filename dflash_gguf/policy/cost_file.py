"""What was learned about a pair on this machine, kept between processes: no answer begins cold.

Costs of rounds, and how often candidates of each proposer were taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .. import machine_cache
from ..convert.schema import SPLIT_ENDING
from .costs import Costs

N_HEADER = 1 << 16
"""Bytes at a file's start that tell it from another of the same size and time."""


class CostFile:
    """Where that of one pair is kept: by its files, the device, its threads, and settings."""

    def __init__(self, paths: Sequence[str], *settings: str | int) -> None:
        """paths: target and drafter. settings: whatever else changes what a pass costs.

        Errors: OSError for a file that cannot be read.
        """
        files = [_file_identity(part) for path in paths for part in files_of(path)]
        self._identity = [*files, *map(str, settings), machine_cache.cpu_name()]
        name = hashlib.sha256("\n".join(self._identity).encode()).hexdigest()[:16]
        self._name = f"costs-{name}.json"

    def load(self, n_first: int = 1) -> tuple[Costs, dict[str, Any]]:
        """What was measured before, and what proposers have learned, by their names.

        Empty if nothing was, or if it makes no sense. n_first: as of `Costs`.
        """
        stored = machine_cache.read(self._name, self._identity)
        if stored is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                return Costs.from_dict(stored["costs"], n_first), dict(stored["learned"])
        return Costs(n_first), {}

    def store(self, costs: Costs, learned: Mapping[str, Any]) -> None:
        """Keeps both."""
        value = {"costs": costs.to_dict(), "learned": dict(learned)}
        machine_cache.write(self._name, self._identity, value)


def files_of(path: str) -> list[str]:
    """The files of a model: this one, and those that follow it if it is the first of several."""
    found = re.search(r"-00001-of-(\d{5})\.gguf$", path)
    if found is None:
        return [path]
    prefix, n = path[: found.start()], int(found[1])
    others = (prefix + SPLIT_ENDING % (i, n) for i in range(2, n + 1))
    return [path, *itertools.takewhile(os.path.exists, others)]


def _file_identity(path: str) -> str:
    stat = os.stat(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(N_HEADER)).hexdigest()
    return f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns} {digest}"
