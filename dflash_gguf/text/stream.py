"""Incremental decoding of text: characters split across tokens, and stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
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
        self._automaton = _automaton(tuple(stops))
        self._has_stops = bool(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns the text that certainly belongs to the answer."""
        if self.matched is not None:
            return ""
        if not self._has_stops:
            return text
        automaton = self._automaton
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            self._state = automaton.step(self._state, character)
            if (stop := automaton.found[self._state]) is not None:
                self.matched, self._held = stop, ""
                return whole[: end - len(stop)]
        n_sure = len(whole) - automaton.depth[self._state]
        self._held = whole[n_sure:]
        return whole[:n_sure]

    def finish(self) -> str:
        """Returns the held back text, at the end of the answer."""
        rest, self._held = self._held, ""
        return rest


class _Automaton:
    """Aho-Corasick automaton: finds any of several texts in time linear in the searched text.

    A state stands for the longest end of the searched text that begins one of the texts. depth:
    its length. found: the longest of the texts that ends there, or None.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for text in texts:
            self._add(text)
        # Visits states in the order of depth: a state's links come from a shorter state's.
        states = list(self._next[0].values())
        for state in states:
            for character, following in self._next[state].items():
                states.append(following)
                shorter = self.step(self._shorter[state], character)
                self._shorter[following] = shorter
                self.found[following] = self.found[following] or self.found[shorter]

    def _add(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = text

    def step(self, state: int, character: str) -> int:
        """Returns the state after a character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Returns the automaton of stop texts, which the answers of a request share."""
    return _Automaton(stops)


def n_common(a: Sequence[T], b: Sequence[T]) -> int:
    """Returns the length of the common prefix of two texts or token lists."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def n_certain(text: str, mark: str) -> int:
    """Returns the length of the text without the longest end of it that may begin the mark."""
    for n in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:n]):
            return len(text) - n
    return len(text)


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Returns position and text of the first mark in a text, the longer of two; "" for no mark."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    at, _, mark = min(found, default=(-1, 0, ""))
    return at, mark
