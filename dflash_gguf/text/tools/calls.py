"""Tool calls of an answer in the form of OpenAI's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..reasoning import OutputPart
from .parser import ToolFormat


class ToolCall(NamedTuple):
    """A call in an answer. arguments: JSON text as the model wrote it, which may be malformed."""

    name: str
    arguments: str


def calls_in(parts: Sequence[OutputPart]) -> list[ToolCall]:
    """Returns the calls among the parts of an answer."""
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, []))
        elif part.kind == "arguments":
            calls[part.call][1].append(part.text)
    return [ToolCall(name, "".join(texts)) for name, texts in calls]


def call_id(tools: ToolFormat | None, name: str, index: int, unique: str) -> str:
    """Returns the id of a call. index: of the call in its answer. unique: 24 letters and digits.

    Kimi K2 knows calls by name and number; Mistral's templates refuse ids of other lengths than 9.
    """
    if tools is not None and tools.family == "kimi":
        return f"functions.{name}:{tools.n_earlier + index}"
    return unique[:9] if tools is not None and tools.family == "mistral" else f"call_{unique}"


def message_call(name: str, arguments: str, id_: str) -> dict[str, Any]:
    """Returns a call in the form of OpenAI's messages."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
