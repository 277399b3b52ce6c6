"""Grammars of texts within JSON: the same texts, as JSON escapes them.

A character that JSON escapes becomes a backslash and more, so that an escaped terminal may go on as
its successor begins. llguidance's lexer does not go back, so terminals with such characters become
rules, whose terminals are single characters, and runs of characters without an escape.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

SPECIALS = '"\\' + "".join(map(chr, range(0x20)))
"""Characters that JSON escapes."""
PLAIN = r'[^"\\\x00-\x1f]'
COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
}
"""Terminals of Lark's library that hold characters which JSON escapes."""
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |%import[ \t]+common[.](?P<imported>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?
    |(?P<terminal>\b_*[A-Z][A-Z0-9_]*\b)|(?P<refused>%\w+|[<&]|~(?!\s*\d)|(?<=\w)\[)""",
    re.VERBOSE,
)
_ATOM = re.compile(
    r"""\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|[xu]\{(?P<code>[0-9a-fA-F]{1,6})\}
    |(?P<kind>[dDwWsS])|(?P<control>[ntrfva])|(?P<mark>[^a-zA-Z0-9]))
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\\[])*\]|[.])|(?P<open>\((?:\?:|\?P?<\w+>)?(?![?]))|(?P<close>\))
    |(?P<either>[|])|(?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})[?]?)|(?P<plain>[^\\\[(){^$])""",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


def escaped_lark(grammar: str) -> str:
    """Returns a grammar, in Lark, of the texts of a grammar as they stand within a JSON text.

    Errors: ValueError for a part that cannot be enforced there.
    """
    return _TOKEN.sub(_escaped_token, grammar)


def _escaped_token(found: re.Match[str]) -> str:
    if found["refused"]:
        raise ValueError(f"{found['refused']} cannot be enforced within JSON")
    if found["terminal"]:
        return _rule(found["terminal"])
    if found["regex"]:
        return _regex_terms(found["regex"])
    if text := found["text"]:
        value = str(ast.literal_eval(text.rstrip("i")))
        if _inner(value) != value and text.endswith("i"):
            raise ValueError(f"{text:.40} cannot be enforced within JSON")
        return json.dumps(_inner(value), ensure_ascii=False) + "i" * text.endswith("i")
    if name := found["imported"]:
        alias = found["alias"] or name
        if name in COMMON:
            return f"{_rule(alias)}: {_regex_terms(COMMON[name])}"
        return f"%import common.{name}\n{_rule(alias)}: {name}"
    return ""  # a comment


def _rule(terminal: str) -> str:
    """Returns the name of the rule that stands for a terminal."""
    return f"escaped_{terminal.lower()}"


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _regex_terms(term: str) -> str:
    """Returns the terms of a regular expression."""
    pattern, _, flags = term[1:].rpartition("/")
    pieces = list(_pieces(pattern, "s" in flags))
    if "x" in flags or ("i" in flags and any(is_special for _, is_special in pieces)):
        raise ValueError(f"{term:.40} cannot be enforced within JSON")
    if not any(is_special for _, is_special in pieces):
        return term
    text = " ".join(piece for piece, _ in pieces).replace(" \b", "")
    text = re.sub(r"(?<=[(|])(?=\s*[|)])|(?<=\|)(?=\s*$)|^(?=\s*\|)", ' "" ', text)
    return f"({text})"


def _pieces(pattern: str, dot_is_any: bool) -> Iterator[tuple[str, bool]]:
    """Yields the terms of a regular expression, each with True if it has escaped characters."""
    at = 0
    while at < len(pattern):
        found = _ATOM.match(pattern, at)
        if found is None:
            raise ValueError(f"{pattern[at : at + 9]} cannot be enforced within JSON")
        at = found.end()
        code = found["x"] or found["u"] or found["code"]
        if found["open"] or found["close"] or found["either"]:
            yield found[0][0], False
        elif found["times"]:
            lazy = len(found["times"]) > 1 and found["times"].endswith("?")
            yield "\b" + found["times"][: -1 if lazy else None], False
        elif found["kind"] or found["set"]:
            written = "(?s:.)" if found[0] == "." and dot_is_any else found[0]
            is_last = re.fullmatch(r"[*+]\)*", pattern[at:]) is not None
            yield _class(written, has_runs=is_last)
        else:
            character = chr(int(code, 16)) if code else found["mark"] or found["plain"]
            character = character or _CONTROLS[found["control"]]
            inner = _inner(character)
            yield json.dumps(inner, ensure_ascii=False), inner != character


def _class(written: str, *, has_runs: bool) -> tuple[str, bool]:
    """Returns the terms of a class of characters, and True if the class has escaped characters.

    has_runs: True for a class that is repeated at the end of a terminal: characters in a row are
    then one terminal.
    """
    if re.search("&&|--|~~", written):
        raise ValueError(f"{written:.40} cannot be enforced within JSON")
    held = re.compile(written)
    specials = [character for character in SPECIALS if held.fullmatch(character)]
    if not specials:
        return f"/{written}/", False
    choices = ["/" + "|".join(_inner(x).replace("\\", "\\\\") for x in specials) + "/"]
    if any(held.fullmatch(chr(code)) for code in range(0x20, 0x3000) if chr(code) not in SPECIALS):
        plain = PLAIN if written in (".", "(?s:.)") else f"[{written}&&{PLAIN}]"
        choices.append(f"/{plain}{'+' if has_runs else ''}/")
    return f"({' | '.join(choices)})", True
