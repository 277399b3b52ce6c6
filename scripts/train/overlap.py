"""Finds texts that share a run of words with held-out ones, which a training must not see."""

from __future__ import annotations

import re
from collections.abc import Iterable

RUN = 13
"""Words in a row that a training text must not share with a held-out text."""


def words(text: str) -> list[str]:
    """Returns the words and numbers of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


class HeldOutRuns:
    """All runs of `RUN` words of some held-out texts; a shorter text is a run as a whole."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            found = words(text)
            size = min(RUN, len(found))
            if size:
                self._runs.setdefault(size, set()).update(_runs(found, size))

    def are_in(self, text: str) -> bool:
        """True if a text shares a run with a held-out text."""
        found = words(text)
        return any(
            run in held_out for size, held_out in self._runs.items() for run in _runs(found, size)
        )


def _runs(found: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return (tuple(found[i : i + size]) for i in range(len(found) - size + 1))
