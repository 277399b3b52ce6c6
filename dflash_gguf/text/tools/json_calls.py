"""Parsers of calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from typing import ClassVar

from ..reasoning import OutputPart
from .parser import CallParser, Reads
from .values import decoded

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
KEYS = (*NAMES, *ARGUMENTS, "type", "function", "id")
"""Keys of a call outside of marks."""


class JsonCalls(CallParser):
    """Parser for objects, or lists of objects, between marks."""

    def _call(self, mark: str) -> Reads[None]:  # noqa: ARG002
        yield from self._objects()

    def _objects(self, *, is_bare: bool = False) -> Reads[None]:
        """Reads one object, or several in a list or in a row.

        is_bare: True outside of marks, where only objects with the name of a tool are calls.
        """
        is_list = (yield from self._space()) == "["
        if is_list:
            self._take(1)
        while (yield from self._space()) == "{":
            self._raw = self._raw or ""
            is_sound = yield from self._object(is_bare=is_bare)
            if not self._has_begun():
                return
            if not is_sound:
                yield from self._rest(is_sound=False)
                return
            self._end()
            if self._is_done:
                return
            if (yield from self._space()) in (",", ";"):
                self._take(1)
        if self._has_begun():
            yield from self._rest(is_sound=True)

    def _object(self, *, is_bare: bool) -> Reads[bool]:
        """Reads an object. Returns False if it is malformed or cut off."""
        self._take(1)
        early: str | None = None
        has_arguments = False
        while True:
            character = yield from self._space()
            if character == "}":
                self._take(1)
                break
            if character == ",":
                self._take(1)
                continue
            key = decoded((yield from self._value())) if character == '"' else None
            if key is None or (yield from self._space()) != ":":
                return False
            self._take(1)
            if is_bare and key not in KEYS:
                return False  # an answer in JSON
            character = yield from self._space()
            if key == "function" and character == "{" and not self._has_begun():
                if not (yield from self._object(is_bare=is_bare)):
                    return False
                has_arguments = True
            elif key in NAMES and not self._has_begun():
                name = decoded((yield from self._value()))
                is_known = not is_bare or name in self._tools.parameters
                if not name or not is_known or not self._tools.allows(name):
                    return False
                yield self._begin(name)
                if early is not None:
                    yield self._arguments(early)
            elif key in ARGUMENTS and not has_arguments:
                has_arguments = True
                if self._has_begun() and character != '"':
                    yield from self._value(emits=True)
                    continue
                early = yield from self._value()
                text = decoded(early)
                early = early if text is None else text
                if self._has_begun():
                    yield self._arguments(early)
            else:
                yield from self._value()
        if self._has_begun() and not has_arguments:
            yield self._arguments("{}")
        return self._has_begun()


class Hermes(JsonCalls):
    """Parser for Hermes, Qwen2.5, Qwen3 and others."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</tool_call>",)


class BareJson(Hermes):
    """Parser for answers that are a call, with or without marks or a code block around it."""

    CLOSINGS: ClassVar[tuple[str, ...]] = ("</tool_call>", "```")
    FENCES: ClassVar[tuple[str, ...]] = ("```json", "```")

    def _run(self) -> Reads[None]:
        self._raw = ""
        yield from self._space()
        yield from self._one_of(self.FENCES)
        if (yield from self._space()) in ("{", "["):
            yield from self._objects(is_bare=True)
        if self._raw is not None:
            yield OutputPart(self._raw)
            self._raw = None
        if not self.is_done:
            yield from super()._run()


class Llama3(BareJson):
    """Parser for Llama 3.x, whose answer is one call."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)


class Cohere(JsonCalls):
    """Parser for Command R7B and later."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("<|END_ACTION|>",)


class Granite3(JsonCalls):
    """Parser for Granite 3."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)


class NemotronV2(JsonCalls):
    """Parser for Nemotron Nano 2."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<TOOLCALL>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</TOOLCALL>",)


class ToolCalls(JsonCalls):
    """Parser for Apriel and MiniMax M1."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_calls>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</tool_calls>",)


class Functools(JsonCalls):
    """Parser for Firefunction 2."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("functools",)


class GigaChat(JsonCalls):
    """Parser for GigaChat 3.1."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|function_call|>",)
