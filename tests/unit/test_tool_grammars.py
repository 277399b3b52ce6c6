"""Grammars of calls allow what templates write, and nothing that the parsers could not read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import llguidance
import pytest
from vocabularies import byte_level, write

from dflash_gguf.config import Constraint
from dflash_gguf.constraints.compiler import ConstraintCompiler
from dflash_gguf.constraints.matcher import AnswerConstraint
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.text.reasoning import joined, merged
from dflash_gguf.text.tokenizer import Tokenizer
from dflash_gguf.text.tools.calls import calls_in
from dflash_gguf.text.tools.formats import FAMILIES, AnswerParser
from dflash_gguf.text.tools.grammar_writer import json_rule
from dflash_gguf.text.tools.grammars import FORMS, call_grammar, is_marked, opening_of
from dflash_gguf.text.tools.input_grammar import InputGrammar
from dflash_gguf.text.tools.offer import strict_names
from dflash_gguf.text.tools.parser import ToolFormat

READ: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"$ref": "#/$defs/Small"},
        "mode": {"enum": ["r", "w"]},
    },
    "required": ["path", "mode"],
    "additionalProperties": False,
    "$defs": {"Small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"read": READ, "list_files": NOTHING}
BEGUN = b"<|channel|>commentary to="
"""Beginning of a call of gpt-oss, which could write other messages for ever."""
CLOSERS = b'"}]</>\n'
VALUE_ENDS = {name: form.value_end for name, form in FORMS.items()} | {"gemma4": '<|"|>'}


def matcher(tools: ToolFormat, *, is_free: bool = False) -> Any:
    text = call_grammar(tools, is_free=is_free)
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not found.is_error(), found.get_error()
    return found


def walk(found: Any, generator: random.Random, value_end: str) -> str:
    """Returns a random text that the grammar allows, whose values end before long."""
    said, end = bytearray(), list(value_end.encode())
    if found.try_consume_tokens(list(BEGUN)) == len(BEGUN):
        said += BEGUN
    else:
        found.reset()
    for _ in range(4000):
        if found.is_accepting() and generator.random() < 0.5:
            break
        mask = found.compute_logit_bias()
        allowed = [byte for byte in range(256) if mask[byte]]
        allowed = [byte for byte in allowed if 9 < byte < 127] or allowed
        assert allowed or found.is_accepting(), bytes(said)
        if not allowed:
            break
        if len(said) % 40 > 10:
            allowed = [byte for byte in allowed if byte in CLOSERS] or allowed
            if end and found.validate_tokens(end) == len(end) and found.consume_tokens(end):
                said += bytes(end)
                continue
        said.append(generator.choice(allowed))
        assert found.consume_token(said[-1]), bytes(said)
    return said.decode()


def read(tools: ToolFormat, text: str) -> list[tuple[str, Any]]:
    parser = AnswerParser(None, tools)
    parts = merged(parser.push(text) + parser.finish())
    assert not joined(parts, "text").strip(), text
    return [(call.name, json.loads(call.arguments)) for call in calls_in(parts)]


@pytest.mark.parametrize("family", FORMS)
def test_calls_that_a_grammar_allows_are_read(family: str) -> None:
    generator = random.Random(family)
    for is_parallel in (True, False):
        tools = ToolFormat(family, TOOLS, is_parallel)
        for _ in range(4):
            text = walk(matcher(tools), generator, VALUE_ENDS[family])
            calls = read(tools, text)
            assert calls, text
            assert is_parallel or len(calls) == 1
            for name, arguments in calls:
                if name == "read":
                    assert arguments.keys() >= {"path", "mode"}
                    assert arguments["mode"] in ("r", "w")
                    assert isinstance(n := arguments.get("n", 0), int)
                    assert 0 <= n <= 9
                else:
                    assert (name, arguments) == ("list_files", {})


@pytest.mark.parametrize("family", FORMS)
def test_only_the_named_tools_may_be_called(family: str) -> None:
    generator = random.Random(family)
    tools = ToolFormat(family, TOOLS, allowed=("list_files",))
    for _ in range(4):
        text = walk(matcher(tools), generator, VALUE_ENDS[family])
        assert {name for name, _ in read(tools, text)} == {"list_files"}


@pytest.mark.parametrize("family", [name for name in FORMS if opening_of(ToolFormat(name, {}))])
def test_text_around_calls_is_free_and_calls_are_not(family: str) -> None:
    generator, tools = random.Random(family), ToolFormat(family, TOOLS, strict=("read",))
    for names in (("read",), ("read", "list_files")):
        call = walk(matcher(tools._replace(allowed=names)), generator, VALUE_ENDS[family])
        opening = opening_of(tools)
        assert call.startswith(opening)
        bad = call.replace("read", "rea").replace("list_files", "list")
        for text, is_allowed in (
            ("Well, 1 < 2 and [so on].\n", True),
            (f"I look.\n{call}", True),
            (f"{call}\nDone.\n{call}", True),
            (f"I look.\n{bad}", False),
            (f"{call}\n{opening}!", False),
        ):
            found = matcher(tools, is_free=True)
            tokens = list(text.encode())
            is_whole = found.try_consume_tokens(tokens) == len(tokens)
            assert (is_whole and found.is_accepting()) == is_allowed, text


def test_strict_tools_have_schemas_that_can_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in ((), ("f",)):
        grammar = call_grammar(ToolFormat("hermes", {"f": schema}, strict=strict))
        lark = llguidance.LLMatcher.grammar_from_lark(grammar)
        found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark)
        assert found.is_error() == bool(strict)
    offered = [{"function": {"name": "f", "strict": True}}, {"name": "g", "strict": True}]
    offered += [{"function": {"name": "h", "strict": None}}, {"name": "i"}]
    assert strict_names(offered) == ("f", "g")


LISTED = "<|tool_call_start|>[read(path='a\\n', mode='r'), list_files()]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("family", "marks", "text"),
    [
        ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>"), LISTED),
        ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>"), LISTED.replace("'", '"')),
        ("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]list_files[ARGS]{}"),
        (
            "gemma4",
            ("<|tool_call>", '<|"|>'),
            '<|tool_call>call:read{mode:<|"|>r<|"|>,path:<|"|>a<|b<|"|>}<tool_call|>',
        ),
    ],
)
def test_marks_may_be_control_tokens(
    family: str, marks: tuple[str, str], text: str, tmp_path: Path
) -> None:
    values = byte_level(add_bos_token=False, bos_token_id=None)
    values["tokenizer.ggml.tokens"][-2:] = marks
    tokenizer = Tokenizer.from_file(write(tmp_path / "a.gguf", values))
    assert tokenizer is not None
    grammar = tokenizer.call_grammar(ToolFormat(family, TOOLS))
    constraint = Constraint("grammar", grammar, True, "grammar")
    found = ConstraintCompiler(tokenizer, tokenizer.n_tokens).compile(constraint).matcher()
    tokens = tokenizer.tokenize(text, add_special=False)
    assert len(tokens) < len(text) - len(marks[0])
    assert found.try_consume_tokens(tokens) == len(tokens)
    assert found.is_accepting()
    # The text of a mark is no mark.
    found.reset()
    plain = tokenizer.tokenize(text, add_special=False, parse_special=False)
    assert found.try_consume_tokens(plain) == 0


def test_every_family_has_a_form() -> None:
    assert set(FORMS) == set(FAMILIES)
    unmarked = {name for name in FORMS if not is_marked(ToolFormat(name, {}))}
    assert unmarked == {"functools", "llama3"}


CHANNEL, MESSAGE, NEXT = "<|channel|>", "<|message|>", "<|end|><|start|>assistant"
CALL = f"{CHANNEL}commentary to=functions.list_files <|constrain|>json{MESSAGE}{{}}<|call|>"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm, <|end of it.\n{NEXT}"
TOLD = f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}"
FINAL = f"{CHANNEL}final{MESSAGE}Done."


@pytest.mark.parametrize(
    ("text", "required", "free", "by_schema"),
    [
        (CALL, True, True, True),
        (THOUGHT + CALL, True, True, True),
        (THOUGHT + THOUGHT + CALL, True, True, True),
        (THOUGHT + TOLD + THOUGHT + CALL, False, True, True),
        (THOUGHT + FINAL, False, True, False),
        (FINAL, False, True, False),
        (THOUGHT + FINAL.replace("Done.", '{"a": 1}'), False, True, True),
        (
            THOUGHT
            + FINAL.replace(f"final{MESSAGE}Done.", f"final <|constrain|>json{MESSAGE}{{}}"),
            False,
            False,
            True,
        ),
        (THOUGHT.removesuffix(NEXT), False, False, False),
        (THOUGHT + CALL.replace("list_files", "list"), False, False, False),
        (THOUGHT + CALL.replace("{}", '{ "a" :1}'), False, True, False),
        (THOUGHT.replace("Hm", f"Hm<|start|>assistant{FINAL}") + CALL, False, False, False),
        (CALL + THOUGHT + CALL, False, False, False),
    ],
)
def test_messages_of_gpt_oss(text: str, required: bool, free: bool, by_schema: bool) -> None:
    tools = ToolFormat("harmony", TOOLS)
    answer = json_rule({"type": "object"}, is_strict=True)
    grammars = (
        call_grammar(tools),
        call_grammar(tools, is_free=True),
        call_grammar(tools, answer=answer),
    )
    for grammar, is_allowed in zip(grammars, (required, free, by_schema), strict=True):
        lark = llguidance.LLMatcher.grammar_from_lark(grammar)
        found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark)
        tokens = list(text.encode())
        is_whole = found.try_consume_tokens(tokens) == len(tokens)
        assert (is_whole and found.is_accepting()) == is_allowed


def test_names_that_are_no_names_in_python_are_read() -> None:
    parameters = {"-n": {"type": "boolean"}, "in": {"type": "string"}, "b.c": {"type": "null"}}
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    tools = ToolFormat("lfm2", {"ns.read-file": schema, "class": NOTHING})
    generator = random.Random(3)
    for _ in range(8):
        for name, arguments in read(tools, walk(matcher(tools), generator, "")):
            assert name in tools.parameters
            assert list(arguments) == (list(parameters) if name == "ns.read-file" else [])


def test_control_tokens_end_messages_of_gpt_oss(tmp_path: Path) -> None:
    """llama.cpp makes texts of the other marks of gpt-oss."""
    values = byte_level(add_bos_token=False, bos_token_id=None)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens[-3:] = ["<|end|>", "<|call|>", "<|channel|>"]
    types[-1] = 4
    values["tokenizer.ggml.eos_token_id"] = tokens.index("<|call|>")
    tokenizer = Tokenizer.from_file(write(tmp_path / "a.gguf", values))
    assert tokenizer is not None
    grammar = tokenizer.call_grammar(ToolFormat("harmony", TOOLS))
    constraint = AnswerConstraint(
        ConstraintCompiler(tokenizer, tokenizer.n_tokens).compile(
            Constraint("grammar", grammar, True, "tools")
        )
    )
    call = tokens.index("<|call|>")
    said = tokenizer.tokenize(THOUGHT + CALL, add_special=False)
    assert said[-1] == call
    for n in range(len(said)):
        constraint.advance(said[:n])
        _, (mask,) = constraint.masks(Tree.of([-1]))
        allowed = {t for t in range(len(tokens)) if mask[t >> 5] >> (t & 31) & 1}
        assert said[n] in allowed
        assert (call in allowed) == (n == len(said) - 1)


PATCHES = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " name LF ("+" /(.*)/ LF)+
    | "*** Update File: " name LF ("@@" LF | ("+" | "-" | " ") /(.*)/ LF)+
name: /(.+)/
// Braces } and quotes " in a comment
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n}"\n*** End Patch'
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
HEAD = '{"input": "'
ESCAPED = json.dumps({"input": PATCH}, ensure_ascii=False)
CALLS_OF_PATCH = {
    "qwen": f"<tool_call>\n<function=patch>\n<parameter=input>\n{PATCH}\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": f"<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>{PATCH}</arg_value>\n"
    "</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "patch", "arguments": {ESCAPED}}}\n</tool_call>',
    "harmony": "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
    f"{ESCAPED}<|call|>",
    "llama3": f'{{"name": "patch", "parameters": {ESCAPED}}}',
    "lfm2": f"<|tool_call_start|>[patch(input={ESCAPED[len(HEAD) - 1 : -1]})]<|tool_call_end|>",
    "gemma4": f'<|tool_call>call:patch{{input:<|"|>{PATCH}<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("family", CALLS_OF_PATCH)
def test_the_input_of_a_custom_tool_is_bound_to_its_grammar(family: str) -> None:
    tools = ToolFormat(
        family, {"patch": INPUT, **TOOLS}, inputs={"patch": InputGrammar("lark", PATCHES)}
    )
    text = CALLS_OF_PATCH[family]
    assert read(tools, text) == [("patch", {"input": PATCH})]
    for said, is_allowed in ((text, True), (text.replace("+x", "x"), False)):
        for is_free in (False, True)[: 1 + is_marked(tools)]:
            found = matcher(tools, is_free=is_free)
            is_told = is_free and family != "harmony"
            tokens = list((f"I patch.\n{said}" if is_told else said).encode())
            is_whole = found.try_consume_tokens(tokens) == len(tokens)
            assert (is_whole and found.is_accepting()) == is_allowed
    other = list(text.replace("patch", "list_files", 1).encode())
    for is_free in (False, True)[: 1 + is_marked(tools)]:
        is_whole = matcher(tools, is_free=is_free).try_consume_tokens(other) == len(other)
        assert is_whole == is_free
    dates = tools._replace(inputs={"patch": InputGrammar("regex", r"[0-9]+/\d\d\/x")})
    for said, is_allowed in (("3/07/x", True), ("3/7/x", False)):
        patch = PATCH if PATCH in text else ESCAPED[len(HEAD) : -2]
        tokens = list(text.replace(patch, said).encode())
        assert (matcher(dates).try_consume_tokens(tokens) == len(tokens)) == is_allowed
