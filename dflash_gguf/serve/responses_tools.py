"""Tools of OpenAI's Responses as functions of a chat, and the calls of these as items."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import msgspec

from .schemas import ALLOWED_TOOLS, BadRequestError

SYNTAXES = ("lark", "regex")
"""Syntaxes of the grammars that custom tools may have."""
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNITS = re.compile(
    r"""(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*""",
    re.VERBOSE,
)
_BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
)


class ResponsesTool(NamedTuple):
    """A tool that a request offers.

    namespace: None for a tool outside of namespaces. is_custom: True if the tool is called with raw
    text, not JSON.
    """

    name: str
    namespace: str | None
    is_custom: bool
    definition: Mapping[str, Any]


class ResponsesTools:
    """Tools that a request offers, by the names of the functions that the model sees."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Raises BadRequestError for a tool without a name."""
        tools = list(_flat(given))
        n_of_name = Counter(tool.name for tool in tools)
        self._by_function = {
            tool.name
            if tool.namespace is None or n_of_name[tool.name] == 1
            else f"{tool.namespace}__{tool.name}": tool
            for tool in tools
        }
        named = self._by_function.items()
        self._function_of = {(tool.name, tool.namespace): name for name, tool in named}

    def functions(self) -> list[dict[str, Any]]:
        """Returns the tools in the form of chat requests."""
        return [
            {"type": "function", "function": {"name": name, **_function(tool)}}
            for name, tool in self._by_function.items()
        ]

    def function_of(self, name: str, namespace: Any = None) -> str:
        """Returns the name of the function that stands for a tool, offered or not."""
        is_name = isinstance(namespace, (str, type(None)))
        return self._function_of.get((name, namespace), name) if is_name else name

    def choice(self, given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
        """Returns a field `tool_choice` in the form of chat requests."""
        if given is None or isinstance(given, str):
            return given
        tools = given.get("tools")
        if given.get("type") == ALLOWED_TOOLS and _are_objects(tools):
            allowed = [self.choice(one) for one in tools if not list(left_out([one]))]
            return {"type": ALLOWED_TOOLS, "mode": given.get("mode"), "tools": allowed}
        name = given.get("name")
        if given.get("type") not in ("function", "custom") or not isinstance(name, str):
            raise BadRequestError(
                "tool_choice must be auto, required, none, or an object with type function or "
                f"custom, and a name, or with type {ALLOWED_TOOLS} and a list of such objects"
            )
        function = self.function_of(name, given.get("namespace"))
        return {"type": "function", "function": {"name": function}}

    def is_custom(self, function: str) -> bool:
        """True if a function stands for a custom tool."""
        tool = self._by_function.get(function)
        return tool is not None and tool.is_custom

    def item(self, function: str, arguments: str) -> dict[str, Any]:
        """Returns a call as an item, without ids and status. arguments: JSON, as generated."""
        tool = self._by_function.get(function)
        if tool is None:
            return {"type": "function_call", "name": function, "arguments": arguments}
        if tool.is_custom:
            text = input_of(arguments)
            return {"type": "custom_tool_call", "name": tool.name, "input": text}
        item = {"type": "function_call", "name": tool.name, "arguments": arguments}
        return item if tool.namespace is None else item | {"namespace": tool.namespace}


def left_out(given: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the types of tools that only OpenAI's own service can run."""
    for tool in given:
        if tool.get("type", "function") not in ("function", "custom", "namespace"):
            yield f"tools.{tool['type']}"


def custom_arguments(text: str) -> str:
    """Returns the arguments of the function that stands for a custom tool, as JSON."""
    return msgspec.json.encode({"input": text}).decode()


def _flat(
    given: Sequence[Mapping[str, Any]], namespace: str | None = None, within: str = "tools"
) -> Iterator[ResponsesTool]:
    for place, tool in enumerate(given):
        kind, name = tool.get("type", "function"), f"{within}[{place}]"
        if kind not in ("function", "custom", "namespace"):
            continue
        if not isinstance(tool.get("name"), str):
            raise BadRequestError(f"{name} must have a name")
        if kind == "namespace":
            inner = tool.get("tools")
            if not _are_objects(inner):
                raise BadRequestError(f"{name}: tools must be a list of tools")
            yield from _flat(inner, tool["name"], f"{name}.tools")
        else:
            yield ResponsesTool(tool["name"], namespace, kind == "custom", tool)


def _are_objects(given: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(given, list) and all(isinstance(one, dict) for one in given)


def _function(tool: ResponsesTool) -> dict[str, Any]:
    given = tool.definition
    function: dict[str, Any] = {"description": given.get("description")}
    if not tool.is_custom:
        return function | {"parameters": given.get("parameters"), "strict": given.get("strict")}
    text: dict[str, Any] = {"type": "string"}
    form = given.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        text["description"] = (
            f"Text of this grammar in the syntax {form.get('syntax')}:\n{form.get('definition')}"
        )
        if form.get("syntax") not in SYNTAXES or not isinstance(form.get("definition"), str):
            raise BadRequestError(
                f"tools: the format of {tool.name!r:.80} is a grammar, which must have a syntax, "
                f"{' or '.join(SYNTAXES)}, and a definition"
            )
        function["grammar"] = [form["syntax"], form["definition"]]
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return function | {"parameters": schema}


class CustomInput:
    """Reads the input of a custom tool from its arguments, JSON with one text, while they come."""

    def __init__(self) -> None:
        self._held = ""
        self._place: Literal["before", "within", "behind"] = "before"

    def push(self, arguments: str) -> str:
        """Adds a piece of the arguments. Returns the next piece of the input."""
        self._held += arguments
        if self._place == "before" and (head := _HEAD.match(self._held)):
            self._place, self._held = "within", self._held[head.end() :]
        if self._place != "within":
            return ""
        texts: list[str] = []
        while self._place == "within" and self._held:
            units = _UNITS.match(self._held)
            assert units is not None
            texts.append(json.loads(f'"{units[0]}"', strict=False))
            self._held = self._held[units.end() :]
            if self._held.startswith('"'):
                self._place = "behind"
            elif self._held and _BEGUN.fullmatch(self._held):
                break
            else:  # a malformed escape stays as it is
                texts.append(self._held[:1])
                self._held = self._held[1:]
        return "".join(texts)

    def finish(self) -> str:
        """Returns the rest of the input at the end; all arguments if they have another form."""
        if self._place == "behind":
            return ""
        if self._place == "within":
            return self._held
        try:
            return str(msgspec.json.decode(self._held, type=dict[str, str])["input"])
        except (msgspec.DecodeError, KeyError, RecursionError):
            return self._held


def input_of(arguments: str) -> str:
    """Returns the text that a custom tool is called with; the arguments if they are malformed."""
    reader = CustomInput()
    return reader.push(arguments) + reader.finish()
