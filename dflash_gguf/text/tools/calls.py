"""Tool calls of an answer in the form of OpenAI's messages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..reasoning import OutputPart
from .parser import ToolFormat

FAMILIES_WITH_IDS = ("kimi", "mistral", "mistral_list")
"""Families that show ids, in a form of their own."""


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
    family = "" if tools is None else tools.family
    if tools is not None and family == "kimi":
        return f"functions.{name}:{tools.n_earlier + index}"
    return unique[:9] if family.startswith("mistral") else f"call_{unique}"


def with_known_ids(messages: Sequence[Mapping[str, Any]], family: str) -> list[dict[str, Any]]:
    """Returns messages whose calls and results have ids of the family's form, see `call_id`.

    Clients send back ids that other servers or routes made.
    """
    known: dict[Any, str] = {}
    tools, shown = ToolFormat(family, {}), []
    for message in map(dict, messages):
        calls = []
        for call in message.get("tool_calls") or ():
            given, name = str(call.get("id")), call.get("function", call)["name"]
            unique = hashlib.blake2b(given.encode("utf-8", "replace"), digest_size=12).hexdigest()
            is_known = family != "kimi" and re.fullmatch("[a-zA-Z0-9]{9}", given)
            known[given] = given if is_known else call_id(tools, name, len(known), unique)
            calls.append({**call, "id": known[given]})
        if calls:
            message["tool_calls"] = calls
        if (result_of := message.get("tool_call_id")) in known:
            message["tool_call_id"] = known[result_of]
        shown.append(message)
    return shown


def message_call(name: str, arguments: str, id_: str) -> dict[str, Any]:
    """Returns a call in the form of OpenAI's messages."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
