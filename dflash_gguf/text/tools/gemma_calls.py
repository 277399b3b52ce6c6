"""Parser of Gemma 4's calls, whose arguments are in a notation of their own."""

from __future__ import annotations

from typing import ClassVar

from ..stream import first_mark
from .parser import MAX_NAME, CallParser, Reads
from .values import escaped, parsed, quoted

MAX_DEPTH = 64
"""Most levels of arguments. Deeper ones are malformed: the parser recurses for each."""


class Gemma4(CallParser):
    """Parser for objects with bare keys and texts between marks, of which it makes JSON."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("<tool_call|>",)
    QUOTE = '<|"|>'
    INNER: ClassVar[tuple[str, ...]] = (QUOTE,)

    def _call(self, mark: str) -> Reads[None]:  # noqa: ARG002
        yield from self._space()
        if not (yield from self._one_of(("call:",))):
            return
        head = yield from self._until(("{",), MAX_NAME)
        name = self._name_in(head)
        if name is None:
            return
        yield self._begin(name)
        is_sound = yield from self._members(0)
        yield from self._rest(is_sound=is_sound)

    def _members(self, depth: int) -> Reads[bool]:
        """Reads an object or a list from its bracket on. Returns False if it is malformed."""
        is_object = self._held[0] == "{"
        end = "}" if is_object else "]"
        yield self._arguments(self._take(1))
        before = ""
        while (character := (yield from self._space())) != end:
            if before and character == ",":
                self._take(1)
                character = yield from self._space()
            elif before:
                return False
            if character in ("", end):
                break
            yield self._arguments(before)
            before = ", "
            if is_object:
                if (yield from self._one_of((self.QUOTE,))):
                    key = yield from self._until((self.QUOTE,), MAX_NAME)
                    yield from self._one_of((self.QUOTE,))
                    yield from self._space()
                else:
                    key = yield from self._until((":",), MAX_NAME)
                if key is None or not (yield from self._one_of((":",))):
                    return False
                yield self._arguments(f"{quoted(key.strip())}: ")
            if not (yield from self._one_value(depth)):
                return False
        if not (yield from self._one_of((end,))):
            return False
        yield self._arguments(end)
        return True

    def _one_value(self, depth: int) -> Reads[bool]:
        """Reads a value. Returns False if it is malformed or cut off."""
        if (yield from self._one_of((self.QUOTE,))):
            return (yield from self._quoted())
        if (yield from self._space()) in ("{", "["):
            return depth < MAX_DEPTH and (yield from self._members(depth + 1))
        text = ((yield from self._until((",", "}", "]", *self.CLOSINGS))) or "").strip()
        yield self._arguments(text if parsed(text) is not ... else quoted(text))
        return bool(text)

    def _quoted(self) -> Reads[bool]:
        yield self._arguments('"')
        while True:
            at, mark = first_mark(self._held, (self.QUOTE,))
            n = at if mark else self._n_certain((self.QUOTE,))
            yield self._arguments(escaped(self._take(n)))
            if mark:
                self._take(len(mark))
                yield self._arguments('"')
                return True
            if not (yield from self._more()):
                return False
