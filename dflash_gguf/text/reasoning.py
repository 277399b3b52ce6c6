"""Separates reasoning from the answer while both are generated, by marks of the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from .stream import first_mark, n_certain

PartKind = Literal["text", "reasoning", "call", "arguments"]
Region = Literal["before", "reasoning", "answer"]


class OutputPart(NamedTuple):
    """A piece of an answer: text, reasoning, or part of a tool call.

    kind: a part of kind "call" begins a tool call, and its text is the name of the function; parts
        of kind "arguments" follow, each with the next piece of the arguments' JSON text. A call
        ends where a part of another kind or call begins.
    call: index of the tool call in the answer, from 0 on; 0 for text and reasoning.
    """

    text: str
    kind: PartKind = "text"
    call: int = 0


def joined(parts: Iterable[OutputPart], kind: PartKind) -> str:
    return "".join([part.text for part in parts if part.kind == kind])


def merged(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """Returns parts without empty ones, and with adjacent ones of the same kind and call joined."""
    found: list[OutputPart] = []
    for part in parts:
        if found and part.kind != "call" and part[1:] == found[-1][1:]:
            found[-1] = part._replace(text=found[-1].text + part.text)
        elif part.text:
            found.append(part)
    return found


class Splitter(Protocol):
    """Interface of splitters, which separate reasoning from the answer in pieces of text."""

    def push(self, text: str) -> list[OutputPart]:
        """Adds text. Returns the parts that are certain; the start of a mark is held back."""

    def finish(self) -> list[OutputPart]:
        """Returns the held back text as parts of the output; called at the end of the answer."""


class ReasoningSplitter(Splitter, Protocol):
    """Interface of splitters that tell to which region of the answer the next text belongs."""

    @property
    def region(self) -> Region:
        """The region of the text that is pushed next; "before": reasoning or the answer may begin.

        Headers of messages and calls of tools belong to the region "reasoning".
        """

    @property
    def held(self) -> str:
        """Text that is held back, as it may begin a mark."""


MARKS = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "think": ("<think>", "</think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Pairs of marks before and after reasoning, by name of the format."""


class Format(NamedTuple):
    """Format of reasoning in an answer. is_open: True if the prompt ends with the opening mark."""

    name: str
    is_open: bool = False

    @property
    def opening(self) -> str:
        """The mark before reasoning; "" for harmony, whose messages have headers."""
        return MARKS[self.name][0] if self.name in MARKS else ""

    @property
    def closing(self) -> str:
        """The mark after reasoning; "" for harmony."""
        return MARKS[self.name][1] if self.name in MARKS else ""

    def splitter(self, interrupts: tuple[str, ...] = ()) -> ReasoningSplitter:
        """Returns a splitter for one answer. interrupts: see `Block`."""
        if self.name == "harmony":
            return Harmony()
        return Block(self.opening, self.closing, self.is_open, interrupts)


def format_of(template: str, prompt: str) -> Format | None:
    """Returns the format of answers to a template's prompt; None if it marks no reasoning."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Format("harmony")
    for name, (opening, closing) in MARKS.items():
        if closing in template:
            return Format(name, prompt.rstrip().endswith(opening))
    return None


class Block:
    """Splitter for reasoning between two marks at the beginning of an answer."""

    def __init__(
        self, opening: str, closing: str, is_open: bool, interrupts: tuple[str, ...] = ()
    ) -> None:
        """Creates a splitter for one answer.

        is_open: True if the prompt ends with the opening mark, so that reasoning comes first.
        interrupts: texts that end reasoning without the closing mark, and belong to the answer.
        """
        self._opening, self._closing, self._interrupts = opening, closing, interrupts
        self._held = ""
        self._place: Region = "reasoning" if is_open else "before"
        self._skips_space = is_open
        """True after a mark, whose following white space is dropped."""

    @property
    def region(self) -> Region:
        return self._place

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str) -> list[OutputPart]:
        self._held += text
        return [part for part in self._parts(at_end=False) if part.text]

    def finish(self) -> list[OutputPart]:
        return [part for part in self._parts(at_end=True) if part.text]

    def _parts(self, at_end: bool) -> Iterator[OutputPart]:
        if self._place == "before":
            text = self._held.lstrip()
            if text.startswith(self._opening):
                self._enter("reasoning", text[len(self._opening) :])
            elif at_end or not self._opening.startswith(text):
                self._place = "answer"
        if self._place == "reasoning":
            self._skip_space()
            marks = (self._closing, *self._interrupts)
            at, mark = first_mark(self._held, marks)
            n = at
            if not mark:
                n = len(self._held) if at_end else min(n_certain(self._held, x) for x in marks)
            # Hold back trailing white space: it is dropped if a mark follows.
            thoughts = self._held[:n].rstrip()
            yield OutputPart(thoughts, "reasoning")
            if mark:
                end = at + len(mark) if mark == self._closing else at
                self._enter("answer", self._held[end:])
            else:
                self._held = "" if at_end else self._held[len(thoughts) :]
        if self._place == "answer":
            self._skip_space()
            text, self._held = self._held, ""
            yield OutputPart(text)

    def _enter(self, place: Region, text: str) -> None:
        self._place, self._held, self._skips_space = place, text, True

    def _skip_space(self) -> None:
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


class Harmony:
    """Splitter for gpt-oss, whose messages have headers that name a channel.

    Channel analysis is reasoning; commentary and final are the answer. Messages to tools keep their
    headers and stay in the answer, where clients parse them.
    Source: OpenAI, harmony response format.
    """

    MESSAGE = "<|message|>"
    ENDS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>")
    MAX_HEADER = 256
    """Longest header in characters; longer text without a mark is part of the answer."""

    def __init__(self) -> None:
        self._held = ""
        self._in_header = True
        self._kind: PartKind = "text"
        self._is_call = False

    @property
    def region(self) -> Region:
        is_text = not self._in_header and self._kind == "text" and not self._is_call
        return "answer" if is_text else "reasoning"

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str) -> list[OutputPart]:
        self._held += text
        return [part for part in self._parts() if part.text]

    def finish(self) -> list[OutputPart]:
        if self._in_header:
            self._kind = "text"
        part, self._held = self._part(self._held), ""
        return [part] if part.text else []

    def _part(self, text: str) -> OutputPart:
        return OutputPart(text, self._kind)

    def _parts(self) -> Iterator[OutputPart]:
        while True:
            marks = (self.MESSAGE,) if self._in_header else self.ENDS
            places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if not places:
                break
            at, mark = min(places)
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._in_header:
                yield from self._begin(before)
            else:
                yield self._part(before)
            self._in_header = not self._in_header
        if self._in_header and len(self._held) <= self.MAX_HEADER:
            return
        if self._in_header:
            self._in_header, self._kind = False, "text"
        n = min(n_certain(self._held, mark) for mark in self.ENDS)
        yield self._part(self._held[:n])
        self._held = self._held[n:]

    def _begin(self, header: str) -> Iterator[OutputPart]:
        channel = _CHANNEL.search(header)
        self._is_call = " to=" in header
        is_reasoning = channel is not None and channel[1] == "analysis" and not self._is_call
        self._kind = "reasoning" if is_reasoning else "text"
        if self._is_call:
            yield OutputPart(
                header.removeprefix("<|start|>").removeprefix("assistant") + self.MESSAGE
            )
