"""Parser of gpt-oss's calls, which are messages to a function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from ..reasoning import Harmony, OutputPart
from .parser import ToolFormat

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyCalls(Harmony):
    """Parser for reasoning, text and calls of gpt-oss."""

    MARKS: ClassVar[tuple[str, ...]] = (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    )

    def __init__(self, tools: ToolFormat) -> None:
        super().__init__()
        self._tools = tools
        self._call = -1

    @property
    def is_done(self) -> bool:
        """True once the only call that the request allows is complete."""
        return not self._tools.is_parallel and self._call >= 0 and self._in_header

    def _begin(self, header: str) -> Iterator[OutputPart]:
        found = _RECIPIENT.search(header)
        if self.is_done:
            self._kind = "text"
        elif found is None or not self._tools.allows(found[1]):
            yield from super()._begin(header)
        else:
            self._call, self._kind = self._call + 1, "arguments"
            yield OutputPart(found[1], "call", self._call)

    def _part(self, text: str) -> OutputPart:
        if self._kind == "arguments":
            return OutputPart(text, self._kind, self._call)
        is_over = not self._tools.is_parallel and self._call >= 0
        return OutputPart("" if is_over else text, self._kind)
