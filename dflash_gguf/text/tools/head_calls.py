"""Parsers of calls that are a name, a mark and JSON arguments."""

from __future__ import annotations

from typing import ClassVar

from .json_calls import JsonCalls
from .parser import MAX_NAME, Reads


class HeadCalls(JsonCalls):
    """Parser for a name and JSON arguments, with one of the inner marks between them."""

    def _call(self, mark: str) -> Reads[None]:  # noqa: ARG002
        head = yield from self._until((*self.INNER, *self.CLOSINGS), MAX_NAME)
        if head is None or not (yield from self._one_of(self.INNER)):
            return
        name = self._name_in((yield from self._name(head)))
        if name is None:
            return
        yield self._begin(name)
        yield from self._json_arguments()

    def _name(self, head: str) -> Reads[str]:
        """Returns the name in the text before the mark."""
        yield from ()
        return head

    def _json_arguments(self) -> Reads[None]:
        if (yield from self._space()) == "{":
            yield from self._value(emits=True)
            yield from self._rest(is_sound=True)
        elif (yield from self._one_of(self.CLOSINGS)):
            yield self._arguments("{}")
            self._end()
        else:
            yield from self._rest(is_sound=False)


class Mistral(HeadCalls):
    """Parser for Mistral: a name and arguments behind the mark, or in older models a list."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
    INNER: ClassVar[tuple[str, ...]] = (ID, ARGUMENTS)

    def _call(self, mark: str) -> Reads[None]:  # noqa: ARG002
        if (yield from self._space()) in ("[", "{"):
            yield from self._objects()
            return
        head = yield from self._until((self.ID, self.ARGUMENTS, "{"), MAX_NAME)
        name = self._name_in(head)
        if name is None:
            return
        yield self._begin(name)
        if (yield from self._one_of((self.ID,))):
            yield from self._until((self.ARGUMENTS, "{"), MAX_NAME)
        yield from self._one_of((self.ARGUMENTS,))
        yield from self._json_arguments()


class DeepSeek(HeadCalls):
    """Parser for DeepSeek V3.1, and for R1 and V3, whose arguments are in a code block."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = (
        "<｜tool▁call▁end｜>",
        "```<｜tool▁call▁end｜>",
        "```\n<｜tool▁call▁end｜>",
    )
    SILENT: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    INNER: ClassVar[tuple[str, ...]] = ("<｜tool▁sep｜>",)

    def _name(self, head: str) -> Reads[str]:
        if head != "function":
            return head
        name = yield from self._until(("\n",), MAX_NAME)
        yield from self._space()
        yield from self._one_of(("```json",))
        return name or ""


class KimiK2(HeadCalls):
    """Parser for Kimi K2, whose names are functions.NAME:NUMBER."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|tool_call_begin|>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>",)
    SILENT: ClassVar[tuple[str, ...]] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    )
    INNER: ClassVar[tuple[str, ...]] = ("<|tool_call_argument_begin|>",)

    def _name(self, head: str) -> Reads[str]:
        yield from ()
        return head.strip().removeprefix("functions.").rpartition(":")[0] or head


class Functionary(HeadCalls):
    """Parser for Functionary 3.1."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<function=",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</function>",)
    INNER: ClassVar[tuple[str, ...]] = (">",)
