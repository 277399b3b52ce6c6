"""Families of chat templates by the form of their tool calls, and the parser of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..reasoning import Format, OutputPart, Splitter
from .gemma_calls import Gemma4
from .harmony_calls import HarmonyCalls
from .head_calls import DeepSeek, Functionary, KimiK2, Mistral
from .json_calls import (
    BareJson,
    Cohere,
    Functools,
    GigaChat,
    Granite3,
    Hermes,
    Llama3,
    NemotronV2,
    ToolCalls,
)
from .parser import ToolFormat
from .python_calls import Lfm2
from .tag_calls import Glm, MiniMax, QwenTags, SeedTags


class Parser(Splitter, Protocol):
    """Interface of the parsers of tool calls."""

    @property
    def is_done(self) -> bool:
        """True once the only call that the request allows is complete."""


class Family(NamedTuple):
    """Chat templates with calls of one form.

    marks: texts that all these templates hold. interrupts: beginnings of a call that end reasoning
        without the closing mark of it, where NAME stands for the name of each tool.
    """

    marks: tuple[str, ...]
    parser: Callable[[ToolFormat], Parser]
    interrupts: tuple[str, ...] = ()


GENERIC = "generic"
"""Name of the family of templates that show no tools: the prompt asks for JSON between marks."""
FAMILIES = {
    "harmony": Family(("<|channel|>", "<|message|>"), HarmonyCalls),
    "gemma4": Family(("<|tool_call>", "<tool_call|>"), Gemma4, ("<|tool_call>call:",)),
    "deepseek": Family(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), DeepSeek, DeepSeek.SILENT[:1]),
    "kimi": Family(("<|tool_calls_section_begin|>",), KimiK2, KimiK2.SILENT[:1]),
    "minimax": Family(("<minimax:tool_call>",), MiniMax, ("<minimax:tool_call>\n<invoke",)),
    "lfm2": Family(("List of tools: ", "<|im_start|>"), Lfm2, ("<|tool_call_start|>[",)),
    "glm": Family(("<arg_key>", "<arg_value>"), Glm, ("<tool_call>NAME",)),
    "seed": Family(
        ("<seed:tool_call>", "<parameter="), SeedTags, ("<seed:tool_call>\n<function=",)
    ),
    "qwen": Family(
        ("<function=", "<parameter="),
        QwenTags,
        ("<tool_call>\n<function=", "<tool_call><function="),
    ),
    "functionary": Family(("<function=", "</function>"), Functionary),
    "tool_calls": Family(("<tool_calls>",), ToolCalls),
    "hermes": Family(("<tool_call>",), Hermes, ('<tool_call>\n{"name"', '<tool_call>{"name"')),
    "mistral": Family(("[TOOL_CALLS]", "[ARGS]"), Mistral, ("[TOOL_CALLS]NAME",)),
    "mistral_list": Family(("[TOOL_CALLS]",), Mistral, ("[TOOL_CALLS][{",)),
    "cohere": Family(("<|START_ACTION|>",), Cohere, ("<|START_ACTION|>[",)),
    "granite3": Family(("<|tool_call|>",), Granite3),
    "nemotron": Family(("<TOOLCALL>",), NemotronV2, ("<TOOLCALL>[{",)),
    "functools": Family((" functools[",), Functools),
    "gigachat": Family(("<|function_call|>",), GigaChat),
    "llama3": Family(("<|start_header_id|>", "ipython"), Llama3),
    GENERIC: Family((), BareJson, ('<tool_call>\n{"name"', '<tool_call>{"name"')),
}
"""Families by name; a template belongs to the first whose marks it holds."""


def family_of(template: str) -> str:
    """Returns the name of a template's family."""
    return next(
        name for name, one in FAMILIES.items() if all(mark in template for mark in one.marks)
    )


def special_texts(reasoning: Format | None, tools: ToolFormat | None) -> frozenset[str]:
    """Returns the marks of reasoning and calls, which are read even if they are control tokens."""
    parser = None if tools is None else FAMILIES[tools.family].parser
    names = ("OPENINGS", "CLOSINGS", "SILENT", "INNER")
    marks = [mark for name in names for mark in getattr(parser, name, ())]
    marks += [] if reasoning is None else [reasoning.opening, reasoning.closing]
    return frozenset(filter(None, marks))


class AnswerParser:
    """Separates reasoning, text and tool calls of an answer while it is generated."""

    def __init__(self, reasoning: Format | None, tools: ToolFormat | None) -> None:
        """reasoning: None to leave reasoning in the text. tools: None if no call is expected."""
        self._calls: Parser | None = None
        self._reasoning: Splitter | None = None
        interrupts: tuple[str, ...] = ()
        if tools is not None and tools.names:
            family = FAMILIES[tools.family]
            self._calls = family.parser(tools)
            # A grammar starts behind the reasoning, so a mark of a call within it begins no call.
            given = () if tools.grammar else family.interrupts
            known = {x.replace("NAME", name) for x in given for name in tools.names}
            interrupts = tuple(sorted(known))
        self._shows_reasoning = reasoning is None
        if reasoning is not None and not isinstance(self._calls, HarmonyCalls):
            self._reasoning = reasoning.splitter(interrupts)

    @property
    def is_done(self) -> bool:
        """True once the only call that the request allows is complete."""
        return self._calls is not None and self._calls.is_done

    def push(self, text: str) -> list[OutputPart]:
        """Adds text. Returns the parts that are certain; the start of a mark is held back."""
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        else:
            parts = [OutputPart(text)] if text else []
        return parts if self._calls is None else self._with_calls(self._calls, parts)

    def finish(self) -> list[OutputPart]:
        """Returns the held back text as parts; called at the end of the answer."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return parts
        rest = self._calls.finish()
        return self._with_calls(self._calls, parts) + [self._shown(part) for part in rest]

    def _with_calls(self, calls: Parser, parts: list[OutputPart]) -> list[OutputPart]:
        found = []
        for part in parts:
            found += calls.push(part.text) if part.kind == "text" else [part]
        return [self._shown(part) for part in found]

    def _shown(self, part: OutputPart) -> OutputPart:
        is_text = part.kind == "reasoning" and self._shows_reasoning
        return OutputPart(part.text) if is_text else part
