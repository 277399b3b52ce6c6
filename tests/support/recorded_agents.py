"""Exchanges of coding agents and of SDKs with a scripted server, as recorded in October 2026.

Long prompts and tool descriptions are placeholders of the same length.
"""

from __future__ import annotations

import json
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ARCHIVE = Path(__file__).with_name("recorded_agents.tar.xz")
CONVERSATIONS = {
    "claude-code-2.1.197": ("base",),
    "claude-code-2.1.328": (
        *("base", "two-turns", "parallel", "thinking", "toolsearch", "simple", "badargs"),
        "no-tool-search",
    ),
    "codex-0.169": ("base", "two-turns", "parallel", "thinking", "nscall"),
    "codex-0.169-catalog": ("base", "lean"),
    "opencode-1.18.33": ("base", "two-turns", "anthropic-sdk", "responses-sdk"),
    "pi-0.73.1": ("base", "parallel", "thinking", "anthropic-messages", "openai-responses"),
}
"""Scenarios in which each request but a title's extends the one before."""


PATCH_GRAMMAR = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " name LF ("+" /(.*)/ LF)+
    | "*** Delete File: " name LF
    | "*** Update File: " name LF ("*** Move to: " name LF)? line* ("*** End of File" LF)?
line: ("@@" | "@@ " name | ("+" | "-" | " ") /(.*)/) LF
name: /(.+)/
%import common.LF
"""


class Exchange(NamedTuple):
    """A request and its recorded answer. path: without the query."""

    client: str
    scenario: str
    number: int
    path: str
    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.client}-{self.scenario}-{self.number}"


@lru_cache(maxsize=1)
def exchanges() -> tuple[Exchange, ...]:
    """Returns the recorded exchanges that have a body, in order."""
    found = []
    with tarfile.open(ARCHIVE) as archive:
        for name in sorted(archive.getnames()):
            if name.endswith(".json"):
                file = archive.extractfile(name)
                assert file is not None
                one = json.load(file)
                request = one["request"]
                if isinstance(request.get("body"), dict):
                    _restore_grammars(request["body"])
                    path = request["path"].split("?")[0]
                    names = one["client"], one["scenario"], one["number"], path
                    found.append(Exchange(*names, request["body"], one["response"]))
    return tuple(found)


def _restore_grammars(request: dict[str, Any]) -> None:
    """Replaces the placeholder of Codex's grammar by one of the same form."""
    for tool in request.get("tools") or ():
        form = tool.get("format")
        if isinstance(form, dict) and tool.get("name") == "apply_patch":
            form["definition"] = PATCH_GRAMMAR


class RecordedCall(NamedTuple):
    """A call of an answer. text: its arguments as JSON, or the raw text of a custom tool."""

    id: str
    name: str
    namespace: str | None
    text: str
    is_custom: bool = False


class RecordedAnswer(NamedTuple):
    """The parts of an answer in any of the three protocols."""

    reasoning: str
    text: str
    calls: tuple[RecordedCall, ...]


def answer_of(response: dict[str, Any]) -> RecordedAnswer:
    """Returns the parts of a recorded response, or of one of ours with `body` or `events`."""
    events = response.get("events") or ()
    body = response.get("body") or {}
    finals = [one["response"] for one in events if one.get("type") == "response.completed"]
    if finals or "output" in body:
        return _of_items((finals or [body])[-1]["output"])
    if "content" in body or any(one.get("type") == "message_start" for one in events):
        return _of_blocks(body.get("content") or _blocks(events))
    messages = [one["message"] for one in body.get("choices", ())]
    return _of_deltas(
        messages or [choice["delta"] for one in events for choice in one.get("choices", ())]
    )


def _of_items(items: list[dict[str, Any]]) -> RecordedAnswer:
    reasoning, texts, calls = "", "", []
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            reasoning += "".join(x["text"] for x in item.get("content") or item["summary"])
        elif kind == "message":
            texts += "".join(part["text"] for part in item["content"])
        else:
            is_custom = kind == "custom_tool_call"
            text = item["input" if is_custom else "arguments"]
            namespace = item.get("namespace")
            calls.append(RecordedCall(item["call_id"], item["name"], namespace, text, is_custom))
    return RecordedAnswer(reasoning, texts, tuple(calls))


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            key = {"input_json": "input"}.get(kind, kind)
            if key != "signature":
                blocks[-1][key] += delta.get("partial_json", delta.get(kind))
    return blocks


def _of_blocks(blocks: list[dict[str, Any]]) -> RecordedAnswer:
    def texts(kind: str) -> str:
        return "".join(block[kind] for block in blocks if block["type"] == kind)

    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            given = block["input"]
            text = given if isinstance(given, str) else json.dumps(given)
            calls.append(RecordedCall(block["id"], block["name"], None, text))
    return RecordedAnswer(texts("thinking"), texts("text"), tuple(calls))


def _of_deltas(deltas: list[dict[str, Any]]) -> RecordedAnswer:
    def texts(*names: str) -> str:
        return "".join(delta.get(name) or "" for delta in deltas for name in names)

    calls: dict[int, RecordedCall] = {}
    for delta in deltas:
        for place, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", place), call["function"]
            old = calls.get(index) or RecordedCall(call["id"], function["name"], None, "")
            calls[index] = old._replace(text=old.text + (function.get("arguments") or ""))
    return RecordedAnswer(texts("reasoning_content"), texts("content"), tuple(calls.values()))
