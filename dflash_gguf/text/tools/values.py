"""Values of arguments: the extent of JSON in a text, and JSON made of other notations."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

_QUOTE = re.compile(r'["\\]')
_BRACKET = re.compile(r'["{}\[\]]')
_END = re.compile(r"[\s,}\]]")
MAX_REFERENCES = 8
"""Most steps from a reference in a schema to what it stands for."""


class JsonScan:
    """Finds the end of a JSON value in pieces of text. Brackets and quotes count, nothing else."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_text = self._is_escaped = self._is_scalar = False

    def push(self, text: str) -> int:
        """Returns the number of characters of a piece that belong to the value."""
        at = 0
        while at < len(text) and not self.is_complete:
            if self._is_scalar:
                end = _END.search(text, at)
                self.is_complete = end is not None
                return len(text) if end is None else end.start()
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self._is_in_text:
                at = self._in_text(text, at)
            elif self._depth == 0 and text[at] not in '"{[':
                self._is_scalar = True
            else:
                at = self._between(text, at)
        return at

    def _in_text(self, text: str, at: int) -> int:
        found = _QUOTE.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._is_in_text = False
            self.is_complete = self._depth == 0
        return found.end()

    def _between(self, text: str, at: int) -> int:
        found = _BRACKET.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._is_in_text = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.is_complete = self._depth == 0
        return found.end()


def decoded(text: str) -> str | None:
    """Returns the text that a JSON string stands for, None if it is no JSON string."""
    value = parsed(text)
    return value if isinstance(value, str) else None


def parsed(text: str) -> Any:
    """Returns the value of a JSON text, Ellipsis if it is no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ...


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and infinities are no JSON


def python_tree(text: str) -> ast.expr:
    """Returns the syntax tree of an expression in Python. Raises ValueError for other texts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no expression in Python") from error


def escaped(text: str) -> str:
    """Returns a piece of text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return f'"{escaped(text)}"'


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Returns the JSON type names that a schema allows; empty (any) if the schema names no type.

    root: schema of all arguments, to which references lead.
    """
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(referenced(reference, root), root, depth + 1)
    if isinstance(
        values := schema.get("enum", [schema["const"]] if "const" in schema else None), list
    ):
        return frozenset(map(type_of, values))
    found = [types_of(one, root, depth + 1) for one in _alternatives(schema)]
    return frozenset().union(*found) if found and all(found) else frozenset()


def _alternatives(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            yield from schema[key]


def referenced(reference: str, root: Any) -> Any:
    """Returns the schema that a reference names, None if there is none."""
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def type_of(value: Any) -> str:
    """Returns the name of JSON's type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "null" if value is None else "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of a raw value: a value of one of the types if the text is that, else text.

    types: names of JSON's types; none for unknown ones.
    """
    raw = text.strip()
    if (value := parsed(raw)) is ...:
        try:  # some templates print lists and objects as Python does
            value = ast.literal_eval(python_tree(raw))
            raw = json.dumps(value, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError):
            return quoted(text)
        if isinstance(value, (str, int, float, tuple)) and not isinstance(value, bool):
            return quoted(text)
    name = type_of(value)
    is_fit = not types or name in types or (name == "integer" and "number" in types)
    is_text = "string" in types and (name == "string" or not is_fit)
    return quoted(text) if is_text else raw
