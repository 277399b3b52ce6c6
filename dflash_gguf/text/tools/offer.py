"""Tools that a request offers: their form, and a prompt for templates that do not show tools."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .formats import GENERIC, family_of
from .input_grammar import InputGrammar
from .parser import ToolFormat

Message = Mapping[str, Any]
Tool = dict[str, Any]

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
EXAMPLES = {
    GENERIC: '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
    '{"ARGUMENT": "VALUE"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
"""Form of a call, by families whose templates show no tools."""


def tools_of(given: object, name: str = "tools") -> list[Tool]:
    """Returns tools in the form of chat templates: type function, with name and parameters.

    name: of the field or flag, for errors.
    Errors: ValueError for other values, for tools of another type, and for a name given twice.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{name} is {given!r:.60}, must be a list of tools")
    tools = [_tool(one, f"{name}[{place}]") for place, one in enumerate(given)]
    for one, n in Counter(one["function"]["name"] for one in tools).items():
        if n > 1:
            raise ValueError(f"{name} holds two functions named {one!r:.80}, leave one out")
    return tools


def _tool(given: object, name: str) -> Tool:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {given!r:.60}, must be an object with type and function")
    kind = given.get("type", "function")
    if kind != "function":
        raise ValueError(f"{name} has type {kind!r:.40}, only type function is supported")
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} must have a function with a name")
    parameters = function.get("parameters")
    if not isinstance(parameters, (Mapping, type(None))):
        raise ValueError(f"{name}: parameters must be a JSON schema, an object")
    # A fixed order of keys, and no keys that templates do not show: equal tools then give equal
    # prompts, which share a cached prefix.
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": dict(parameters or NO_PARAMETERS),
        },
    }


def strict_names(given: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the names of the tools that are strict. given: tools that `tools_of` accepts."""
    functions = [(one.get("function", one), one) for one in given]
    return tuple(x["name"] for x, one in functions if True in (x.get("strict"), one.get("strict")))


def shows_tools(template: str) -> bool:
    """True if a template's text reads a variable that lists the tools."""
    return re.search(r"\b(tools|functions)\b", template) is not None


def tool_format(
    template: str,
    tools: Sequence[Tool],
    messages: Sequence[Message],
    *,
    is_parallel: bool,
    strict: Sequence[str] = (),
    allowed: Sequence[str] | None = None,
    inputs: Mapping[str, InputGrammar] | None = None,
) -> ToolFormat:
    """Returns the form of calls in answers to a template's prompt.

    strict, allowed, inputs: see `ToolFormat`.
    """
    family = family_of(template)
    if not shows_tools(template) and family not in EXAMPLES:
        family = GENERIC
    parameters = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    n_earlier = sum(len(message.get("tool_calls") or ()) for message in messages)
    may_call = None if allowed is None else tuple(allowed)
    return ToolFormat(
        family, parameters, is_parallel, n_earlier, tuple(strict), may_call, inputs=inputs or {}
    )


def described(
    messages: Sequence[Message], tools: Sequence[Tool], family: str
) -> list[dict[str, Any]]:
    """Returns messages that show tools, calls and results as text, for templates without tools.

    family: of the template; only those in EXAMPLES can be without tools.
    """
    lines = [json.dumps(one["function"], ensure_ascii=False) for one in tools]
    offer = "\n".join(
        [
            "You can call these functions, each given with a JSON schema of its arguments:",
            *lines,
            "To call a function, write its name and its arguments, and nothing after them, as:",
            EXAMPLES[family],
        ]
    )
    shown = [dict(message) for message in messages]
    if family == GENERIC:
        shown = without_calls(messages)
    if shown and shown[0].get("role") == "system":
        return [{**shown[0], "content": f"{shown[0]['content']}\n\n{offer}"}, *shown[1:]]
    return [{"role": "system", "content": offer}, *shown]


def without_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages that show calls and results as text, in the form of EXAMPLES[GENERIC]."""
    return [_as_text(dict(message)) for message in messages]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with calls as text, and a result of a tool as a message of the user."""
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.pop("tool_calls", ())
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call.get("function", call)
        arguments = function["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        name = json.dumps(function["name"], ensure_ascii=False)
        texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>')
    return {**message, "content": "\n".join(texts)}
