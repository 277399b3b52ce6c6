"""Each family's parser reads the calls that the family's own chat templates write."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from templates import templates

from dflash_gguf.text.chat import conversation, render, with_reasoning_names
from dflash_gguf.text.reasoning import OutputPart, format_of, joined, merged
from dflash_gguf.text.stream import n_common
from dflash_gguf.text.tools.calls import calls_in, message_call
from dflash_gguf.text.tools.formats import AnswerParser
from dflash_gguf.text.tools.offer import shows_tools, tool_format, tools_of

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "A path"},
        "n": {"type": "integer", "description": "A number"},
        "ok": {"type": "boolean", "description": "A switch"},
        "edits": {"type": "array", "items": {"type": "object"}, "description": "Edits"},
    },
    "required": ["path"],
}
TOOLS = tools_of(
    [
        {"function": {"name": name, "description": "A function", "parameters": PARAMETERS}}
        for name in ("read", "write_file")
    ]
)
USER = [{"role": "user", "content": "Hello"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "read",
        {
            "path": 'a "b"\n</parameter>é',
            "n": 3,
            "ok": True,
            "edits": [{"old": "x {", "new": ""}],
        },
    ),
    ("write_file", {"path": "12"}),
    ("read", {"path": ""}),
]
# Families by template; in those of the second table a message has one call only.
MANY = {
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "MiMo-VL": "hermes",
    "Reka-Edge": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "Qwen3-Coder": "qwen",
    "Qwen3.5-4B": "qwen",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen",
    "StepFun3.5-Flash": "qwen",
    "ByteDance-Seed-OSS": "seed",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_list",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "inclusionai-ling-3.0-flash": "glm",
    "poolside-Laguna-XS.2": "glm",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "moonshotai-Kimi-K2": "kimi",
    "MiniMax-M2": "minimax",
    "MiniMax-M1": "tool_calls",
    "Apriel-1.6-15b-Thinker-fixed": "tool_calls",
    "LFM2.5-8B-A1B": "lfm2",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
    "meetkai-functionary-medium-v3.1": "functionary",
}
ONE = {
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "openai-gpt-oss-120b": "harmony",
    "GigaChat3.1-10B-A1.8B": "gigachat",
}
WITHOUT_TOOLS = ("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
HIDE_CALLS = ("NVIDIA-Nemotron-Nano-v2",)
"""Templates that show no calls beside a text."""


def answer_of(template: str, message: dict[str, Any]) -> tuple[str, str]:
    """Returns the prompt for an answer, and the answer as the template writes it."""
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    prompt = render(template, conversation(USER), special_tokens=specials, tools=TOOLS)
    messages = conversation([*USER, message])
    settings: dict[str, Any] = {"special_tokens": specials, "tools": TOOLS}
    whole = render(template, messages, add_generation_prompt=False, **settings)
    n = n_common(prompt, whole)
    while whole[n - 1] not in ">]\n" and n < len(prompt):  # not within a mark
        n -= 1
    return whole[:n], whole[n:]


@pytest.mark.parametrize(("name", "family"), (MANY | ONE).items())
def test_calls_are_read_as_they_were_written(name: str, family: str) -> None:
    template = templates()[name]
    tools = tool_format(template, TOOLS, USER, is_parallel=True)
    assert tools.family == family
    assert shows_tools(template) == (name not in WITHOUT_TOOLS)
    wanted = CALLS if name in MANY else CALLS[:1]
    calls = [
        message_call(called, json.dumps(arguments), f"abcdefgh{n}")
        for n, (called, arguments) in enumerate(wanted)
    ]
    for content in ("",) if name in HIDE_CALLS else ("", "I look."):
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        prompt, text = answer_of(template, message)
        reasoning = format_of(template, prompt)
        parts = parsed(AnswerParser(reasoning, tools), [text])
        assert [(x.name, json.loads(x.arguments)) for x in calls_in(parts)] == wanted
        assert parsed(AnswerParser(reasoning, tools), list(text)) == parts
        said = joined(parts, "text")
        assert not [mark for mark in ("tool_call", "function", "TOOL") if mark in said]


PIECES = [*"ab \n\t\"\\'{}[]:,é€<>=/|&", "\n\n", "</p", "{{", "\\n", "<|", "null", "12", "True"]
UNESCAPED = ("LFM2.5-8B-A1B",)
"""Templates that put texts between quotes as they are."""


def random_text(generator: random.Random) -> str:
    return "".join(generator.choices(PIECES, k=generator.randrange(9)))


def random_value(generator: random.Random, depth: int = 0) -> Any:
    match generator.randrange(6 if depth < 2 else 4):
        case 0:
            return random_text(generator)
        case 1:
            return generator.randrange(-9, 99)
        case 2:
            return generator.choice((True, False, 1.5))
        case 3:
            return {}
        case 4:
            return [random_value(generator, depth + 1) for _ in range(generator.randrange(3))]
        case _:
            return {name: random_value(generator, depth + 1) for name in generator.choices("ab")}


@pytest.mark.parametrize("name", sorted((MANY | ONE).keys() - set(UNESCAPED)))
def test_any_arguments_are_read_as_they_were_written(name: str) -> None:
    generator, template = random.Random(name), templates()[name]
    tools = tool_format(template, TOOLS, USER, is_parallel=True)
    for _ in range(8):
        edits = [random_value(generator) for _ in range(generator.randrange(3))]
        given = {"path": random_text(generator), "n": generator.randrange(99)}
        given |= {"ok": generator.choice((True, False)), "edits": edits}
        given = {key: given[key] for key in generator.sample(list(given), 3)}
        calls = [message_call("read", json.dumps(given), "abcdefgh0")]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        prompt, text = answer_of(template, message)
        parts = parsed(AnswerParser(format_of(template, prompt), tools), [text])
        assert [json.loads(x.arguments) for x in calls_in(parts)] == [given], text


def parsed(parser: AnswerParser, pieces: list[str]) -> list[OutputPart]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged(parts + parser.finish())


@pytest.mark.parametrize("content", ["", "I call."])
@pytest.mark.parametrize(
    "name",
    ["openai-gpt-oss-120b", "upstage-Solar-Open-100B", "LFM2.5-8B-A1B"],
)
def test_reasoning_before_a_call_is_shown_under_any_name(name: str, content: str) -> None:
    call = message_call("read", '{"path": "a"}', "call_1")
    turn = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "Because",
        "tool_calls": [call],
    }
    given = conversation([*USER, turn, {"role": "tool", "content": "x", "tool_call_id": "call_1"}])
    template = templates()[name]
    text = render(
        template,
        with_reasoning_names(given, template),
        special_tokens={"bos_token": "", "eos_token": ""},
        tools=TOOLS,
    )
    assert ("Because" in text) == (not content or "gpt-oss" not in name)
