"""Answers as the model wrote them, for conversations that clients send back with other texts.

Clients rewrite the JSON of tool calls (white space, order, added defaults) and leave reasoning out.
The prompt of such a conversation would differ from the cached prefix at its first answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from ..text.chat import WrittenArguments, call_arguments
from .completion_choice import CompletionChoice

MAX_BYTES = 1 << 25
"""Most bytes of the remembered answers of a model; 1,000 calls of an agent take about 2 MB."""
ENTRY_BYTES = 512
"""Bytes of an entry without its texts."""

Key = tuple[str, bytes, bytes]
"""Scope, digest of the user turn that the answer belongs to, and of a call's id or answer's text.

The user turn is there because ids of Kimi K2's calls and short answers recur. Digests, as the texts
may be longer than all that is remembered of the answer.
"""


class _Entry(NamedTuple):
    """A remembered call; with the name "" an answer that consists of text alone.

    reasoning: of the whole answer, kept with its first call; "" with the other calls.
    """

    name: str
    arguments: str
    reasoning: str

    @property
    def n_bytes(self) -> int:
        return ENTRY_BYTES + 2 * sum(map(len, self))


class AnswerMemory:
    """The latest answers of a model. A scope (an API key) finds its own answers only."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        """limit: bytes; the oldest answers are dropped first."""
        self._limit = limit
        self._n_bytes = 0
        self._entries: dict[Key, _Entry] = {}

    def add(self, scope: str, asked: str, choice: CompletionChoice) -> None:
        """Remembers an ended answer. asked: text of the last user turn before the answer."""
        reasoning, calls = choice.reasoning, choice.tool_calls
        if reasoning and not calls:
            self._put(_key(scope, asked, choice.text.strip()), _Entry("", "", reasoning))
        for call in calls:
            function = call["function"]
            entry = _Entry(function["name"], function["arguments"], reasoning)
            self._put(_key(scope, asked, call["id"]), entry)
            reasoning = ""

    def forget(self, scope: str) -> None:
        """Drops the answers of a scope."""
        for key in [key for key in self._entries if key[0] == scope]:
            self._drop(key)

    def restored(self, scope: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with the texts of their answers as the model wrote them.

        messages: as `chat.conversation` returns them. A call is restored if its id and name are
        known and it has the remembered values, whatever else it has. Reasoning that a message holds
        stays.
        """
        found, asked = [], ""
        for message in map(dict, messages):
            if message["role"] == "user":
                asked = message["content"].strip()
            elif message["role"] == "assistant":
                self._restore(message, scope, asked)
            found.append(message)
        return found

    def _restore(self, message: dict[str, Any], scope: str, asked: str) -> None:
        entries = [self._entries.get(_key(scope, asked, message["content"].strip()))]
        if calls := message.get("tool_calls"):
            entries = [self._entry_of(call, scope, asked) for call in calls]
            pairs = zip(calls, entries, strict=True)
            message["tool_calls"] = [_as_written(call, entry) for call, entry in pairs]
        reasoning = entries[0].reasoning if entries[0] else ""
        if reasoning and not message.get("reasoning_content"):
            message["reasoning_content"] = reasoning

    def _entry_of(self, call: Mapping[str, Any], scope: str, asked: str) -> _Entry | None:
        entry = self._entries.get(_key(scope, asked, str(call.get("id"))))
        function = call.get("function", call)
        given = function["arguments"]
        if entry is None or entry.name != function["name"] or isinstance(given, str):
            return None
        values = call_arguments(entry.arguments)
        if isinstance(values, str):
            return None
        return entry if values.items() <= given.items() else None

    def _put(self, key: Key, entry: _Entry) -> None:
        self._drop(key)
        self._entries[key] = entry
        self._n_bytes += entry.n_bytes
        while self._n_bytes > self._limit:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._n_bytes -= entry.n_bytes


def _key(scope: str, asked: str, text: str) -> Key:
    asked_digest, digest = (
        sha256(one.encode(errors="surrogatepass")).digest() for one in (asked, text)
    )
    return scope, asked_digest, digest


def _as_written(call: Mapping[str, Any], entry: _Entry | None) -> Mapping[str, Any]:
    """Returns a call with the arguments of its entry, which are a JSON object."""
    values = call_arguments(entry.arguments) if entry else ""
    if entry is None or isinstance(values, str):
        return call
    arguments = WrittenArguments(values, entry.arguments)
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}
