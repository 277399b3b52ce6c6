"""Tool calls in chats: a scripted model behind the real server, with and without drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from echo_server import SAY
from serving import Served, echoing

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calls {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "list_files")
]
FIRST, SECOND = '{"path": "é \\"a\\".py"}', "{}"
ANSWER = (
    f'I look.\n<tool_call>\n{{"name": "read", "arguments": {FIRST}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "list_files", "arguments": {SECOND}}}\n</tool_call>'
)
WANTED = [("read", FIRST), ("list_files", SECOND)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = echoing(tmp_path_factory.mktemp("echo"))
    yield found
    found.close()


def body(answer: str = ANSWER, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"{SAY}{answer}{SAY}"}
    return {"messages": [message], "tools": TOOLS, **fields}


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in calls]


def read(events: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Returns text, calls and finish_reason of a stream's chunks."""
    text, calls, reason = "", [], ""
    for event in events:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert (call["index"], call["type"]) == (len(calls), "function")
                    calls.append(call)
                else:
                    known = calls[call["index"]]["function"]
                    known["arguments"] += call["function"]["arguments"]
    return text, calls, reason


@pytest.mark.parametrize("draft", ["none", "chain", "tree", "auto"])
def test_calls_are_the_same_streamed_or_not_with_and_without_drafts(
    served: Served, draft: str
) -> None:
    found = served.answer(CHAT, **body(draft=draft))
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "I look."
    assert calls_of(choice["message"]) == WANTED
    assert choice["finish_reason"] == "tool_calls"
    events = served.events(CHAT, **body(draft=draft, stream_options={"include_usage": True}))
    text, calls, reason = read(events)
    assert (text, calls_of({"tool_calls": calls}), reason) == ("I look.", WANTED, "tool_calls")
    assert events[-1]["usage"]["completion_tokens"] == found["usage"]["completion_tokens"]
    ids = [call["id"] for call in choice["message"]["tool_calls"] + calls]
    assert len(set(ids)) == 4
    assert (found["timings"].get("draft_n_accepted", 0) > 0) == (draft != "none")


def test_an_answer_that_is_only_a_call_has_no_content(served: Served) -> None:
    answer = ANSWER[ANSWER.index("<") : ANSWER.index("</tool_call>")] + "</tool_call>\n"
    message = served.answer(CHAT, **body(answer))["choices"][0]["message"]
    assert (message["content"], calls_of(message)) == (None, WANTED[:1])


def test_without_parallel_calls_the_answer_ends_after_one(served: Served) -> None:
    for draft in ("none", "chain"):
        (choice,) = served.answer(CHAT, **body(parallel_tool_calls=False, draft=draft))["choices"]
        assert calls_of(choice["message"]) == WANTED[:1]
        assert choice["finish_reason"] == "tool_calls"


def test_calls_are_text_if_none_may_be_made(served: Served) -> None:
    n_prompt = served.answer(CHAT, **body())["usage"]["prompt_tokens"]
    for draft in ("none", "tree"):
        for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
            found = served.answer(CHAT, **body(**fields, draft=draft))
            (choice,) = found["choices"]
            assert choice["message"] == {"role": "assistant", "content": ANSWER}
            assert choice["finish_reason"] == "stop"
            is_shown = found["usage"]["prompt_tokens"] == n_prompt
            assert is_shown == ("tool_choice" in fields)
        events = served.events(CHAT, **body(tool_choice="none", draft=draft))
        assert read(events) == (ANSWER, [], "stop")


def test_calls_of_tools_that_are_not_allowed_are_text(served: Served) -> None:
    def choice(name: str) -> dict[str, Any]:
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    for draft in ("none", "tree"):
        found = served.answer(CHAT, **body(tool_choice=choice("read"), draft=draft))
        message = found["choices"][0]["message"]
        assert calls_of(message) == WANTED[:1]
        text = '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'
        assert message["content"] == f"I look.{text}"
    assert served.post(CHAT, body(tool_choice=choice("gone"))).status_code == 400


def test_a_call_that_the_limit_cuts_has_the_reason_length(served: Served) -> None:
    n = len(ANSWER.partition('"path"')[0])
    (choice,) = served.answer(CHAT, **body(max_tokens=n))["choices"]
    ((name, arguments),) = calls_of(choice["message"])
    assert (name, choice["finish_reason"]) == ("read", "length")
    assert WANTED[0][1].startswith(arguments)


def test_a_malformed_call_goes_to_the_client(served: Served) -> None:
    broken = ANSWER.replace('"path": ', "path = ")
    found = calls_of(served.answer(CHAT, **body(broken))["choices"][0]["message"])
    assert found == [("read", FIRST.replace('"path": ', "path = ")), WANTED[1]]
    nameless = "<tool_call>\nread(a)\n</tool_call>"
    (choice,) = served.answer(CHAT, **body(nameless))["choices"]
    assert choice["message"] == {"role": "assistant", "content": nameless}


def test_stop_texts_are_looked_for_in_the_text_alone(served: Served) -> None:
    found = served.answer(CHAT, **body(stop=["path", "list_files"]))["choices"][0]
    assert calls_of(found["message"]) == WANTED
    found = served.answer(CHAT, **body(stop=["ook", "path"]))["choices"][0]
    assert found["message"] == {"role": "assistant", "content": "I l"}
    assert found["finish_reason"] == "stop"


