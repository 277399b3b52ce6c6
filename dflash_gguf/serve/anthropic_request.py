"""Requests of Anthropic's Messages, and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .schemas import BadRequestError, Body, ChatBody
from .wire_format import encode

BILLING = "x-anthropic-billing-header:"
"""Beginning of a system block whose text differs in each request, so that no prefix would hit."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class OutputConfig(msgspec.Struct):
    """Field `output_config` of a request."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesTool(msgspec.Struct):
    """A tool of a request. type: of one that Anthropic's own service runs, else None or custom."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_function(self) -> bool:
        """True for a tool that the client runs."""
        return self.type in (None, "custom")

    @property
    def function(self) -> dict[str, Any]:
        """The tool in the form of chat requests, without its type."""
        described = {"name": self.name, "description": self.description or ""}
        return {**described, "parameters": self.input_schema, "strict": self.strict is True}


class MessagesToolChoice(msgspec.Struct):
    """Field `tool_choice` of a request."""

    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Body, kw_only=True):
    """Fields of /v1/messages and /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    metadata: Any = None
    context_management: Any = None
    service_tier: Any = None

    @property
    def has_one_answer(self) -> bool:
        """True: the responses have no list of answers."""
        return True

    @property
    def left_out(self) -> list[str]:
        """Types of the tools that only Anthropic's own service can run."""
        return [f"tools.{tool.type}" for tool in self.tools or () if not tool.is_function]

    @property
    def deferred_tools(self) -> dict[str, dict[str, Any]]:
        """Tools, by name, that the model is told of where a tool result refers to them."""
        deferred = [tool for tool in self.tools or () if tool.is_function and tool.defer_loading]
        return {tool.name: tool.function for tool in deferred}


def chat_from_messages(body: MessagesBody) -> ChatBody:
    """Returns the chat request that asks for the same answer.

    Raises BadRequestError or ValueError for malformed messages, and for input that is not text.
    """
    tools = [tool for tool in body.tools or () if tool.is_function]
    deferred = body.deferred_tools
    messages: list[dict[str, Any]] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(body.messages):
        messages += _turn(message, f"messages[{place}]", deferred)
    if not body.messages:
        messages.append({"role": "user", "content": ""})
    choice, output = body.tool_choice or MessagesToolChoice(), body.output_config or OutputConfig()
    return body.as_chat(
        messages=messages,
        tools=[{"type": "function", "function": tool.function} for tool in tools] or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        stop=body.stop_sequences if body.stop is None else body.stop,
        enable_thinking=_thinks(body.thinking),
        reasoning_effort=output.effort,
        response_format=output.format or body.response_format,
    )


def _choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in TOOL_CHOICES:
        raise BadRequestError(
            f"tool_choice: type is {choice.type!r:.40}, must be auto, any, tool or none"
        )
    return TOOL_CHOICES[choice.type]


def _thinks(thinking: Mapping[str, Any] | None) -> bool:
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("adaptive", "enabled", "disabled"):
        raise BadRequestError(
            f"thinking: type is {kind!r:.40}, must be adaptive, enabled or disabled"
        )
    return kind != "disabled"


def _system(system: str | list[dict[str, Any]] | None) -> str:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    texts = [_text(block, "system") for block in blocks]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _turn(
    message: Mapping[str, Any], name: str, deferred: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns a message as messages of a chat, in which each tool result is one of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequestError(f"{name}: role is {role!r:.40}, must be user, assistant or system")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequestError(f"{name}: content must be a text or a list of blocks")
    if role == "assistant":
        return [_answer(blocks, name)]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, name))
            continue
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts = []
        messages.append(
            {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _result(block.get("content"), name, deferred),
            }
        )
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _answer(blocks: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(_text(block, name))
    answer: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        answer["reasoning_content"] = "\n".join(thoughts)
    return answer | {"tool_calls": calls} if calls else answer


def _result(content: Any, name: str, deferred: Mapping[str, Any]) -> str:
    """Returns the text of a tool result. deferred: tools that are described where they are found.

    A tool in the system part would change the prompt from its beginning on.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequestError(f"{name}: content of a tool_result must be a text or a list")
    texts = []
    for block in content:
        if block.get("type") == "tool_reference":
            tool = str(block.get("tool_name"))
            found = deferred.get(tool, {})
            known = {name: value for name, value in found.items() if name != "strict"}
            texts.append(encode(known).decode() if known else tool)
        else:
            texts.append(_text(block, name))
    return "\n".join(texts)


def _text(block: Mapping[str, Any], name: str) -> str:
    """Returns the text of a block. Raises BadRequestError for one of another type."""
    kind, text = block.get("type"), block.get("text")
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        text = source.get("data")
    elif kind == "image":
        raise BadRequestError(f"{name}: image input is not supported, give blocks of type text")
    elif kind != "text":
        raise BadRequestError(
            f"{name}: a block of type {kind!r:.40} is not supported, give blocks of type text"
        )
    if not isinstance(text, str):
        raise BadRequestError(f"{name}: a block of type {kind} must have a text")
    return text
