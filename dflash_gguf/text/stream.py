"""Incremental text: characters split across tokens, and texts that end an answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Utf8Stream:
    """Joins the bytes of tokens to text; an incomplete character waits for its rest.

    The joined text equals `b"".join(pieces).decode("utf-8", "replace")` however the bytes were cut:
    bytes that cannot become a character give U+FFFD at once, an incomplete one only at the end.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """Adds bytes and returns the text they completed."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Returns what is left, with U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Passes text on until a stop text occurs; holds back what may be the beginning of one.

    Of several stop texts the one that is complete first counts, and of two that are complete
    with the same character the longer, so that the answer does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns what is certain to belong to the answer."""
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
        """Returns what was held back and did not become a stop text."""
        rest, self._held = self._held, ""
        return rest


def n_common(a: Sequence[T], b: Sequence[T]) -> int:
    """Counts the characters or tokens that two texts of one type begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
