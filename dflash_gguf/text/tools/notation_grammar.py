"""Rules of calls whose arguments are in a notation of their own: Gemma 4's, and Python's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .gemma_calls import MAX_DEPTH, Gemma4
from .grammar_writer import CallWriter, json_rule, literal, properties_of, texts_of
from .values import referenced, types_of

MAX_NESTED = MAX_DEPTH // 8
"""Most levels of arguments that are bound to their schemas; deeper ones are of any type."""


class GemmaWriter(CallWriter):
    """Writes the rules of Gemma 4's calls: texts are between marks, keys are bare."""

    ARGUMENTS: ClassVar[tuple[str, str]] = ("{", "}")
    """Brackets around the arguments of a call."""
    SEPARATOR: ClassVar[str] = ","
    CONSTANTS: ClassVar[Mapping[str, str]] = {"boolean": '("true" | "false")', "null": '"null"'}
    """Terms by type."""
    NUMBERS: ClassVar[Mapping[str, str]] = {
        "integer": "/-?(0|[1-9][0-9]{0,18})/",
        "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/",
    }
    """Lark terms of numbers whose schema has no keyword but its type, by type."""
    ANY_KEY: ClassVar[str] = '/[A-Za-z_][A-Za-z0-9_]*/ ":"'
    """Term of a key without a schema, and of the mark behind it."""
    ANY_PARAMETER: ClassVar[str] = ANY_KEY
    """Term of the name of a parameter without a schema, and of the mark behind it."""
    IS_SORTED: ClassVar[bool] = True
    """True if keys are in alphabetical order, else in that of the schema."""

    def arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns the terms of a function's arguments. rule: their rule, for names of others."""
        if not any(line.startswith("any_value:") for line in self.rules):
            self._add_any()
        if self._is_loose:
            opening, closing = map(literal, self.ARGUMENTS)
            one = f"{self.ANY_PARAMETER} any_value"
            return f"{opening} ({one} ({literal(self.SEPARATOR)} {one})*)? {closing}"
        return self._object(rule, schema, schema, 0)

    def _key(self, name: str, depth: int) -> str:  # noqa: ARG002
        """Returns the term of a key and the mark behind it. depth: 0 for a parameter."""
        return literal(f"{name}:")

    def _one_text(self, texts: Sequence[str]) -> str:
        """Returns the Lark term that matches any one of some texts."""
        quote = self._mark(Gemma4.QUOTE)
        return f"{quote} ({' | '.join(map(literal, texts))}) {quote}"

    @property
    def _escapes_texts(self) -> bool:
        return False

    def _quote(self) -> str:
        """Returns the term around texts."""
        return self._mark(Gemma4.QUOTE)

    def _any_text(self) -> list[str]:
        """Returns the rules of `any_text`."""
        quote = self._mark(Gemma4.QUOTE)
        is_text = quote == literal(Gemma4.QUOTE)
        end = (
            f"text_end[suffix={quote}]: /(.|\\n)*/" if is_text else f"text_end: /(.|\\n)*/ {quote}"
        )
        return [end, f"any_text: {quote} text_end"]

    def _add_any(self) -> None:
        """Adds the rules of values without a schema."""
        scalars = " | ".join((*self.NUMBERS.values(), *self.CONSTANTS.values()))
        comma = literal(self.SEPARATOR)
        self.rules += [
            *self._any_text(),
            f"any_value: any_text | any_list | any_object | {scalars}",
            f'any_list: "[" (any_value ({comma} any_value)*)? "]"',
            f'any_object: "{{" (any_member ({comma} any_member)*)? "}}"',
            f"any_member: {self.ANY_KEY} any_value",
        ]

    def _object(self, rule: str, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        """Returns the terms of an object, in brackets."""
        given = list(properties_of(schema).items())
        if self.IS_SORTED:
            given.sort()
        comma = literal(self.SEPARATOR)
        for place, (key, (one, is_required)) in enumerate(given):
            value = self._value_of(f"{rule}_{place}", one, root, depth)
            for state, before in (
                ("a", ""),
                ("b", f"{comma} "),
            ):  # without, and with members before
                skip = "" if is_required else f" | {rule}_{state}{place + 1}"
                member = f"{before}{self._key(key, depth)} {value}"
                self.rules.append(f"{rule}_{state}{place}: {member} {rule}_b{place + 1}{skip}")
        self.rules += [f'{rule}_{state}{len(given)}: ""' for state in "ab"]
        opening, closing = ("{", "}") if depth else self.ARGUMENTS
        return f"{literal(opening)} {rule}_a0 {literal(closing)}"

    def _value_of(self, rule: str, schema: Any, root: Any, depth: int) -> str:
        """Returns the term of a value."""
        if isinstance(schema, Mapping) and isinstance(to := schema.get("$ref"), str):
            schema = referenced(to, root)
        types = types_of(schema, root)
        if self._input is not None:
            self.rules.append(f"{rule}: {self._input}")
            return f"{self._quote()} {rule} {self._quote()}"
        if choices := texts_of(schema):
            return self._one_text(choices)
        if len(types) != 1 or not isinstance(schema, Mapping) or depth > MAX_NESTED:
            return "any_value"
        (kind,) = types
        if kind == "object" and properties_of(schema):
            self.rules.append(f"{rule}: {self._object(rule, schema, root, depth + 1)}")
            return rule
        if kind == "array":
            item = self._value_of(f"{rule}_i", schema.get("items"), root, depth + 1)
            return f'"[" ({item} ({literal(self.SEPARATOR)} {item})*)? "]"'
        if kind in self.NUMBERS:
            self.rules.append(f"{rule}: {json_rule(schema, is_strict=self._is_strict)}")
            return rule
        return {"string": "any_text", "object": "any_object", **self.CONSTANTS}.get(
            kind, "any_value"
        )


class PythonWriter(GemmaWriter):
    """Writes the rules of LFM2's calls: keyword arguments, which are literals of Python."""

    ARGUMENTS = ("(", ")")
    SEPARATOR = ", "
    CONSTANTS: ClassVar[Mapping[str, str]] = {"boolean": '("True" | "False")', "null": '"None"'}
    ANY_KEY = 'any_text ": "'
    ANY_PARAMETER = r'/[^\s=(),"]+/ "="'
    IS_SORTED = False

    def _key(self, name: str, depth: int) -> str:
        return literal(f"{json.dumps(name)}: " if depth else f"{name}=")

    def _one_text(self, texts: Sequence[str]) -> str:
        either = (f"{literal(json.dumps(text))} | {literal(repr(text))}" for text in texts)
        return f"({' | '.join(either)})"

    @property
    def _escapes_texts(self) -> bool:
        return True

    def _quote(self) -> str:
        return literal('"')

    def _any_text(self) -> list[str]:
        inner = r"[^{0}\\\x00-\x1f\x7f]|\\[{0}\\nrt]"
        texts = (f"/{mark}({inner.format(mark)})*{mark}/" for mark in "\"'")
        return [f"any_text: {' | '.join(texts)}"]
