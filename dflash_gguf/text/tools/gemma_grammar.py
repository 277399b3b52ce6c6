"""Rules of Gemma 4's calls, whose arguments are in a notation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gemma_calls import MAX_DEPTH, Gemma4
from .grammar_writer import CallWriter, literal, properties_of, texts_of
from .values import referenced, types_of

MAX_NESTED = MAX_DEPTH // 8
"""Most levels of arguments that are bound to their schemas; deeper ones are of any type."""
SCALARS = {
    "integer": "/-?(0|[1-9][0-9]{0,18})/",
    "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
"""Terms by type."""


class GemmaWriter(CallWriter):
    """Writes the rules of calls whose texts are between marks, and whose keys are bare."""

    def arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns the terms of a function's arguments. rule: their rule, for names of others."""
        if not any(line.startswith("any_value:") for line in self.rules):
            self._add_any()
        return self._object(rule, schema, schema, 0)

    def _add_any(self) -> None:
        """Adds the rules of values without a schema."""
        quote = self._mark(Gemma4.QUOTE)
        is_text = quote == literal(Gemma4.QUOTE)
        self.rules += [
            f"text_end[suffix={quote}]: /(.|\\n)*/" if is_text else f"text_end: /(.|\\n)*/ {quote}",
            f"any_text: {quote} text_end",
            f"any_value: any_text | any_list | any_object | {' | '.join(SCALARS.values())}",
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            'any_object: "{" (any_member ("," any_member)*)? "}"',
            'any_member: /[A-Za-z_][A-Za-z0-9_]*/ ":" any_value',
        ]

    def _object(self, rule: str, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        """Returns the terms of an object, whose keys are in alphabetical order."""
        given = sorted(properties_of(schema).items())
        for place, (key, (one, is_required)) in enumerate(given):
            member = f"{literal(key + ':')} {self._value_of(f'{rule}_{place}', one, root, depth)}"
            for state, before in (("a", ""), ("b", '"," ')):  # without and with members before
                skip = "" if is_required else f" | {rule}_{state}{place + 1}"
                self.rules.append(
                    f"{rule}_{state}{place}: {before}{member} {rule}_b{place + 1}{skip}"
                )
        self.rules += [f'{rule}_{state}{len(given)}: ""' for state in "ab"]
        return f'"{{" {rule}_a0 "}}"'

    def _value_of(self, rule: str, schema: Any, root: Any, depth: int) -> str:
        """Returns the term of a value."""
        if isinstance(schema, Mapping) and isinstance(to := schema.get("$ref"), str):
            schema = referenced(to, root)
        types = types_of(schema, root)
        if choices := texts_of(schema):
            quote = self._mark(Gemma4.QUOTE)
            return f"{quote} ({' | '.join(map(literal, choices))}) {quote}"
        if len(types) != 1 or not isinstance(schema, Mapping) or depth > MAX_NESTED:
            return "any_value"
        (kind,) = types
        if kind == "object" and properties_of(schema):
            self.rules.append(f"{rule}: {self._object(rule, schema, root, depth + 1)}")
            return rule
        if kind == "array":
            item = self._value_of(f"{rule}_i", schema.get("items"), root, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        names = {"string": "any_text", "object": "any_object", **SCALARS}
        return names.get(kind, "any_value")
