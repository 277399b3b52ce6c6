"""Grammars of answers that must be tool calls, in the Lark dialect of llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .formats import special_texts
from .grammar_writer import ARGUMENTS, KEY, NAME, NUMBER, CallForm, CallWriter, literal
from .harmony_calls import HarmonyCalls
from .notation_grammar import GemmaWriter, PythonWriter
from .parser import ToolFormat

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
        f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "gemma4": CallForm(f"<|tool_call>call:{NAME}{ARGUMENTS}<tool_call|>"),
    "cohere": CallForm(
        f'{{"tool_call_id": "{NUMBER}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
    ),
    "functionary": CallForm(f"<function={NAME}>{ARGUMENTS}</function>"),
    "lfm2": CallForm(
        f"{NAME}{ARGUMENTS}",
        before="<|tool_call_start|>[",
        between=", ",
        after="]<|tool_call_end|>",
    ),
    "harmony": CallForm(
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        is_single=True,
    ),
    "functools": CallForm(_JSON, before=" functools[", between=", ", after="]"),
    "gigachat": CallForm(_JSON, before="<|function_call|>", is_single=True),
    "granite3": CallForm(_JSON, before="<|tool_call|>[", between=", ", after="]"),
    "nemotron": CallForm(_JSON, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    "tool_calls": CallForm(_JSON, before="<tool_calls>[", between=", ", after="]</tool_calls>"),
}
"""Form in which each family of chat templates writes calls, by name of the family."""
HARMONY = "harmony"
"""Family whose answers, reasoning too, are messages with headers, which the grammar binds."""
WRITERS = {"gemma4": GemmaWriter, "lfm2": PythonWriter}
"""Writers of families whose arguments are in a notation of their own."""


def opening_of(tools: ToolFormat) -> str:
    """Returns the mark at which all calls of a family begin, "" if there is none."""
    form = FORMS[tools.family]
    marks = special_texts(None, tools)
    return next((mark for mark in marks if (form.before + form.call).startswith(mark)), "")


def is_marked(tools: ToolFormat) -> bool:
    """True if text and calls can be told apart while they are written, by a mark before calls."""
    return tools.family == HARMONY or bool(opening_of(tools))


def call_grammar(
    tools: ToolFormat,
    *,
    answer: str | None = None,
    is_free: bool = False,
    mark: Callable[[str], str] = literal,
) -> str:
    """Returns a grammar of answers that are calls of tools, one at least.

    answer: Lark term of what the answer may be instead; None for nothing. is_free: True for any
    text around the calls, which need not come, and for any arguments of tools that are neither
    strict nor have a grammar; for families that `is_marked`. mark: returns the term of a mark,
    which a model may write as a control token. Arguments in tags come in the order
    of the schema; raw values of several types are any text.
    """
    form, is_harmony = FORMS[tools.family], tools.family == HARMONY
    opening = opening_of(tools) if is_free else ""
    if opening and form.before:
        form = form._replace(before=form.before[len(opening) :])
    elif opening:
        form = form._replace(call=form.call[len(opening) :], between=form.between + opening)
    writer_of = WRITERS.get(tools.family, CallWriter)
    marks = HarmonyCalls.MARKS if is_harmony else special_texts(None, tools)
    writer = writer_of(form, marks, mark, tools.strict, tools.inputs)
    bound = {*tools.strict, *tools.inputs} if is_free else tools.names
    calls = [
        writer.call(n, name, tools.parameters[name], is_loose=name not in bound)
        for n, name in enumerate(tools.names)
    ]
    is_single = form.is_single or not tools.is_parallel
    more = "" if is_single else f" ({writer.terms(form.between)} call)*"
    start = f"{writer.terms(form.before)} call{more} {writer.terms(form.after)}"
    rules = [f"call: {' | '.join(calls)}", "INDEX: /[0-9]{1,3}/"]
    if is_harmony:
        is_bound = answer is None and not is_free
        rules += _messages(writer, mark, '"analysis"' if is_bound else _TOLD, answer)
        start = f"message* (call{'' if is_bound else ' | last'})"
        answer = None
    elif opening:
        rules += _text_around(mark(opening), opening, is_text=mark(opening) == literal(opening))
        start = f"(before {start})* after"
    if answer is not None:
        start += f" | {answer}"
    return "\n".join([f"start: {start}", *rules, *writer.rules, ""])


def _text_around(term: str, opening: str, *, is_text: bool) -> list[str]:
    """Returns the rules of the text before a call, with the opening mark, and of the text after.

    is_text: False for a mark that is a control token, which no text holds.
    """
    if not is_text:
        return [f"before: /(.|\\n)*/ {term}", "after: /(.|\\n)*/"]
    return [
        f"before[suffix={term}]: /(.|\\n)*/",
        'after: AFTER | ""',
        f"AFTER: {_text_without([opening])}",
    ]


_TOLD = '("analysis" | "commentary")'


def _messages(
    writer: CallWriter, mark: Callable[[str], str], channels: str, answer: str | None
) -> list[str]:
    """Returns the rules of gpt-oss's messages before a call, and of one that ends the answer.

    channels: term of the channels of the former. answer: term of the latter's text, None for any.
    """
    end = mark("<|end|>")
    texts = [one for one in HarmonyCalls.MARKS if mark(one) == literal(one)]
    opening, header_end = writer.terms("<|channel|>"), writer.terms("<|message|>")
    json_type = writer.terms(" <|constrain|>json")
    last = f'"final" ({json_type})? {header_end} {answer}'
    if answer is None:
        last = f'("final" | "commentary") {header_end} (LAST | "")'
    return [
        f"message: {opening} {channels} {header_end} said {writer.terms('<|start|>assistant')}",
        f"said[suffix={end}]: SAID" if "<|end|>" in texts else f"said: SAID {end}",
        f"SAID: {_text_without([one for one in texts if one != '<|end|>'])}",
        f"last: {opening} {last}",
        f"LAST: {_text_without(texts)}",
    ]


def _text_without(marks: Sequence[str]) -> str:
    """Returns the term of any text that does not hold a mark."""
    held = "|".join(re.sub(r"([\[\]|/.*+?(){}^$\\])", r"\\\1", mark) for mark in marks)
    return "/(.|\\n)*/" + (f" & ~/(.|\\n)*({held})(.|\\n)*/" if marks else "")
