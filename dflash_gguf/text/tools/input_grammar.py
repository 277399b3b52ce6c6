"""Grammars of the inputs of custom tools, within the grammar of calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class InputGrammar(NamedTuple):
    """The grammar of a custom tool's input. syntax: "lark" or "regex"."""

    syntax: str
    definition: str

    @property
    def term(self) -> str:
        """The Lark term of an input."""
        grammar = self.definition
        if self.syntax == "regex":
            grammar = "start: /" + re.sub(r"(\\.)|/", lambda x: x[1] or r"\/", grammar) + "/"
        return f"%lark {{\n{grammar}\n}}"


def input_grammars(given: Iterable[Mapping[str, Any]]) -> dict[str, InputGrammar]:
    """Returns the grammars of tools' inputs by name. given: tools that `tools_of` accepts."""
    functions = [one.get("function", one) for one in given]
    return {one["name"]: InputGrammar(*one["grammar"]) for one in functions if one.get("grammar")}
