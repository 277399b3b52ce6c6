"""Base of the parsers of tool calls, which read the text of an answer as it arrives."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..reasoning import OutputPart, merged
from ..stream import first_mark, n_certain
from .input_grammar import InputGrammar
from .values import JsonScan

T = TypeVar("T")
Reads = Generator[OutputPart | None, None, T]
"""A part of a parser: yields parts of the output, and None to wait for more text."""

_NAME = re.compile(r"[^\s<>\[\]{}\"]+")

MAX_NAME = 256
"""Longest name of a function in characters; longer text without an end is no call."""


class ToolFormat(NamedTuple):
    """The tools that a request offers, and the form of calls in its answer.

    family: name of the form, a key of `formats.FAMILIES`. parameters: JSON schema of the arguments,
    by tool name. is_parallel: False to end the answer after its first call. n_earlier: number of
    calls in the conversation before. strict: names of the tools whose arguments must fit their
    schema, in all keywords. allowed: names of the tools that may be called, None for any name; a
    call of another tool is text. grammar: Lark grammar that binds the answer, "" for none. inputs:
    grammars of the only argument, a text, by tool name.
    """

    family: str
    parameters: Mapping[str, Mapping[str, Any]]
    is_parallel: bool = True
    n_earlier: int = 0
    strict: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    grammar: str = ""
    inputs: Mapping[str, InputGrammar] = {}

    @property
    def binds_reasoning(self) -> bool:
        """True if the grammar binds the answer from its first token, reasoning included."""
        return bool(self.grammar) and self.family == "harmony"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that may be called."""
        return tuple(self.parameters) if self.allowed is None else self.allowed

    def allows(self, name: str) -> bool:
        """True if a function may be called, offered or not."""
        return self.allowed is None or name in self.allowed


