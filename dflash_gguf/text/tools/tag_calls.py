"""Parsers of calls whose arguments are raw texts between tags, of which they make JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from .parser import MAX_NAME, CallParser, Reads
from .values import escaped, json_of, quoted, types_of


class TagCalls(CallParser):
    """Parser for a function's name and its parameters in tags.

    A value ends at its closing tag if another tag of the call follows, so that values may hold
    closing tags themselves.
    """

    HEAD: ClassVar[str] = ""
    """Text before the name, behind the opening mark."""
    NAME_ENDS: ClassVar[tuple[str, ...]] = ()
    """Texts behind the name."""
    KEY: ClassVar[str] = ""
    """Text before the name of a parameter."""
    KEY_END: ClassVar[str] = ""
    """Text behind the name of a parameter."""
    VALUE: ClassVar[str] = ""
    """Text before a value, after white space behind KEY_END."""
    VALUE_END: ClassVar[str] = ""
    """Text behind a value."""
    ENDS: ClassVar[tuple[str, ...]] = ()
    """Tags that end the parameters."""
    TRIMS_LINES: ClassVar[bool] = False
    """True if a line break behind the opening tag of a value, and before its closing tag, is not
    part of the value."""

    def _call(self, mark: str) -> Reads[None]:
        if mark != self.HEAD and self.HEAD:
            yield from self._space()
            if not (yield from self._one_of((self.HEAD,))):
                return
        head = yield from self._until(self.NAME_ENDS, MAX_NAME)
        name = self._name_in(head)
        if name is None:
            return
        yield self._begin(name)
        yield from self._one_of((">", '">'))
        end = yield from self._parameters(name)
        if not end:
            yield from self._rest(is_sound=False)
        elif end not in self.CLOSINGS and (yield from self._space()):
            yield from self._one_of(self.CLOSINGS)
        self._end()

    def _parameters(self, name: str) -> Reads[str]:
        """Reads the parameters. Returns the tag that ends them, "" if they are malformed."""
        schema = self._tools.parameters.get(name, {})
        properties = schema.get("properties")
        before = "{"
        while True:
            yield from self._space()
            tag = yield from self._one_of((self.KEY, *self.ENDS))
            if tag and tag != self.KEY:
                yield self._arguments("{}" if before == "{" else "}")
            if tag != self.KEY:
                return tag
            key = yield from self._until((self.KEY_END,), MAX_NAME)
            if key is None:
                return ""
            self._take(len(self.KEY_END))
            if self.VALUE:
                yield from self._space()
                if not (yield from self._one_of((self.VALUE,))):
                    return ""
            known = properties.get(key) if isinstance(properties, Mapping) else None
            yield self._arguments(f"{before}{quoted(key)}: ")
            yield from self._raw_value(types_of(known, schema))
            before = ", "

    def _raw_value(self, types: frozenset[str]) -> Reads[None]:
        """Reads a value and its closing tag, and passes the value on as JSON."""
        is_text, taken, n_end = types == {"string"}, [], 0
        if self.TRIMS_LINES:
            yield from self._one_of(("\n",))
        if is_text:
            yield self._arguments('"')
        while not n_end:
            n, n_end = self._extent()
            text = self._take(n)
            if is_text:
                yield self._arguments(escaped(text))
            else:
                taken.append(text)
            if not n_end and not (yield from self._more()):
                yield self._arguments("".join(taken))
                return
        self._take(n_end)
        yield self._arguments('"' if is_text else json_of("".join(taken), types))

    def _extent(self) -> tuple[int, int]:
        """Returns the held characters that belong to the value, and those of its end, 0 if none."""
        at, tags = 0, (self.KEY, *self.ENDS)
        while (at := self._held.find(self.VALUE_END, at)) >= 0:
            end = at + len(self.VALUE_END)
            rest = self._held[end:].lstrip()
            is_end = rest.startswith(tags) or (self._is_over and not rest)
            if is_end or (not self._is_over and any(tag.startswith(rest) for tag in tags)):
                n = at - (self.TRIMS_LINES and self._held[:at].endswith("\n"))
                return n, end - n if is_end else 0
            at = end
        n = self._n_certain((self.VALUE_END,))
        is_open = self.TRIMS_LINES and not self._is_over and self._held[:n].endswith("\n")
        return n - is_open, 0


class QwenTags(TagCalls):
    """Parser for Qwen3-Coder, Qwen3.5, Nemotron 3 and others."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    HEAD: ClassVar[str] = "<function="
    NAME_ENDS: ClassVar[tuple[str, ...]] = (">",)
    KEY: ClassVar[str] = "<parameter="
    KEY_END: ClassVar[str] = ">"
    VALUE_END: ClassVar[str] = "</parameter>"
    ENDS: ClassVar[tuple[str, ...]] = ("</function>", "</tool_call>")
    TRIMS_LINES: ClassVar[bool] = True


class SeedTags(QwenTags):
    """Parser for Seed-OSS."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "<function=")
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</seed:tool_call>",)
    ENDS: ClassVar[tuple[str, ...]] = ("</function>", "</seed:tool_call>")
    TRIMS_LINES: ClassVar[bool] = False


class Glm(TagCalls):
    """Parser for GLM 4.5 and later."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    NAME_ENDS: ClassVar[tuple[str, ...]] = ("\n", "<arg_key>", "</tool_call>")
    KEY: ClassVar[str] = "<arg_key>"
    KEY_END: ClassVar[str] = "</arg_key>"
    VALUE: ClassVar[str] = "<arg_value>"
    VALUE_END: ClassVar[str] = "</arg_value>"
    ENDS: ClassVar[tuple[str, ...]] = ("</tool_call>",)


class MiniMax(TagCalls):
    """Parser for MiniMax M2."""

    OPENINGS: ClassVar[tuple[str, ...]] = ('<invoke name="',)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</invoke>",)
    SILENT: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "</minimax:tool_call>")
    HEAD: ClassVar[str] = '<invoke name="'
    NAME_ENDS: ClassVar[tuple[str, ...]] = ('">',)
    KEY: ClassVar[str] = '<parameter name="'
    KEY_END: ClassVar[str] = '">'
    VALUE_END: ClassVar[str] = "</parameter>"
    ENDS: ClassVar[tuple[str, ...]] = ("</invoke>",)
