"""Answers as blocks: texts, reasoning and tool calls one after the other, none within another."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..text.reasoning import OutputPart
from .completion_choice import CompletionChoice, Event
from .messages import Stepped
from .wire_format import NamedEvents

BlockKind = Literal["text", "reasoning", "call"]


def new_id() -> str:
    """Returns letters and digits that no other id has."""
    return secrets.token_hex(12)


@dataclass
class ContentBlock:
    """One text, reasoning or tool call of an answer, as far as it is known.

    index: its position in the answer. name, call_id: of a call. text: of a call, the arguments as
    JSON. is_whole: False for the last block of an answer that the token limit has cut.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    is_whole: bool = True
    id: str = field(default_factory=new_id)


class BlockFormat(NamedEvents):
    """Base class of formats that give an answer as blocks."""

    def __init__(self) -> None:
        self._blocks: list[ContentBlock] = []
        self._is_open = False

    def _opened(self, block: ContentBlock) -> Iterator[Event]:
        """Yields the events that begin a block."""
        raise NotImplementedError

    def _grown(self, block: ContentBlock, text: str) -> Iterator[Event]:
        """Yields the events that add text to a block."""
        raise NotImplementedError

    def _closed(self, block: ContentBlock) -> Iterator[Event]:
        """Yields the events that end a block."""
        raise NotImplementedError

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:  # noqa: ARG002
        """Yields the events of one round's parts."""
        for part in step.parts:
            yield from self._add(choice, part)

    def _add(self, choice: CompletionChoice, part: OutputPart) -> Iterator[Event]:
        kind: BlockKind = "call" if part.kind == "arguments" else part.kind
        if not self._is_open or part.kind == "call" or kind != self._blocks[-1].kind:
            yield from self._close()
            block = ContentBlock(kind, len(self._blocks))
            if part.kind == "call":
                block.name, block.call_id = part.text, choice.call_id(part.call, part.text)
            self._blocks.append(block)
            self._is_open = True
            yield from self._opened(block)
        if part.kind != "call" and part.text:
            self._blocks[-1].text += part.text
            yield from self._grown(self._blocks[-1], part.text)

    def _close(self, *, is_whole: bool = True) -> Iterator[Event]:
        """Yields the events that end the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            self._blocks[-1].is_whole = is_whole
            yield from self._closed(self._blocks[-1])

    def _end(self, choice: CompletionChoice) -> Iterator[Event]:
        yield from self._close(is_whole=choice.finish_reason != "length")

    def _gather(self, choices: Sequence[CompletionChoice]) -> CompletionChoice:
        """Takes the blocks of a whole answer, the only one of its request; returns the answer."""
        (choice,) = choices
        for part in choice.parts:
            for _ in self._add(choice, part):
                pass
        for _ in self._end(choice):
            pass
        return choice
