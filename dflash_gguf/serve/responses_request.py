"""Requests of OpenAI's Responses, and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from .prompts import merged
from .responses_tools import ResponsesTools, custom_arguments, left_out
from .schemas import BadRequestError, Body, ChatBody

SYSTEMS = ("system", "developer")
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items that call a tool, and their field with what the tool is given."""
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEMS = ("message", "reasoning", *CALLS, *OUTPUTS)
"""Types of items that are part of the prompt."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
KEPT_NOWHERE = ("previous_response_id", "conversation", "prompt")
"""Fields that name what the server would have kept."""


class Reasoning(msgspec.Struct):
    """Field `reasoning` of a request. summary: ignored, as reasoning is sent whole."""

    effort: str | None = None
    summary: Any = None


class ResponsesBody(Body, kw_only=True):
    """Fields of /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    metadata: Any = None
    include: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    truncation: Any = None
    user: Any = None

    @property
    def has_one_answer(self) -> bool:
        """True: the responses have no list of answers."""
        return True

    @property
    def left_out(self) -> list[str]:
        """Names of items that are ignored, as their types are unknown."""
        kinds = {_kind(item) for item in _items(self)}
        unknown = sorted(f"input.{kind}" for kind in kinds if kind and kind not in ITEMS)
        return [*left_out(self.tools or ()), *unknown]


def chat_from_responses(body: ResponsesBody) -> ChatBody:
    """Returns the chat request that asks for the same answer.

    Raises BadRequestError for malformed items, and for fields that the server cannot serve.
    """
    for name in KEPT_NOWHERE:
        if getattr(body, name) is not None:
            raise BadRequestError(
                f"{name} is not supported, as the server keeps no responses and prompts: send the "
                "whole conversation as input"
            )
    if body.background:
        raise BadRequestError("background is not supported, leave it out and wait for the answer")
    form = (body.text or {}).get("format") or {}
    tools = ResponsesTools(body.tools or ())
    return body.as_chat(
        messages=_conversation(body, tools),
        continue_final_message=False,  # an answer that was cut off comes back as a turn of its own
        tools=tools.functions() or None,
        tool_choice=tools.choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=form or body.response_format,
    )


def _items(body: ResponsesBody) -> Sequence[dict[str, Any]]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return body.input or ()


def _kind(item: Mapping[str, Any]) -> str:
    kind = item.get("type", "message")
    return kind if isinstance(kind, str) else ""


def _conversation(body: ResponsesBody, tools: ResponsesTools) -> list[dict[str, Any]]:
    """Returns the messages of a chat; the system messages at its beginning become one."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for place, item in enumerate(_items(body)):
        messages += _messages(item, tools, f"input[{place}]")
    runs = [list(run) for _, run in groupby(messages, lambda one: one["role"])]
    messages = [
        one for run in runs for one in ([_joined(run)] if run[0]["role"] == "assistant" else run)
    ]
    n_leading = [*(one["role"] == "system" for one in messages), False].index(False)
    if n_leading > 1:
        messages[:n_leading] = [merged(messages[:n_leading], "system")]
    return messages or [{"role": "user", "content": ""}]


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one assistant message of several: of the items of an answer."""
    joined: dict[str, Any] = {"role": "assistant", "content": ""}
    for name in ("content", "reasoning_content"):
        if text := "\n".join(one[name] for one in messages if one.get(name)):
            joined[name] = text
    if calls := [call for one in messages for call in one.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _messages(
    item: Mapping[str, Any], tools: ResponsesTools, name: str
) -> Iterator[dict[str, Any]]:
    """Yields the message of an item; nothing for one of an unknown type."""
    kind = _kind(item)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", *SYSTEMS):
            raise BadRequestError(
                f"{name}: role is {role!r:.40}, must be user, assistant, developer or system"
            )
        role = "system" if role in SYSTEMS else role
        yield {"role": role, "content": _text(item.get("content"), f"{name}: content")}
    elif kind == "reasoning":
        said = item.get("content") or item.get("summary") or ""
        if text := _text(said, f"{name}: content"):
            yield {"role": "assistant", "content": "", "reasoning_content": text}
    elif kind in CALLS:
        given = item.get(CALLS[kind])
        if not isinstance(given, str) or not isinstance(item.get("name"), str):
            raise BadRequestError(f"{name}: a {kind} must have a name and {CALLS[kind]}, as texts")
        if kind == "custom_tool_call":
            given = custom_arguments(given)
        function = tools.function_of(item["name"], item.get("namespace"))
        called = {"name": function, "arguments": given}
        call = {"id": item.get("call_id"), "type": "function", "function": called}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind in OUTPUTS:
        output = _text(item.get("output"), f"{name}: output")
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


def _text(content: Any, name: str) -> str:
    """Returns a content as one text. Raises BadRequestError if it is anything but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequestError(f"{name} must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind == "input_image":
            raise BadRequestError(f"{name}: image input is not supported, give parts of text")
        if kind not in (*TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise BadRequestError(
                f"{name}: a part of type {kind!r:.40} is not supported, give parts of text"
            )
        texts.append(text)
    return "\n".join(texts)
