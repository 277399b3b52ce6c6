"""Fields of requests that other servers have: served, taken when off, refused, or named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dflash_gguf.config import Constraint, DecodeConfig
from dflash_gguf.serve.schemas import (
    BadRequestError,
    Body,
    ChatBody,
    CompletionBody,
    LlamaServerBody,
    config_of,
    read,
    tool_choice,
)

KINDS: tuple[type[Body], ...] = (ChatBody, CompletionBody, LlamaServerBody)
DEFAULTS = DecodeConfig(temperature=0.8)


def body_of(kind: type[Body], **fields: Any) -> tuple[Body, list[str]]:
    given = {"messages": []} if kind is ChatBody else {"prompt": "x"}
    return read(json.dumps(given | fields).encode(), kind)


def config(kind: type[Body], **fields: Any) -> DecodeConfig:
    return config_of(body_of(kind, **fields)[0], DEFAULTS, 512, None)


CHOICE = 'start: CHOICE\nCHOICE: "yes" | "no \\""'
CONSTRAINED: list[tuple[dict[str, Any], Constraint | str | None]] = [
    (fields, Constraint(kind, text, kind != "json_schema", field))
    for kind, text, field, forms in (
        (
            "json_schema",
            '{"type": "array"}',
            "json_schema",
            (
                {"json_schema": {"type": "array"}},
                {"json_schema": '{"type": "array"}'},
                {"guided_json": {"type": "array"}},
                {"guided_json": '{"type": "array"}'},
                {"structured_outputs": {"json": {"type": "array"}, "regex": None}},
            ),
        ),
        (
            "regex",
            "[a-z]+",
            "regex",
            (
                {"regex": "[a-z]+", "grammar": ""},
                {"guided_regex": "[a-z]+", "guided_json": None},
                {"structured_outputs": {"regex": "[a-z]+"}},
            ),
        ),
        (
            "grammar",
            "root ::= [a-z]",
            "grammar",
            (
                {"grammar": "root ::= [a-z]", "json_schema": None},
                {"guided_grammar": "root ::= [a-z]"},
                {"ebnf": "root ::= [a-z]", "regex": ""},
                {"grammar_string": "root ::= [a-z]"},
                {"structured_outputs": {"grammar": "root ::= [a-z]", "json_object": False}},
            ),
        ),
        (
            "grammar",
            CHOICE,
            "grammar",
            (
                {"guided_choice": ["yes", 'no "']},
                {"structured_outputs": {"choice": ["yes", 'no "']}},
            ),
        ),
        (
            "json_schema",
            '{"type": "object"}',
            "response_format",
            (
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"json_object": True}},
                {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"type": "object"}},
                    }
                },
            ),
        ),
    )
    for fields in forms
]
CONSTRAINED += [
    ({"response_format": {"type": "text"}, "guided_json": {}, "structured_outputs": None}, None),
    ({"response_format": {"type": "xml"}}, "type of response_format is 'xml', must be one of"),
    ({"json_schema": 5}, "json_schema"),
    ({"grammar": 5}, "grammar"),
    ({"guided_choice": "yes"}, 'guided_choice is "yes", must be a list of texts'),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice is [1], must be a list"),
    ({"structured_outputs": {"lua": "x"}}, "structured_outputs holds 'lua', must hold one of json"),
    ({"structured_outputs": [1]}, "structured_outputs is [1], must be an object"),
    ({"guided_json": {"a": 1}, "json_schema": {"b": 1}}, "guided_json and json_schema are given"),
    ({"regex": "a", "grammar": "root ::= x"}, "grammar and regex are given; leave out all but"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos is true, but regex decides"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fields", "expected"), CONSTRAINED, ids=lambda x: str(x)[:60])
def test_constraints_of_all_servers(
    kind: type[Body], fields: dict[str, Any], expected: Constraint | str | None
) -> None:
    if isinstance(expected, str):
        with pytest.raises((BadRequestError, ValueError), match=re.escape(expected)):
            config(kind, **fields)
        return
    found = config(kind, **fields)
    assert found.constraint == expected
    settings = {name: getattr(found, name) for name in DecodeConfig.__slots__}
    assert DecodeConfig(**settings).constraint == expected  # as it arrives in the engine process


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("structural_tag", {}, {"type": "structural_tag"}),
        ("format", "", "json"),
        ("functions", [], [{"name": "f"}]),
        ("bad_words", [], ["x"]),
        ("logits_processors", [], ["x"]),
        ("allowed_token_ids", None, [1]),
        ("min_tokens", 0, 9),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.5),
        ("skip_special_tokens", True, False),
        ("include_stop_str_in_output", False, True),
        ("mirostat", 0, 2),
        ("xtc_probability", 0.0, 0.5),
        ("dry_multiplier", 0, 0.8),
        ("typical_p", 1.0, 0.9),
        ("top_n_sigma", -1.0, 1.0),
        ("adaptive_target", -1.0, 0.5),
        ("do_sample", True, False),
        ("options", {}, {"num_ctx": 9}),
        ("system", "", "be brief"),
        ("thinking", None, {"type": "disabled"}),
        ("truncate_prompt_tokens", None, 9),
    ],
)
def test_a_field_that_is_not_served_is_taken_only_when_it_is_off(
    kind: type[Body], name: str, off: Any, on: Any
) -> None:
    assert body_of(kind, **{name: off})[1] == []
    with pytest.raises(ValueError, match=f"^{name}: .* is not supported, [a-z ]+") as caught:
        body_of(kind, **{name: on})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5, "repeat_last_n": 512}),
        ({"repetition_penalty": 1.0}, {"repeat_penalty": 1.0, "repeat_last_n": 64}),
        ({"repetition_penalty": 1.5, "repeat_last_n": 9}, {"repeat_last_n": 9}),
        ({"repetition_penalty": 1.5, "repeat_penalty": 1.5}, {"repeat_penalty": 1.5}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"stop_sequences": ["a"], "stop": None}, {"stop": ("a",)}),
        ({"stop_sequences": [], "stop": "b"}, {"stop": ("b",)}),
        ({"random_seed": 3}, {"seed": 3}),
        ({"stop_token_ids": [11, 12]}, {"stop_token_ids": (11, 12)}),
        ({"draft_type": "copy"}, {"draft_type": ("suffix",)}),
    ],
)
def test_fields_of_other_servers_are_served(
    kind: type[Body], given: dict[str, Any], ours: dict[str, Any]
) -> None:
    found = config(kind, **given)
    assert {name: getattr(found, name) for name in ours} == ours


def test_tools_are_for_chats() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for kind in KINDS[1:]:
        assert body_of(kind, tools=[], tool_choice="auto")[1] == []
        with pytest.raises(ValueError, match=r"^tools: .* in chats only, leave it out"):
            body_of(kind, tools=tools)


F, G = ({"type": "function", "function": {"name": name}} for name in "fg")


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, (None, False, False)),
        ("auto", (None, False, False)),
        ("none", ([], False, False)),
        ("required", (None, True, False)),
        (G, (["g"], True, True)),
        ({"type": "function", "name": "g"}, (["g"], True, True)),
        (allowed("auto", G), (["g"], False, False)),
        (allowed("required", G, F, G), (["g", "f"], True, False)),
        (allowed("auto"), ([], False, False)),
        ({"type": "allowed_tools", "mode": "required", "tools": [G]}, (["g"], True, False)),
    ],
)
def test_a_chat_chooses_which_tools_are_called(choice: Any, wanted: Any) -> None:
    body, ignored = body_of(
        ChatBody, tools=[F, G], tool_choice=choice, parallel_tool_calls=False, messages=[]
    )
    assert isinstance(body, ChatBody)
    assert ignored == []
    assert tool_choice(body) == wanted


@pytest.mark.parametrize(
    ("tools", "choice", "sentence"),
    [
        ([F], "some", "tool_choice is 'some', must be auto, none, required"),
        ([F], {"type": "function"}, "tool_choice is {.*}, must be auto"),
        ([F], G, "tool_choice names the function 'g', which is not in tools"),
        ([], "required", "tool_choice asks for a call, but tools is empty"),
        ([F], allowed("auto", G), "tool_choice names the function 'g', which is not in tools"),
        ([F], allowed("some", F), "allowed_tools is {.*}, must have mode, auto or required, and"),
        ([F], allowed("auto", "f"), "must have mode, auto or required, and tools, a list of func"),
        ([F], allowed("required"), "mode is required, but allowed_tools names no tool"),
        ([F], {"type": "allowed_tools", "allowed_tools": 1}, "tool_choice: allowed_tools is 1, m"),
    ],
)
def test_a_bad_choice_of_tools_is_refused(tools: Any, choice: Any, sentence: str) -> None:
    body, _ = body_of(ChatBody, tools=tools, tool_choice=choice, messages=[])
    assert isinstance(body, ChatBody)
    with pytest.raises(BadRequestError, match=sentence):
        tool_choice(body)


def test_synonyms_that_contradict_each_other_are_refused() -> None:
    for fields in ({"max_new_tokens": 5, "max_tokens": 6}, {"max_new_tokens": 5, "num_predict": 6}):
        with pytest.raises(ValueError, match=r"is \d and max_tokens is \d: leave one out"):
            body_of(ChatBody, **fields)


GREEDY = {"temperature": 0}
ALL_OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}


@pytest.mark.parametrize(
    ("fields", "samplers"),
    [
        ({}, "edskypmxt"),
        ({}, ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]),
        ({}, ["top_k", "top_p", "min_p", "temperature"]),
        ({"top_p": 1}, ["top_p", "top_k", "min_p", "temperature"]),
        (GREEDY, ["temperature", "top_k"]),
        (ALL_OFF, []),
    ],
)
def test_samplers_are_taken_if_the_active_ones_are_in_order(fields: Any, samplers: Any) -> None:
    assert config(ChatBody, samplers=samplers, **fields) == config(ChatBody, **fields)


@pytest.mark.parametrize(
    ("fields", "samplers"),
    [
        ({}, ["temperature"]),
        ({}, []),
        ({}, "tkpm"),
        ({"repeat_penalty": 1.1}, ["top_k", "top_p", "min_p", "temperature"]),
        (GREEDY, ["top_k"]),
        (ALL_OFF | {"top_k": 3}, []),
        (ALL_OFF, ["infill"]),
        (ALL_OFF, "i"),
    ],
)
def test_samplers_that_sample_otherwise_are_refused(fields: Any, samplers: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^samplers "):
        config(ChatBody, samplers=samplers, **fields)


def test_unknown_fields_are_named_if_their_names_fit_a_header() -> None:
    bad = {"a b": 1, "é": 1, "x\r\nSet-Cookie: y": 1, "n" * 41: 1, "": 1, "unset": None}
    assert body_of(ChatBody, **bad, user="me", **{"speculative.n_max": 3})[1] == [
        "user",
        "speculative.n_max",
    ]
    assert len(body_of(ChatBody, **{f"x{i}": i for i in range(20)})[1]) == 8


SURROGATE = "half of a surrogate pair"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (rb'{"prompt": "hi \ud83d"}', SURROGATE),
        (rb'{"prompt": "\ud83dx and more text"}', SURROGATE),
        (rb'{"prompt": "\ude00\ud83d"}', SURROGATE),
        (rb'{"\ud83d": 1}', SURROGATE),
        (b'{"prompt": "\xff"}', "byte 12 is 0xff, which is not UTF-8"),
        (b'{"prompt": "\xed\xa0\xbd"}', "which is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "which is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "byte 1 is NUL"),
        (b'{"prompt": "a\0b"}', "byte 13 is NUL"),
        (b'{"prompt": "a', "truncated"),
        (b'{"temperature": NaN}', "invalid character"),
        (b'{"prompt": ' + b"[" * 100_000, "nests too deeply"),
    ],
)
def test_bodies_that_are_no_json_are_refused_by_their_reason(data: bytes, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence) as caught:
        read(data, LlamaServerBody)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_escapes_are_taken() -> None:
    assert read(b'\xef\xbb\xbf{"prompt": "a"}', LlamaServerBody)[0].prompt == "a"
    assert read(rb'{"prompt": "\ud83d\ude00\u0000"}', LlamaServerBody)[0].prompt == "\U0001f600\0"
