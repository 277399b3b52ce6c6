"""Answers that conversations get back as the model wrote them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.serve.answer_memory import AnswerMemory
from dflash_gguf.serve.completion_choice import CompletionChoice
from dflash_gguf.serve.messages import AskedPrompt
from dflash_gguf.text.chat import conversation, render
from dflash_gguf.text.reasoning import OutputPart
from dflash_gguf.text.tools.parser import ToolFormat

WRITTEN = '{"path":"a.py",  "line": 1.0, "sub": {"b": 1, "a": [2]}}'
READ = OutputPart("read", "call")
TOOLS = ToolFormat("hermes", {"read": {}})
PRINTED = (
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)


def answer(*parts: OutputPart, tools: ToolFormat = TOOLS) -> CompletionChoice:
    return CompletionChoice(0, AskedPrompt([1], tools=tools), DecodeConfig(), parts=[*parts])


def called(id_: str, arguments: object, name: str = "read", **more: Any) -> dict[str, Any]:
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def prompt(memory: AnswerMemory, *messages: Any, scope: str = "a", asked: str = "Go") -> str:
    """Returns the line of the last message in a prompt."""
    given = conversation([{"role": "user", "content": asked}, *messages])
    text = render(PRINTED, memory.restored(scope, given), special_tokens={})
    return text.splitlines()[-1]


@pytest.fixture
def known() -> tuple[AnswerMemory, str]:
    """Returns a memory with one answer, and the id of its call."""
    memory, choice = (
        AnswerMemory(),
        answer(OutputPart("I look.", "reasoning"), READ, OutputPart(WRITTEN, "arguments")),
    )
    memory.add("a", "Go", choice)
    return memory, choice.tool_calls[0]["id"]


@pytest.mark.parametrize(
    "arguments",
    [
        WRITTEN,
        json.dumps(json.loads(WRITTEN), separators=(",", ":"), sort_keys=True),
        {"all": False, "sub": {"a": [2], "b": 1}, "line": 1, "path": "a.py"},
    ],
)
def test_a_rewritten_call_is_printed_as_it_was_written(
    known: tuple[AnswerMemory, str], arguments: object
) -> None:
    memory, id_ = known
    assert prompt(memory, called(id_, arguments)) == f"I look.||{WRITTEN}"
    sent = called(id_, arguments, reasoning_content="Mine")
    assert prompt(memory, sent) == f"Mine||{WRITTEN}"


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"arguments": WRITTEN.replace("a.py", "b.py")}, {}),
        ({"arguments": "{}"}, {}),
        ({"arguments": "oops"}, {}),
        ({"name": "write"}, {}),
        ({"id_": "other"}, {}),
        ({}, {"scope": "b"}),
        ({}, {"asked": "Stop"}),
    ],
)
def test_another_call_stays(
    known: tuple[AnswerMemory, str], change: dict[str, Any], setting: dict[str, str]
) -> None:
    memory, id_ = known
    sent = called(**{"id_": id_, "arguments": WRITTEN} | change)
    assert prompt(memory, sent, **setting) == prompt(AnswerMemory(), sent, **setting)


def test_reasoning_comes_back_with_the_text_of_its_turn() -> None:
    memory = AnswerMemory()
    memory.add("a", "Go", answer(OutputPart("Why", "reasoning"), OutputPart("\n\nYes. ")))
    said = {"role": "assistant", "content": "Yes."}
    assert prompt(memory, said) == "Why|Yes.|"
    assert prompt(memory, said, asked="Well?") == "|Yes.|"
    assert prompt(memory, said, {"role": "user", "content": "Well?"}, said) == "|Yes.|"


def test_an_answer_without_reasoning_gets_none() -> None:
    memory, choice = AnswerMemory(), answer(READ, OutputPart(WRITTEN, "arguments"))
    memory.add("a", "Go", choice)
    sent = conversation([{"role": "user", "content": "Go"}, called(choice.tool_calls[0]["id"], {})])
    assert "reasoning_content" not in memory.restored("a", sent)[1]
    sent = conversation([sent[0], called(choice.tool_calls[0]["id"], WRITTEN)])
    assert "reasoning_content" not in memory.restored("a", sent)[1]


def test_calls_without_a_json_object_stay_as_they_are() -> None:
    memory, choice = AnswerMemory(), answer(READ, OutputPart('{"path": oops', "arguments"))
    memory.add("a", "Go", choice)
    id_ = choice.tool_calls[0]["id"]
    for sent in ('{"path": oops', {}):
        assert prompt(memory, called(id_, sent)) == prompt(AnswerMemory(), called(id_, sent))


def test_ids_that_recur_belong_to_the_latest_answer_of_their_turn() -> None:
    memory, tools = AnswerMemory(), ToolFormat("kimi", {"read": {}})
    for text in ('{"a":  1}', '{"a":   1}'):
        choice = answer(READ, OutputPart(text, "arguments"), tools=tools)
        memory.add("a", "Go", choice)
    assert prompt(memory, called("functions.read:0", {"a": 1})) == '||{"a":   1}'


def test_the_oldest_answers_go_first_and_a_scope_can_be_forgotten() -> None:
    memory, ids = AnswerMemory(limit=100_000), []
    for n in range(100):
        choice = answer(READ, OutputPart('{"a":  ' + "1" * 1000 + "}", "arguments"))
        memory.add("ab"[n % 2], "Go", choice)
        ids.append(choice.tool_calls[0]["id"])

    def n_known() -> int:
        arguments = {"a": int("1" * 1000)}
        found = (
            prompt(memory, called(one, arguments), scope="ab"[n % 2]) for n, one in enumerate(ids)
        )
        return sum("  " in one for one in found)

    assert n_known() == 100_000 // 2526
    assert "  " in prompt(memory, called(ids[-1], {"a": int("1" * 1000)}), scope="b")
    memory.forget("a")
    assert n_known() == 100_000 // 2526 // 2 + 1
    memory.forget("b")
    assert n_known() == 0


def test_long_user_turns_and_answers_take_no_memory() -> None:
    memory = AnswerMemory()
    tracemalloc.start()
    for number in range(200):
        text = f"{number}" + "x" * 100_000
        memory.add("a", text, answer(OutputPart("Why", "reasoning"), OutputPart(text, "text")))
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes < 1 << 20
    last = {"role": "assistant", "content": text}
    assert prompt(memory, last, asked=text).startswith("Why|")
