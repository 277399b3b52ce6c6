"""Rules of calls in one form, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .input_grammar import InputGrammar
from .values import types_of

NAME, ARGUMENTS, KEY, NUMBER = "\0N", "\0A", "\0K", "\0I"
"""Places in a form: name and arguments of a function, name of a parameter, number of a call."""
TOOL_MARK = "// tool "
"""Beginning of a comment before the rules of a tool, by which error messages name the tool."""

GUIDANCE = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Options of llguidance for JSON: spaces as templates write them, so that these are forced."""


LOOSE = {"type": "object", "x-guidance": {"lenient": True, "whitespace_flexible": True}}
"""Schema of arguments that are not bound to one of their own."""


class CallForm(NamedTuple):
    """The form of written calls. call: one call; before, between, after: texts around calls.

    is_single: True if an answer has one call at most.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    is_single: bool = False
    parameter: str = ""
    """Text before a raw value, in forms whose arguments are in tags; empty in others."""
    value_end: str = ""


def literal(text: str) -> str:
    """Returns the Lark term of a text."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any], *, is_strict: bool = False) -> str:
    """Returns the Lark term of JSON by a schema.

    is_strict: False to leave out keywords that cannot be enforced.
    """
    guidance = GUIDANCE | {"lenient": not is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance}, ensure_ascii=False)}"


def properties_of(schema: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Returns the schema of each property of an object, and True if the property is required."""
    properties, required = schema.get("properties"), schema.get("required")
    given = properties if isinstance(properties, Mapping) else {}
    needed = required if isinstance(required, Sequence) else ()
    return {key: (one, key in needed) for key, one in given.items()}


def texts_of(schema: Any) -> list[str]:
    """Returns the texts of an enumeration; none for other schemas."""
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    is_texts = isinstance(choices, list) and all(isinstance(x, str) for x in choices)
    return list(choices or ()) if is_texts else []


class CallWriter:
    """Writes the rules of calls in one form."""

    def __init__(
        self,
        form: CallForm,
        marks: Iterable[str],
        mark: Callable[[str], str],
        strict: Collection[str] = (),
        inputs: Mapping[str, InputGrammar] | None = None,
    ) -> None:
        """strict: names of the functions whose schemas must be enforced in all keywords.

        inputs: grammars of raw texts, the only arguments of functions, by function name.
        """
        self._form, self._mark, self._strict = form, mark, strict
        self._inputs = inputs or {}
        self._split = re.compile("(" + "|".join(map(re.escape, [*marks, ARGUMENTS, NUMBER])) + ")")
        self.rules: list[str] = []

    def call(
        self, number: int, name: str, schema: Mapping[str, Any], *, is_loose: bool = False
    ) -> str:
        """Adds the rules of a function's call. Returns the name of the rule.

        is_loose: True for arguments of any names and values, in any order.
        """
        rule, self._is_loose = f"arguments_{number}", is_loose
        self._is_strict, self._input = name in self._strict, self._input_term(name)
        self.rules.append(TOOL_MARK + literal(name))
        self.rules.append(f"{rule}: {self.arguments(rule, schema)}")
        self.rules.append(f"call_{number}: {self.terms(self._form.call, name, rule)}")
        return f"call_{number}"

    @property
    def _escapes_texts(self) -> bool:
        """True if texts in arguments have escapes, as in JSON."""
        return not self._form.parameter

    def _input_term(self, name: str) -> str | None:
        """Returns the term of a custom tool's input; None for other tools."""
        grammar = self._inputs.get(name)
        try:
            return None if grammar is None else grammar.term(is_escaped=self._escapes_texts)
        except ValueError as error:
            warnings.warn(
                f"tools: the grammar of {name!r:.80} is shown to the model, not enforced: {error}",
                stacklevel=2,
            )
            return None

    def arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns the terms of a function's arguments. rule: their rule, for names of others."""
        if self._form.parameter:
            return (
                self._any_parameters()
                if self._is_loose
                else " ".join(self._parameters(rule, schema))
            )
        if self._input is not None:
            self.rules.append(f"{rule}_input: {self._input}")
            return rf"""/\{{\s?"input":\s?"/ {rule}_input /"\s?\}}/"""
        if self._is_loose:
            return f"%json {json.dumps(LOOSE)}"
        return json_rule({"type": "object", **schema}, is_strict=self._is_strict)

    def terms(self, text: str, name: str = "", arguments: str = "") -> str:
        """Returns the terms of a text with marks and places."""
        pieces = self._split.split(text.replace(NAME, name))
        return " ".join(self._term(piece, arguments) for piece in pieces if piece)

    def _term(self, piece: str, arguments: str) -> str:
        if piece in (ARGUMENTS, NUMBER):
            return arguments if piece == ARGUMENTS else "INDEX"
        return self._mark(piece) if self._split.fullmatch(piece) else literal(piece)

    def _parameters(self, rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
        given = properties_of(schema)
        for place, (key, (one, is_required)) in enumerate(given.items()):
            head = self.terms(self._form.parameter.replace(KEY, key))
            yield f"({head} {rule}_{place}){'' if is_required else '?'}"
            self.rules.append(self._value(f"{rule}_{place}", one, schema))
        if not given:
            yield '""'

    def _any_parameters(self) -> str:
        if not any(line.startswith("any_parameter:") for line in self.rules):
            before, after = map(literal, self._form.parameter.split(KEY))
            end = literal(self._form.value_end)
            self.rules += [
                f'any_parameter: {before} /[^<>"\\n]+/ {after} any_raw',
                f"any_raw[suffix={end}]: /(.|\\n)*/",
            ]
        return "any_parameter*"

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns the rule of a raw value and the text behind it."""
        end, types = literal(self._form.value_end), types_of(schema, root)
        if choices := texts_of(schema):
            return f"{rule}: ({' | '.join(map(literal, choices))}) {end}"
        if self._input is not None:
            self.rules.append(f"{rule}_input: {self._input}")
            return f"{rule}: {rule}_input {end}"
        if types and "string" not in types:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{rule}: {json_rule({**schema, **shared}, is_strict=self._is_strict)} {end}"
        return f"{rule}[suffix={end}]: /(.|\\n)*/"
