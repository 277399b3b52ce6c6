"""Tool calls are read from answers of every family of chat templates, for every cut of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_gguf.text.reasoning import Format, OutputPart, joined, merged
from dflash_gguf.text.tools.calls import call_id, calls_in, with_known_ids
from dflash_gguf.text.tools.formats import FAMILIES, AnswerParser, family_of, special_texts
from dflash_gguf.text.tools.offer import described, tools_of
from dflash_gguf.text.tools.parser import ToolFormat
from dflash_gguf.text.tools.values import json_of

READ: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "ok": {"type": "boolean"},
        "edits": {"type": "array"},
        "limit": {"type": ["integer", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"$ref": "#/$defs/Mode"},
        "any": {},
    },
    "$defs": {"Mode": {"enum": ["r", "w"]}},
}
TOOLS = {"read": READ, "list_files": {"type": "object", "properties": {}}}
THINK = Format("think", True)
Calls = list[tuple[str, str]]


def parse(
    family: str,
    pieces: Sequence[str],
    reasoning: Format | None = None,
    *,
    is_parallel: bool = True,
    allowed: tuple[str, ...] | None = None,
) -> list[OutputPart]:
    parser = AnswerParser(reasoning, ToolFormat(family, TOOLS, is_parallel, allowed=allowed))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text for part in parts)
    return merged(parts)


def cuts(text: str, n: int = 12) -> list[list[str]]:
    generator = random.Random(len(text))
    ways = [list(text)]
    for _ in range(n):
        at = sorted(generator.choices(range(len(text) + 1), k=generator.choice((1, 4, 20))))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


# Cases: family, generated text, text of the answer, calls with their arguments.
CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>',
        "I look.",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"path": "{\\"}"}, "id": 3, "name": "read"}</tool_call>\nDone. ',
        "Done. ",
        [("read", '{"path": "{\\"}"}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"type": "function", "function": {"name": "read", "arguments": "{\\"n\\": 1}"'
        "}}\n</tool_call>",
        "",
        [("read", '{"n": 1}')],
    ),
    ("hermes", '<tool_call>\n{"name": "read"}\n</tool_call>', "", [("read", "{}")]),
    ("hermes", "2 < 3, and <tool_ is no mark.\n", "2 < 3, and <tool_ is no mark.\n", []),
    (
        "qwen",
        'So:\n\n<tool_call>\n<function=read>\n<parameter=path>\na "b".py\n\n</parameter>\n'
        "<parameter=n>\n3\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n<parameter=edits>\n"
        '[{"old": "x"}]\n</parameter>\n</function>\n</tool_call>',
        "So:",
        [("read", '{"path": "a \\"b\\".py\\n", "n": 3, "ok": true, "edits": [{"old": "x"}]}')],
    ),
    (
        "qwen",
        "<function=read>\n<parameter=path>\n<parameter=x>\ny\n</parameter> z\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=list_files>\n</function>\n</tool_call>",
        "",
        [("read", '{"path": "<parameter=x>\\ny\\n</parameter> z"}'), ("list_files", "{}")],
    ),
    (
        "qwen",
        "<tool_call>\n<function=read>\n<parameter=limit>\nnull\n</parameter>\n<parameter=note>\n12\n"
        "</parameter>\n<parameter=mode>\nr\n</parameter>\n<parameter=any>\n[1]\n</parameter>\n"
        "<parameter=new>\nfree text\n</parameter>\n</function>\n</tool_call>",
        "",
        [("read", '{"limit": null, "note": "12", "mode": "r", "any": [1], "new": "free text"}')],
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=read>\n<parameter=path>a.py</parameter>\n<parameter=edits>"
        "[{'old': None}]</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("read", '{"path": "a.py", "edits": [{"old": null}]}')],
    ),
    (
        "glm",
        "Ok\n<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a.py\n</arg_value>\n<arg_key>n"
        "</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>list_files</tool_call>",
        "Ok",
        [("read", '{"path": "a.py\\n", "n": 3}'), ("list_files", "{}")],
    ),
    (
        "minimax",
        '\n<minimax:tool_call>\n<invoke name="read">\n<parameter name="path">a.py</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="list_files">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("read", '{"path": "a.py", "n": 3}'), ("list_files", "{}")],
    ),
    (
        "llama3",
        '{"name": "read", "parameters": {"path": "a.py"}}; {"name": "list_files"}',
        "",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "read", "parameters": {"path": "a.py"}}',
        "",
        [("read", '{"path": "a.py"}')],
    ),
    ("llama3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    ("llama3", ' {"a": [1, 2]} is JSON.', ' {"a": [1, 2]} is JSON.', []),
    (
        "generic",
        '```json\n{"name": "read", "arguments": {"path": "a.py"}}\n```\n',
        "",
        [("read", '{"path": "a.py"}')],
    ),
    (
        "generic",
        'Yes.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>',
        "Yes.",
        [("read", '{"path": "a.py"}')],
    ),
    ("generic", "```python\nx = 1\n```", "```python\nx = 1\n```", []),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.read <|constrain|>json<|message|>{"path": "a.py"}<|call|>',
        "I look.",
        [("read", '{"path": "a.py"}')],
    ),
    (
        "harmony",
        ' to=functions.read<|channel|>commentary json<|message|>{"path": "a.py"}',
        "",
        [("read", '{"path": "a.py"}')],
    ),
    (
        "gemma4",
        'Ok.<|tool_call>call:read{edits:[{<|"|>old<|"|>:<|"|>a "b"\n<|"|>},1.5,null,[]],n:3,ok:'
        'true,path:<|"|>a.py<|"|>}<tool_call|><|tool_call>call:list_files{}<tool_call|>',
        "Ok.",
        [
            (
                "read",
                '{"edits": [{"old": "a \\"b\\"\\n"}, 1.5, null, []], "n": 3, "ok": true, '
                '"path": "a.py"}',
            ),
            ("list_files", "{}"),
        ],
    ),
    (
        "mistral",
        '[TOOL_CALLS]read[ARGS]{"path": "a.py"}[TOOL_CALLS]list_files[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "mistral",
        'Ok. [TOOL_CALLS] [{"name": "read", "arguments": {"path": "a.py"}, "id": "abcdefghi"}, '
        '{"name": "list_files", "arguments": {}, "id": "abcdefghj"}]',
        "Ok.",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{"path": "a.py"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>list_files\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "kimi",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0"
        '<|tool_call_argument_begin|>{"path": "a.py"}<|tool_call_end|><|tool_call_begin|>'
        "functions.list_files:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Ok.",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[read(path=\"a.py\", n=3, any={'x': None}), list_files()]"
        "<|tool_call_end|>Looking.",
        "Looking.",
        [("read", '{"path": "a.py", "n": 3, "any": {"x": null}}'), ("list_files", "{}")],
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "read", "parameters": {"path": '
        '"a.py"}}\n]<|END_ACTION|>',
        "",
        [("read", '{"path": "a.py"}')],
    ),
    (
        "functionary",
        '<function=read>{"path": "a.py"}</function><function=list_files>{}</function>',
        "",
        [("read", '{"path": "a.py"}'), ("list_files", "{}")],
    ),
]
# The same, malformed or cut off: nothing is lost, and what has a name is a call.
MALFORMED: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        "a\n<tool_call>\nread(a.py)\n</tool_call>",
        "a\n<tool_call>\nread(a.py)\n</tool_call>",
        [],
    ),
    ("hermes", '<tool_call>\n{"name": "re', '<tool_call>\n{"name": "re', []),
    (
        "hermes",
        '<tool_call>\n{"name": "read", "arguments": {"path": a.py}}\n</tool_call>',
        "",
        [("read", '{"path": a.py}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "read", path: "a.py"}\n</tool_call>Next',
        "Next",
        [("read", 'path: "a.py"}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}}\n</tool_call>',
        "",
        [("read", '{"path": "a.py"}')],
    ),
    ("hermes", '<tool_call>\n{"name": "read", "arguments": {"pa', "", [("read", '{"pa')]),
    (
        "hermes",
        '<tool_call>\n{"name": "read" <tool_call>\n{"name": "list_files"}\n</tool_call>',
        "",
        [("read", ""), ("list_files", "{}")],
    ),
    ("qwen", "<tool_call>\nread a.py", "<tool_call>\nread a.py", []),
    ("qwen", "<tool_call>\n<function=read", "<tool_call>\n<function=read", []),
    (
        "qwen",
        "<tool_call>\n<function=read>\n<parameter=path>\na.py",
        "",
        [("read", '{"path": "a.py')],
    ),
    (
        "qwen",
        "<tool_call>\n<function=read>\n<parameter=n>\n3\n</parameter>\nand so on\n</tool_call>",
        "",
        [("read", '{"n": 3\n</parameter>\nand so on\n</tool_call>')],
    ),
    (
        "qwen",
        "<tool_call>\n<function=read>\n<parameter=n>\nthree\n</parameter>\n</tool_call>",
        "",
        [("read", '{"n": "three"}')],
    ),
    ("gemma4", "<|tool_call>read{}<tool_call|>", "<|tool_call>read{}<tool_call|>", []),
    (
        "gemma4",
        '<|tool_call>call:read{path:<|"|>a.py<tool_call|>',
        "",
        [("read", '{"path": "a.py<tool_call|>')],
    ),
    ("gemma4", "<|tool_call>call:read{path:a.py}<tool_call|>", "", [("read", '{"path": "a.py"}')]),
    ("gemma4", "<|tool_call>call:read{a:1 b}<tool_call|>.", ".", [("read", '{"a": "1 b"}')]),
    ("mistral", "[TOOL_CALLS]read[ARGS]a.py", "", [("read", "a.py")]),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("kimi", "<|tool_call_begin|>functions.re", "<|tool_call_begin|>functions.re", []),
    ("lfm2", "<|tool_call_start|>[read(1)]<|tool_call_end|>", None, []),
    ("harmony", " to=functions.read<|message|>a.py", "", [("read", "a.py")]),
]  # type: ignore[list-item]


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES + MALFORMED)
def test_calls_of_each_family(family: str, text: str, shown: str | None, calls: Calls) -> None:
    parts = parse(family, [text])
    assert calls_in(parts) == calls
    assert joined(parts, "text") == (text if shown is None else shown)
    for pieces in cuts(text):
        assert parse(family, pieces) == parts, pieces


def damaged(text: str, generator: random.Random) -> str:
    """Returns a text with a few slices removed, moved or doubled."""
    for _ in range(generator.choice((1, 1, 2, 4))):
        a, b = sorted(generator.choices(range(len(text) + 1), k=2))
        b, at = min(b, a + 30), generator.randrange(len(text) + 1)
        text = text[:a] + generator.choice(("", text[a:b] * 2, text[at : at + 9])) + text[b:]
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_do_not_depend_on_how_any_text_is_cut(family: str) -> None:
    generator = random.Random(family)
    texts = [text for name, text, _, _ in CASES if name == family] or [CASES[0][1]]
    for _ in range(60):
        text = damaged(generator.choice(texts), generator)
        for reasoning in (None, THINK):
            for is_parallel, allowed in ((True, None), (False, None), (True, ("list_files",))):
                settings: dict[str, Any] = {"is_parallel": is_parallel, "allowed": allowed}
                whole = parse(family, [text], reasoning, **settings)
                numbers = [part.call for part in whole if part.kind == "call"]
                assert numbers == list(range(len(numbers)))
                assert is_parallel or len(numbers) < 2
                for pieces in cuts(text, 3):
                    found = parse(family, pieces, reasoning, **settings)
                    assert found == whole, (text, pieces)


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES)
def test_without_parallel_calls_the_answer_ends_after_the_first(
    family: str,
    text: str,
    shown: str,  # noqa: ARG001
    calls: Calls,
) -> None:
    parser = AnswerParser(None, ToolFormat(family, TOOLS, is_parallel=False))
    parts: list[OutputPart] = []
    for character in text:
        parts += parser.push(character)
        if parser.is_done:
            break
    assert calls_in(merged(parts + parser.finish())) == calls[:1]
    if len(calls) > 1:
        assert parser.is_done


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES)
def test_a_call_that_may_not_be_made_is_text(
    family: str,
    text: str,
    shown: str,  # noqa: ARG001
    calls: Calls,
) -> None:
    parts = parse(family, [text], allowed=("list_files",))
    found = calls_in(parts)
    assert all(call in calls and call[0] == "list_files" for call in found)
    is_told = ("read" in joined(parts, "text")) == any(name == "read" for name, _ in calls)
    assert is_told or family == "harmony"
    for pieces in cuts(text, 3):
        assert parse(family, pieces, allowed=("list_files",)) == parts
        none = parse(family, pieces, allowed=())
        assert joined(none, "text") == text or family == "harmony"
        assert calls_in(none) == []


def test_a_call_ends_reasoning_whose_closing_mark_is_missing() -> None:
    first = {family: (text, calls) for family, text, _, calls in reversed(CASES) if calls}
    listed = '[{"name": "read", "arguments": {}}]'
    first |= {
        "mistral_list": (f"[TOOL_CALLS]{listed}", [("read", "{}")]),
        "generic": first["hermes"],
        "nemotron": (f"<TOOLCALL>{listed}</TOOLCALL>", [("read", "{}")]),
    }
    assert {name for name, one in FAMILIES.items() if one.interrupts} <= first.keys()
    for family, (text, calls) in first.items():
        if not FAMILIES[family].interrupts:
            continue
        for pieces in cuts(f"Hm, <tool_call> or not?\n{text}", 4):
            parts = parse(family, pieces, THINK)
            assert calls_in(parts) == calls
            assert joined(parts, "reasoning").startswith("Hm, <tool_call> or not?")


def test_reasoning_of_gpt_oss_stays_in_the_text_if_asked_for() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A"
    assert parse("harmony", [text]) == [OutputPart("Hm.A")]
    split = parse("harmony", [text], Format("harmony"))
    assert split == [OutputPart("Hm.", "reasoning"), OutputPart("A")]


@pytest.mark.parametrize(
    ("text", "types", "json_text"),
    [
        ("3", {"integer"}, "3"),
        ("3", {"number"}, "3"),
        ("3", {"string", "integer"}, "3"),
        ("3", {"string", "null"}, '"3"'),
        ("null", {"string", "null"}, "null"),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        ('"a"', set(), '"a"'),
        ("'a'", set(), "\"'a'\""),
        ("1_0", set(), '"1_0"'),
        ("NaN", set(), '"NaN"'),
        ("None", set(), "null"),
        ("{'a': [True]}", {"object"}, '{"a": [true]}'),
        ("{1, 2}", set(), '"{1, 2}"'),
        (" [1 ]\n", {"array"}, "[1 ]"),
        ("a: 1", {"object"}, '"a: 1"'),
    ],
)
def test_raw_values_become_json_of_the_types(text: str, types: set[str], json_text: str) -> None:
    assert json_of(text, frozenset(types)) == json_text
    json.loads(json_text)


def test_json_that_is_no_call_is_not_held_back() -> None:
    for family in ("llama3", "generic"):
        parser = AnswerParser(None, ToolFormat(family, TOOLS))
        assert parser.push('{"items": [') == [OutputPart('{"items": [')]


def test_deep_arguments_end_no_process() -> None:
    deep = "[" * 100_000
    for family, text in (
        ("gemma4", f"<|tool_call>call:read{{any:{deep}"),
        ("hermes", f'<tool_call>\n{{"name": "read", "arguments": {deep}'),
        ("qwen", f"<function=read>\n<parameter=any>\n{deep}\n</parameter>\n</function>"),
        ("lfm2", f"<|tool_call_start|>[read(any={deep})]<|tool_call_end|>"),
    ):
        assert "".join(part.text for part in parse(family, [text])).count("[") >= 100_000
    for deep in ("-" * 100_000 + "1", "1+" * 100_000 + "1", "a" + ".b" * 100_000, "not " * 50_000):
        text = f"<|tool_call_start|>[read(any={deep})]<|tool_call_end|>"
        assert joined(parse("lfm2", [text]), "text") == text


def test_a_long_argument_comes_while_it_is_written() -> None:
    for family, start in (
        ("hermes", '<tool_call>\n{"name": "read", "arguments": {"path": "'),
        ("qwen", "<tool_call>\n<function=read>\n<parameter=path>\n"),
        ("gemma4", '<|tool_call>call:read{path:<|"|>'),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "'),
    ):
        parser = AnswerParser(None, ToolFormat(family, TOOLS))
        parser.push(start)
        assert parser.push("word ") == [OutputPart("word ", "arguments")], family


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("read", "tools is 'read', must be a list"),
        ([3], r"tools\[0\] is 3, must be an object"),
        ([{"type": "web_search"}], r"tools\[0\] has type 'web_search', only type function"),
        ([{"type": "function"}], r"tools\[0\] must have a function with a name"),
        ([{"function": {"name": "a", "parameters": []}}], "parameters must be a JSON schema"),
        ([{"function": {"name": "a"}}] * 2, "tools holds two functions named 'a'"),
    ],
)
def test_bad_tools_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tools_of(given)


def test_tools_of_every_form_are_alike() -> None:
    function = {"name": "read", "parameters": READ, "strict": True}
    (one,) = tools_of([{"function": function, "type": "function"}])
    assert tools_of([{"type": "function", **function}]) == [one]
    assert tools_of([one]) == [one]
    assert list(one["function"]) == ["name", "description", "parameters"]


def test_a_template_without_tools_gets_them_as_text() -> None:
    tools = tools_of([{"function": {"name": "read", "parameters": READ}}])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "read", "arguments": {"n": 1}}}],
        },
        {"role": "tool", "content": "text"},
    ]
    shown = described(messages, tools, "generic")
    assert [one["role"] for one in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"].startswith("Be brief.\n\nYou can call")
    assert json.dumps(READ) in shown[0]["content"]
    assert calls_in(parse("generic", [shown[2]["content"]])) == [("read", '{"n": 1}')]
    assert "text" in shown[3]["content"]
    assert [one["role"] for one in described(messages[1:2], tools, "generic")] == ["system", "user"]


def test_families_and_their_marks() -> None:
    assert family_of("{{ '<tool_call>' }}") == "hermes"
    assert family_of("{{ '<tool_call><function=x><parameter=y>' }}") == "qwen"
    assert family_of("{{ messages }}") == "generic"
    assert '<|"|>' in special_texts(None, ToolFormat("gemma4", {}))
    assert special_texts(THINK, None) == {"<think>", "</think>"}
    assert special_texts(None, None) == frozenset()


def test_ids_have_the_form_of_the_family() -> None:
    unique = "0123456789abcdef01234567"
    assert call_id(None, "f", 0, unique) == f"call_{unique}"
    assert call_id(ToolFormat("mistral", {}), "f", 0, unique) == "012345678"
    assert call_id(ToolFormat("kimi", {}, n_earlier=3), "f", 1, unique) == "functions.f:4"


def test_ids_of_other_servers_become_those_of_the_family() -> None:
    ids = ("toolu_1", "call_2", "abcdefghi")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    for id_ in ids:
        call = {"id": id_, "function": {"name": "f", "arguments": {}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": "x", "tool_call_id": id_})
    for family in ("kimi", "mistral"):
        shown = with_known_ids(messages, family)
        calls = [one["tool_calls"][0]["id"] for one in shown if "tool_calls" in one]
        assert [one["tool_call_id"] for one in shown if "tool_call_id" in one] == calls
        if family == "kimi":
            assert calls == ["functions.f:0", "functions.f:1", "functions.f:2"]
        else:
            assert [len(one) for one in calls] == [9, 9, 9]
            assert (calls[2], len(set(calls))) == ("abcdefghi", 3)
    assert messages[1]["tool_calls"][0]["id"] == "toolu_1"
