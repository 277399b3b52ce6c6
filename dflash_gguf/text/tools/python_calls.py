"""Parser of LFM2's calls, which are a list of calls in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from .json_calls import JsonCalls
from .parser import Reads
from .values import python_tree

_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TEXT_OR_WORD = re.compile(rf"{_TEXT}|[^\s()\[\]{{}},='\"]+", re.DOTALL)
_NAME_END = re.compile(r"\s*[(=]")


class Lfm2(JsonCalls):
    """Parser for a list of calls in Python between marks; they are passed on when complete."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    CLOSINGS: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>",)

    def _call(self, mark: str) -> Reads[None]:  # noqa: ARG002
        text = yield from self._until(self.CLOSINGS)
        yield from self._one_of(self.CLOSINGS)
        calls = _calls_in(text or "")
        if not all(self._tools.allows(name) for name, _ in calls):
            return
        for name, arguments in calls:
            yield self._begin(name)
            yield self._arguments(arguments)
            self._end()
            if self._is_done:
                return


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Returns name and arguments of each call in a Python list; none for another text."""
    try:
        names: list[str] = []
        expression = python_tree(_TEXT_OR_WORD.sub(partial(_readable, names), text))
        calls = expression.elts if isinstance(expression, ast.List) else [expression]
        return [_call_of(call, names) for call in calls]
    except (ValueError, TypeError, RecursionError):
        return []


def _readable(names: list[str], found: re.Match[str]) -> str:
    """Returns a text without line breaks, or another name for one that may be none in Python."""
    if found[0].startswith(("'", '"')):
        return found[0].replace("\n", "\\n")
    if _NAME_END.match(found.string, found.end()) is None:
        return found[0]
    names.append(found[0])
    return f"_{len(names) - 1}"


def _call_of(call: ast.expr, names: Sequence[str]) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError
        values[names[int(keyword.arg[1:])]] = ast.literal_eval(keyword.value)
    return names[int(call.func.id[1:])], json.dumps(values, ensure_ascii=False)