class CallParser:
    """Separates tool calls from the text of an answer, without regard to how the text is cut.

    Text that may begin a call is held back. A call whose name never comes is text, with its marks;
    a call that is malformed behind its name has the rest as its arguments.
    """

    OPENINGS: ClassVar[tuple[str, ...]] = ()
    """Marks at which a call begins."""
    CLOSINGS: ClassVar[tuple[str, ...]] = ()
    """Marks at which a call ends."""
    SILENT: ClassVar[tuple[str, ...]] = ()
    """Marks around calls that are dropped, with the white space beside them."""
    INNER: ClassVar[tuple[str, ...]] = ()
    """Further marks within calls, which may be control tokens."""

    def __init__(self, tools: ToolFormat) -> None:
        self._tools = tools
        self._held = ""
        self._is_over = False
        self._skips_space = False
        self._raw: str | None = None
        """Text since the opening mark, until the call has a name."""
        self._n_calls = 0
        self._is_done = False
        self._reads = self._run()

    @property
    def is_done(self) -> bool:
        """True once the only call that the request allows is complete."""
        return self._is_done

    def push(self, text: str) -> list[OutputPart]:
        """Adds text. Returns the parts that are certain."""
        self._held += text
        return self._new_parts()

    def finish(self) -> list[OutputPart]:
        """Returns the held back text as parts; called at the end of the answer."""
        self._is_over = True
        return self._new_parts()

    def _new_parts(self) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for part in self._reads:
            if part is None:
                break
            parts.append(part)
        return merged(parts)

    def _run(self) -> Reads[None]:
        while mark := (yield from self._text()):
            yield from self._call(mark)
            if self._raw is not None:
                yield OutputPart(self._raw)
                self._raw = None
            if self._is_done:
                return

    def _call(self, mark: str) -> Reads[None]:
        """Reads the call behind an opening mark; calls `_begin` once its name is known."""
        raise NotImplementedError

    def _text(self) -> Reads[str | None]:
        """Passes text on up to an opening mark. Returns the mark, None at the answer's end."""
        marks = (*self.OPENINGS, *self.SILENT)
        while True:
            if self._skips_space:
                self._held = self._held.lstrip()
                self._skips_space = not self._held
            at, mark = first_mark(self._held, marks)
            text = self._held[: at if mark else self._n_certain(marks)]
            # Hold back trailing white space: if a call follows, it is no part of the answer's text.
            sure = text if self._is_over and not mark else text.rstrip()
            yield OutputPart(sure)
            if mark in self.OPENINGS:
                self._raw = self._held[len(sure) : at + len(mark)]
                self._held = self._held[at + len(mark) :]
                return mark
            self._held = self._held[at + len(mark) if mark else len(sure) :]
            if mark:
                self._skips_space = True
            elif not (yield from self._more()):
                return None

    def _name_in(self, text: str | None) -> str | None:
        """Returns the name of a function that may be called; None for any other text."""
        found = None if text is None else _NAME.fullmatch(text.strip())
        return found[0] if found and self._tools.allows(found[0]) else None

    def _begin(self, name: str) -> OutputPart:
        self._raw = None
        self._n_calls += 1
        return OutputPart(name, "call", self._n_calls - 1)

    def _arguments(self, text: str) -> OutputPart:
        return OutputPart(text, "arguments", self._n_calls - 1)

    def _end(self) -> None:
        """Ends a complete call."""
        self._skips_space = True
        self._is_done = not self._tools.is_parallel

    def _has_begun(self) -> bool:
        """Returns True if the name of the call is known."""
        return self._raw is None

    # ---- reading

    def _more(self) -> Reads[bool]:
        """Waits for more text; returns False at the end of the answer."""
        if self._is_over:
            return False
        yield None
        return True

    def _take(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        if self._raw is not None:
            self._raw += text
        return text

    def _space(self) -> Reads[str]:
        """Skips white space. Returns the next character, "" at the end of the answer."""
        while True:
            self._take(len(self._held) - len(self._held.lstrip()))
            if self._held:
                return self._held[0]
            if not (yield from self._more()):
                return ""

    def _one_of(self, marks: Iterable[str]) -> Reads[str]:
        """Takes the mark that the text goes on with. Returns the mark, or "" if it is none."""
        marks = tuple(marks)
        while any(len(mark) > len(self._held) and mark.startswith(self._held) for mark in marks):
            if not (yield from self._more()):
                break
        found = [mark for mark in marks if self._held.startswith(mark)]
        return self._take(len(max(found, key=len, default="")))

    def _until(self, marks: Collection[str], limit: int | None = None) -> Reads[str | None]:
        """Takes the text before a mark, and leaves the mark; without limit, all at the end.

        limit: most characters. Returns None if no mark comes within the limit or the answer.
        """
        taken = []
        while True:
            at, mark = first_mark(self._held, marks)
            n = at if mark else self._n_certain(marks)
            if limit is not None and (n > limit or (not mark and self._is_over)):
                return None
            if mark or limit is None:
                taken.append(self._take(n))
            if mark or not (yield from self._more()):
                return "".join(taken)

    def _value(self, *, emits: bool = False) -> Reads[str]:
        """Takes a JSON value, up to the end of the answer if the value is cut off.

        emits: True to pass the value on as arguments while it comes.
        """
        scan, taken = JsonScan(), []
        while True:
            text = self._take(scan.push(self._held))
            if emits:
                yield self._arguments(text)
            else:
                taken.append(text)
            if scan.is_complete or not (yield from self._more()):
                return "".join(taken)

    def _rest(self, *, is_sound: bool) -> Reads[None]:
        """Takes the closing mark of a call; what is malformed before it belongs to the arguments.

        is_sound: False if the arguments are malformed.
        """
        if is_sound:
            while (yield from self._space()) and (yield from self._one_of("}]")):
                pass  # a bracket too many is a frequent slip
            yield from self._one_of(self.CLOSINGS)
        else:
            text = yield from self._until((*self.CLOSINGS, *self.OPENINGS))
            yield self._arguments((text or "").rstrip())
            yield from self._one_of(self.CLOSINGS)
        self._end()

    def _n_certain(self, marks: Iterable[str]) -> int:
        """Returns the number of held characters before an end that may be an incomplete mark."""
        if self._is_over:
            return len(self._held)
        return min((n_certain(self._held, mark) for mark in marks), default=len(self._held))
