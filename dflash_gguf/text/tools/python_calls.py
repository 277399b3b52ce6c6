"""Parser of LFM2's calls, which are a list of calls in Python."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, ClassVar

from .json_calls import JsonCalls
from .parser import Reads
from .values import python_tree

_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


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
        expression = python_tree(_TEXT.sub(_escape_lines, text))
        calls = expression.elts if isinstance(expression, ast.List) else [expression]
        return [_call_of(call) for call in calls]
    except (ValueError, TypeError, RecursionError):
        return []


def _escape_lines(quoted: re.Match[str]) -> str:
    return quoted[0].replace("\n", "\\n")


def _call_of(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError
        values[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(call.func), json.dumps(values, ensure_ascii=False)
