"""Grammars of texts within JSON allow the same texts, as JSON escapes them."""

from __future__ import annotations

import json

import llguidance
import pytest

from dflash_gguf.text.tools.escaped_grammar import escaped_lark
from dflash_gguf.text.tools.input_grammar import InputGrammar


def allows(grammar: str, text: str) -> bool:
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0)
    assert not found.is_error(), found.get_error()
    tokens = list(text.encode())
    return bool(found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting())


CASES: list[tuple[str, list[str], list[str]]] = [
    (r'start: /[a-z"\n]+\/\\d\d"*/', ['a"\n/\\d1"', "b/\\d2"], ["/\\d1", "b/d2"]),
    (r"start: /(?:\s|\w)+./", ['a b\n"', "ax", "\t\x0b\\"], ["", 'a"b']),
    (r"start: /(?:\s|\w)+./s", ["a\n\n"], [""]),
    (r"start: /[^a]{2}/", ['"\\', "bc", "é\n"], ['a"', '"""']),
    (r"start: /(.*)x/", ["axx", 'x"x'], ["xa", 'x"']),
    (r'start: /(|")a??/', ["", '"a', "a"], ['""']),
    (r"start: /[\x22]\u005c\n/", ['"\\\n'], ["'\\\n"]),
    (r"start: /[a-c]+/i", ["aBC"], ["d"]),
    ('start: "\\"a\\n" ("b" | /c/)~2 // "x', ['"a\nbc'], ['"a\nb', '"a\n']),
    ("start: LINE+\nLINE: /.*/ LF\n%import common.LF", ['a"b\n\\n\n'], ["a"]),
    (
        "start: N WS W\n%import common.INT -> N\n%import common.WS\n%import common.WORD -> W",
        ["1 \n\ta"],
        ["a"],
    ),
    ("start: S\n%import common.ESCAPED_STRING -> S", ['"a\\"b\n"'], ['"a\\"', "a"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_texts_of_an_escaped_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    within = f'start: "\\"" inner "\\""\ninner: %lark {{\n{escaped_lark(grammar)}\n}}'
    for texts, is_allowed in ((good, True), (bad, False)):
        for text in texts:
            assert allows(grammar, text) == is_allowed, text
            assert allows(within, json.dumps(text, ensure_ascii=False)) == is_allowed, text


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ("start: <tool>", "<"),
        ("start: A & B\nA: /a/\nB: /b/", "&"),
        ("start: A\nA: ~/a/", "~"),
        ('start: %json {"type": "object"}', "%json"),
        ("start: /a/\n%ignore /x/", "%ignore"),
        ('start[suffix="a"]: /.*/', r"\["),
        (r"start: /a(?=b)/", r"\(\?=b"),
        (r"start: /a\b/", r"\\b"),
        (r"start: /^a/", r"\^a"),
        (r"start: /[a&&[b]]\n/", r"\[a&&"),
        (r"start: /\p{L}+/", r"\\p"),
        (r'start: /a"/i', 'a"'),
        ('start: "a\\n"i', "a"),
    ],
)
def test_what_cannot_be_escaped_is_named(grammar: str, part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}.* cannot be enforced within JSON"):
        escaped_lark(grammar)


def test_a_regular_expression_is_a_grammar() -> None:
    term = InputGrammar("regex", r"a\/b/[0-9]").term(is_escaped=False)
    assert allows(f"start: {term}", "a/b/1")
