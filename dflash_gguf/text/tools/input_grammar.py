"""Grammars of the inputs of custom tools, within the grammar of calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .escaped_grammar import escaped_lark

LARK_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\]|\\.)+/|<[^<>\s]+>|(?:#|//)[^\n]*|[&~]')
"""A string, regex, special token, comment or operator of terminals in Lark."""


class InputGrammar(NamedTuple):
    """The grammar of a custom tool's input. syntax: "lark" or "regex"."""

    syntax: str
    definition: str

    def term(self, *, is_escaped: bool) -> str:
        """Returns the Lark term of an input. is_escaped: True for an input within a JSON text.

        Errors: ValueError for a grammar that cannot be enforced within JSON.
        """
        grammar = self.definition
        if self.syntax == "regex":
            grammar = "start: /" + re.sub(r"(\\.)|/", lambda x: x[1] or r"\/", grammar) + "/"
        else:
            refuse_operators(grammar)
        return f"%lark {{\n{escaped_lark(grammar) if is_escaped else grammar}\n}}"


def input_grammars(given: Iterable[Mapping[str, Any]]) -> dict[str, InputGrammar]:
    """Returns the grammars of tools' inputs by name. given: tools that `tools_of` accepts."""
    functions = [one.get("function", one) for one in given]
    return {one["name"]: InputGrammar(*one["grammar"]) for one in functions if one.get("grammar")}


def refuse_operators(grammar: str) -> None:
    """Raises ValueError if a client's grammar, in Lark, has the operators & and ~ of terminals.

    llguidance computes the intersection of a few regexes for minutes.
    """
    if found := {"&", "~"} & set(LARK_TOKEN.findall(grammar)):
        raise ValueError(f"it has the operator {min(found)}, which is not supported")
