"""Calls that an answer must make: the same with and without drafts, by a real small model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import dflash_gguf
from dflash_gguf import AsyncDecoder, Decoder, bundled
from dflash_gguf.text.tools.grammars import FORMS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "set_mode",
            "parameters": {
                "type": "object",
                "properties": {"mode": {"enum": ["on", "off"]}, "n": {"type": "boolean"}},
                "required": ["mode", "n"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}},
    },
]
MARKS = {
    "hermes": "<tool_call>",
    "llama3": "<|start_header_id|>ipython",
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral_list": "[TOOL_CALLS]",
    "qwen": "<function=<parameter=",
    "glm": "<arg_key><arg_value>",
    "gemma4": "<|tool_call><tool_call|>",
    "kimi": "<|tool_calls_section_begin|>",
    "lfm2": "List of tools: <|im_start|>",
}


def template(family: str) -> str:
    marks = MARKS.get(family, "<|channel|><|message|>")
    return "{{ tools | tojson }}# {{ messages[-1].content }}\ndef {#" + marks + "#}"


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    pair = bundled.find("python-tiny")
    with dflash_gguf.load(pair.target, drafter=pair.drafter, n_ctx=1024, n_threads=1) as found:
        yield found


@pytest.mark.parametrize("family", MARKS)
def test_required_calls_are_the_same_with_and_without_drafts(family: str, decoder: Decoder) -> None:
    assert family in FORMS
    tokens = set()
    for draft in ("none", "chain", "tree", "auto"):
        settings: dict[str, Any] = {"draft": draft, "temperature": 1.5, "seed": 3}
        result = decoder.chat(
            "Go",
            template=template(family),
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=120,
            **settings,
        )
        tokens.add(result.tokens)
        assert result.text == ""
        (call,) = result.tool_calls
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if name == "set_mode":
            assert arguments.keys() == {"mode", "n"}
            assert arguments["mode"] in ("on", "off")
        else:
            assert (name, arguments) == ("stop", {})
    assert len(tokens) == 1


@pytest.mark.parametrize("tool_choice", ["required", "auto"])
def test_calls_of_gpt_oss_are_bound_and_its_reasoning_is_not(
    tool_choice: str, decoder: Decoder
) -> None:
    strict = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    calls, n_cut = [], 0
    for seed in range(5):
        results = [
            decoder.chat(
                "Go",
                template=template("harmony"),
                tools=strict,
                tool_choice=tool_choice,
                max_tokens=80,
                temperature=3.0,
                seed=seed,
                draft=draft,
            )
            for draft in ("none", "tree", "auto")
        ]
        assert len({result.tokens for result in results}) == 1
        calls += results[0].tool_calls
        n_cut += results[0].stop_reason == "length"
        assert tool_choice == "auto" or results[0].text == ""
    assert calls or tool_choice == "auto"
    assert n_cut
    for call in calls:
        assert call["function"]["name"] in ("set_mode", "stop")
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() == ({"mode", "n"} if arguments else set())


def test_a_named_tool_is_called_once(decoder: Decoder) -> None:
    for name in ("set_mode", "stop"):
        settings: dict[str, Any] = {"template": template("hermes"), "tools": TOOLS}
        result = decoder.chat("Go", tool_choice=name, max_tokens=120, **settings)
        assert [call["function"]["name"] for call in result.tool_calls] == [name]
        same = asyncio.run(
            AsyncDecoder(decoder).chat("Go", tool_choice=name, max_tokens=120, **settings)
        )
        assert same.tokens == result.tokens


@pytest.mark.parametrize("family", ["hermes", "qwen", "mistral"])
def test_an_answer_by_a_schema_may_be_a_call_instead(family: str, decoder: Decoder) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    kinds = set()
    for seed in range(6):
        settings: dict[str, Any] = {"temperature": 4.0, "seed": seed, "max_tokens": 120}
        results = [
            decoder.chat(
                "Go",
                template=template(family),
                tools=TOOLS,
                json_schema=schema,
                draft=draft,
                parallel_tool_calls=False,
                **settings,
            )
            for draft in ("none", "auto")
        ]
        assert results[0].tokens == results[1].tokens
        kinds.add(bool(results[0].tool_calls))
        if not results[0].tool_calls:
            assert json.loads(results[0].text).keys() == {"ok"}
    assert kinds == {True, False}


def test_a_choice_that_cannot_be_met_is_one_sentence(decoder: Decoder) -> None:
    with pytest.raises(
        ValueError, match=r"tool_choice is 'go', must be .*auto, none, required, se"
    ):
        decoder.chat("Go", template=template("hermes"), tools=TOOLS, tool_choice="go")
    with pytest.raises(ValueError, match="tool_choice is 'required', but tools is empty"):
        decoder.chat("Go", template=template("hermes"), tool_choice="required")
    with pytest.raises(ValueError, match="ignore_eos is true, but calls of tools decide"):
        settings: dict[str, Any] = {"template": template("hermes"), "tools": TOOLS}
        decoder.chat("Go", tool_choice="required", ignore_eos=True, **settings)
    with pytest.raises(ValueError, match="tool_choice asks for a call, but regex leaves no room"):
        decoder.chat("Go", tool_choice="required", regex="a", **settings)


@pytest.mark.parametrize("family", ["hermes", "qwen", "harmony"])
def test_a_schema_that_does_not_compile_names_its_tool(decoder: Decoder, family: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = {"name": "bad", "strict": True, "parameters": parameters}
    settings: dict[str, Any] = {"template": template(family)}
    strict = [*TOOLS, {"type": "function", "function": bad}]
    keyword = r'keywords that cannot be enforced: \["uniqueItems"\]; leave them out'
    with pytest.raises(ValueError, match=f'^tool "bad": {keyword}'):
        decoder.chat("Go", tools=strict, **settings)
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": parameters}}
    with pytest.raises(ValueError, match=f"^the schema of the answer: {keyword}"):
        decoder.chat("Go", tools=TOOLS, response_format=form, **settings)


def test_no_call_is_made_if_none_may_be(decoder: Decoder) -> None:
    prompts = [
        decoder.chat_turn("Go", None, {}, template=template("hermes"), tools=TOOLS, tool_choice=x)[
            0
        ]
        for x in ("auto", "none")
    ]
    assert prompts[0] == prompts[1]
    assert decoder.generate(prompts[1], max_tokens=20).tool_calls == ()
