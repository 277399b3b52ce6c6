"""Incremental decoding of text: characters split across tokens, and stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Utf8Stream:
    """Decodes pieces of UTF-8, with U+FFFD for bad bytes; holds back incomplete characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """Adds bytes and returns the text that they complete."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Returns U+FFFD if the bytes end with an incomplete character, else an empty text."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Passes text on until a stop text occurs; holds back text that may begin a stop text.

    The first complete stop text counts, the longer one if two end with the same character, so that
    the answer does not depend on how its text is cut.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns the text that certainly belongs to the answer."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, self.matched = min(ends, key=lambda found: found[0])
            self._held = ""
            return text[: end - len(self.matched)]
        n_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """Returns the held back text, at the end of the answer."""
        rest, self._held = self._held, ""
        return rest


def n_common(a: Sequence[T], b: Sequence[T]) -> int:
    """Returns the length of the common prefix of two texts or token lists."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
