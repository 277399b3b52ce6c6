"""Grammars of answers that must be tool calls, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .formats import special_texts
from .parser import ToolFormat
from .values import types_of

NAME, ARGUMENTS, KEY = "\0N", "\0A", "\0K"
"""Places of a function's name, of its arguments, and of the name of a parameter in a form."""


GUIDANCE = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Options of llguidance for JSON: spaces as templates write them, so that these are forced."""


class CallForm(NamedTuple):
    """How calls are written. call: one call; before, between, after: texts around calls.

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


_JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_HERMES = CallForm(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n")
_QWEN = CallForm(
    f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
    between="\n",
    parameter=f"<parameter={KEY}>\n",
    value_end="\n</parameter>\n",
)
FORMS = {
    "hermes": _HERMES,
    "generic": _HERMES,
    "llama3": CallForm(f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', is_single=True),
    "mistral": CallForm(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
    "mistral_list": CallForm(_JSON, before="[TOOL_CALLS][", between=", ", after="]"),
    "qwen": _QWEN,
    "seed": CallForm(
        f"<seed:tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</seed:tool_call>",
        between="\n",
        parameter=f"<parameter={KEY}>",
        value_end="</parameter>\n",
    ),
    "glm": CallForm(
        f"<tool_call>{NAME}\n{ARGUMENTS}</tool_call>",
        between="\n",
        parameter=f"<arg_key>{KEY}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    "minimax": CallForm(
        f'<invoke name="{NAME}">\n{ARGUMENTS}</invoke>\n',
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
        parameter=f'<parameter name="{KEY}">',
        value_end="</parameter>\n",
    ),
    "deepseek": CallForm(
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi": CallForm(
        f"<|tool_call_begin|>functions.{NAME}:\0I<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "cohere": CallForm(
        f'{{"tool_call_id": "\0I", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
    ),
    "functionary": CallForm(f"<function={NAME}>{ARGUMENTS}</function>"),
    "granite3": CallForm(_JSON, before="<|tool_call|>[", between=", ", after="]"),
    "nemotron": CallForm(_JSON, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    "tool_calls": CallForm(_JSON, before="<tool_calls>[", between=", ", after="]</tool_calls>"),
}
"""Forms by family. The others are not text alone: gpt-oss, Gemma 4, LFM2."""


def literal(text: str) -> str:
    """Returns the Lark term of a text."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the Lark term of JSON by a schema, without the keywords that cannot be enforced."""
    return f"%json {json.dumps({**schema, 'x-guidance': GUIDANCE}, ensure_ascii=False)}"


def call_grammar(
    tools: ToolFormat,
    names: Iterable[str] | None = None,
    *,
    mark: Callable[[str], str] = literal,
) -> str:
    """Returns a grammar of answers that are calls of tools, one at least.

    names: tools that may be called; None for all. mark: returns the term of a mark, which a model
    may write as a control token. Arguments in tags come in the order of the schema; raw values of
    several types are any text.
    Errors: ValueError for a family without a form.
    """
    form = FORMS.get(tools.family)
    if form is None:
        raise ValueError(
            f"tool_choice: calls in the form of this model ({tools.family}) cannot be required, "
            "leave it out"
        )
    writer = _Writer(form, special_texts(None, tools), mark)
    chosen = list(tools.parameters if names is None else names)
    calls = [writer.call(n, name, tools.parameters[name]) for n, name in enumerate(chosen)]
    is_single = form.is_single or not tools.is_parallel
    more = "" if is_single else f" ({writer.terms(form.between)} call)*"
    start = f"start: {writer.terms(form.before)} call{more} {writer.terms(form.after)}"
    return "\n".join(
        [start, f"call: {' | '.join(calls)}", *writer.rules, "INDEX: /[0-9]{1,3}/", ""]
    )


class _Writer:
    """Writes the rules of calls in one form."""

    def __init__(
        self,
        form: CallForm,
        marks: Iterable[str],
        mark: Callable[[str], str],
    ) -> None:
        self._form, self._mark = form, mark
        self._split = re.compile("(" + "|".join(map(re.escape, [*marks, "\0A", "\0I"])) + ")")
        self.rules: list[str] = []

    def call(self, number: int, name: str, schema: Mapping[str, Any]) -> str:
        """Adds the rules of a function's call. Returns the name of the rule."""
        arguments = f"arguments_{number}"
        if self._form.parameter:
            self.rules.append(f"{arguments}: {' '.join(self._parameters(number, schema))}")
        else:
            self.rules.append(f"{arguments}: {json_rule(schema)}")
        self.rules.append(f"call_{number}: {self.terms(self._form.call, name, arguments)}")
        return f"call_{number}"

    def terms(self, text: str, name: str = "", arguments: str = "") -> str:
        """Returns the terms of a text with marks and places."""
        pieces = self._split.split(text.replace(NAME, name))
        return " ".join(self._term(piece, arguments) for piece in pieces if piece)

    def _term(self, piece: str, arguments: str) -> str:
        if piece in (ARGUMENTS, "\0I"):
            return arguments if piece == ARGUMENTS else "INDEX"
        return self._mark(piece) if self._split.fullmatch(piece) else literal(piece)

    def _parameters(self, number: int, schema: Mapping[str, Any]) -> Iterator[str]:
        properties, required = schema.get("properties"), schema.get("required")
        given = properties if isinstance(properties, Mapping) else {}
        needed = required if isinstance(required, Sequence) else ()
        for place, (key, one) in enumerate(given.items()):
            rule = f"value_{number}_{place}"
            head = self.terms(self._form.parameter.replace(KEY, key))
            yield f"({head} {rule}){'' if key in needed else '?'}"
            self.rules.append(self._value(rule, one, schema))
        if not given:
            yield '""'

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns the rule of a raw value and the text behind it."""
        end, types = literal(self._form.value_end), types_of(schema, root)
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(choices, list) and choices and all(isinstance(x, str) for x in choices):
            return f"{rule}: ({' | '.join(map(literal, choices))}) {end}"
        if types and "string" not in types:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{rule}: {json_rule({**schema, **shared})} {end}"
        return f"{rule}[suffix={end}]: /(.|\\n)*/"