def test_the_conversation_goes_on_with_the_results(served: Served) -> None:
    first = body()
    message = served.answer(CHAT, **first)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"}
        for place, call in enumerate(message["tool_calls"])
    ]
    again = {"role": "user", "content": f"{SAY}Done.{SAY}"}
    messages = [*first["messages"], message, *results, again]
    (choice,) = served.answer(CHAT, messages=messages, tools=TOOLS)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Done."}
    prompt = served.answer("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert f"I look.{ids[0]}=read:{FIRST}{ids[1]}=list_files:{{}}[tool]result 0[tool]" in prompt
    assert '"name": "read"' in prompt


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": "read"}, "tools: expected array"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has type 'web_search', only type function"),
        ({"tool_choice": "some"}, "tool_choice is 'some', must be auto, none, required"),
        ({"tool_choice": "required", "tools": []}, "tools is empty"),
        ({"functions": [{"name": "read"}]}, "functions"),
    ],
)
def test_bad_tools_get_one_sentence(served: Served, fields: dict[str, Any], sentence: str) -> None:
    found = served.post(CHAT, body(**fields))
    assert found.status_code == 400
    assert sentence in found.json()["error"]["message"]


def test_the_openai_package_reads_calls(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    fields: Any = body() | {"model": "any"}
    whole = client.chat.completions.create(**fields).choices[0]
    assert [(x.function.name, x.function.arguments) for x in whole.message.tool_calls] == WANTED
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
    last = stream.get_final_completion().choices[0]
    assert [(x.function.name, x.function.arguments) for x in last.message.tool_calls] == WANTED
    assert json.loads(last.message.tool_calls[0].function.arguments) == {"path": 'é "a".py'}
    assert last.finish_reason == "tool_calls"


MODES = {
    "name": "set_mode",
    "parameters": {
        "type": "object",
        "properties": {"mode": {"enum": ["on", "off"]}},
        "required": ["mode"],
        "additionalProperties": False,
    },
}
REQUIRED: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Go"}],
            "tools": [{"type": "function", "function": MODES}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Go"}],
            "tools": [{"type": "function", "function": MODES}, *TOOLS],
            "tool_choice": {"type": "function", "function": {"name": "set_mode"}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Go",
            "tools": [{"type": "function", **MODES}, {"type": "function", "name": "other"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "set_mode"}],
            },
            "parallel_tool_calls": False,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "Go"}],
            "tools": [{"name": "set_mode", "input_schema": MODES["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Go",
            "tools": [{"type": "function", **MODES}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
]


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """A server with a small model, whose template has a call in Qwen3's form."""
    template = "{{ tools | tojson }}# {{ messages[-1].content }}\ndef {# <tool_call> #}"
    found = Served("-m", "python-tiny", "-t", "1", "-c", "1024", "--chat-template", template)
    yield found
    found.close()


@pytest.mark.parametrize(("path", "fields"), REQUIRED)
def test_a_required_call_is_made_on_every_route(
    real: Served, path: str, fields: dict[str, Any]
) -> None:
    found = set()
    for draft in ("none", "tree", "auto"):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = real.answer(path, **fields, draft=draft, seed=7, **{limit: 100})
        if path == CHAT:
            ((name, arguments),) = calls_of(answer["choices"][0]["message"])
        elif path == "/v1/messages":
            (block,) = answer["content"]
            name, arguments = block["name"], json.dumps(block["input"])
        else:
            (item,) = answer["output"]
            name, arguments = item["name"], item["arguments"]
        found.add((name, arguments))
    ((name, arguments),) = found
    assert name == "set_mode"
    assert json.loads(arguments) in ({"mode": "on"}, {"mode": "off"})


def test_the_input_of_a_custom_tool_is_of_its_grammar(real: Served) -> None:
    lines = 'start: ("on" | "off") LF /"[a-c"]"/\n%import common.LF'
    tool = {
        "type": "custom",
        "name": "set",
        "format": {"type": "grammar", "syntax": "lark", "definition": lines},
    }
    fields = {"input": "Go", "tools": [tool], "parallel_tool_calls": False, "temperature": 1.5}
    found = set()
    for draft in ("none", "tree", "auto"):
        asked = {**fields, "draft": draft, "seed": 7, "max_output_tokens": 100}
        (item,) = real.answer("/v1/responses", **asked, tool_choice="required")["output"]
        assert (item["type"], item["name"]) == ("custom_tool_call", "set")
        events = real.events("/v1/responses", **asked, tool_choice="required")
        assert "".join(event.get("delta", "") for event in events) == item["input"]
        free = real.answer("/v1/responses", **asked)["output"]
        found.add((item["input"], json.dumps([x.get("content", x.get("input")) for x in free])))
    ((said, _),) = found
    assert re.fullmatch(r'(on|off)\n"[a-c"]"', said)
    bad = {**tool, "format": {**tool["format"], "definition": "start: ("}}
    response = real.post("/v1/responses", {**fields, "tools": [bad], "tool_choice": "required"})
    assert response.status_code == 400
    assert 'tool "set": ' in response.json()["error"]["message"]
