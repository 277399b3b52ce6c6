"""OpenAI's Responses: translation to chat requests, and answers as items."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from blocks import answer, block_parts, call, streamed
from hypothesis import given
from hypothesis import strategies as st

from dflash_gguf.serve.completion_choice import CompletionChoice
from dflash_gguf.serve.responses_format import ResponsesFormat
from dflash_gguf.serve.responses_request import ResponsesBody, chat_from_responses
from dflash_gguf.serve.responses_tools import CustomInput, input_of
from dflash_gguf.serve.schemas import BadRequestError, ChatBody, read, tool_choice
from dflash_gguf.serve.serializers import ResponseContext
from dflash_gguf.serve.wire_format import encode
from dflash_gguf.text.reasoning import OutputPart
from dflash_gguf.text.tools.input_grammar import input_grammars

USER = {"role": "user", "content": "hi"}


def body(*items: Any, **fields: Any) -> ResponsesBody:
    return read(json.dumps({"input": items or "hi", **fields}).encode(), ResponsesBody)[0]


def chat(*items: Any, **fields: Any) -> ChatBody:
    return chat_from_responses(body(*items, **fields))


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_a_text_is_a_message_of_the_user() -> None:
    assert chat().messages == [USER]
    assert chat({"type": "message", **USER, "id": "msg_1"}).messages == [USER]
    assert chat({"role": "user", "content": [part("a"), part("b")]}).messages == [
        {"role": "user", "content": "a\nb"}
    ]


def test_instructions_and_developer_messages_become_one_system_message() -> None:
    first = {"role": "developer", "content": [part("be"), part("brief")]}
    second = {"role": "system", "content": "and kind"}
    found = chat(first, second, USER, first, instructions="You code.")
    assert found.messages == [
        {"role": "system", "content": "You code.\n\nbe\nbrief\n\nand kind"},
        USER,
        {"role": "system", "content": "be\nbrief"},
    ]


def test_items_of_an_answer_become_one_turn() -> None:
    thoughts = {"type": "reasoning", "summary": [], "encrypted_content": None}
    items = [
        USER,
        {**thoughts, "content": [part("Sum.", "reasoning_text")]},
        {"role": "assistant", "content": [part("I add.", "output_text")]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": '+"x"\n'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [part("ok")]},
        {**thoughts, "summary": [part("Done.", "summary_text")]},
        thoughts,
        {"type": "function_call", "call_id": "c3", "name": "end", "arguments": "{}"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (
            ("c1", "add", '{"a": 1}'),
            ("c2", "patch", '{"input":"+\\"x\\"\\n"}'),
            ("c3", "end", "{}"),
        )
    ]
    assert chat(*items).messages == [
        USER,
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Sum.",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Done.",
            "tool_calls": calls[2:],
        },
    ]


def test_items_of_unknown_types_are_left_out_and_named() -> None:
    unknown = [{"type": "web_search_call", "id": "x"}, {"type": "item_reference"}]
    assert chat(*unknown, USER).messages == [USER]
    assert body(*unknown, USER).left_out == ["input.item_reference", "input.web_search_call"]


def test_settings_reach_the_chat_request_and_fields_of_the_service_are_ignored() -> None:
    fields = {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "auto"}
    ids = {"prompt_cache_key": "k", "client_metadata": {"turn_id": "1"}, "service_tier": "auto"}
    data = {"input": "hi", "max_output_tokens": 7, "reasoning": {"effort": "low"}, "top_p": 0.5}
    found, unknown = read(json.dumps(data | fields | ids).encode(), ResponsesBody)
    assert unknown == []
    asked = chat_from_responses(found)
    assert (asked.max_tokens, asked.reasoning_effort, asked.top_p) == (7, "low", 0.5)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ({"role": "tool", "content": "x"}, r"input\[0\]: role is 'tool', must be user, assistant"),
        ({"role": "user"}, r"input\[0\]: content must be a text or a list of parts"),
        ({"role": "user", "content": ["x"]}, "content must be a text or a list of parts"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "image input is not supported"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "'input_file' is not supported"),
        ({"type": "function_call", "name": "f"}, "a function_call must have a name and arguments"),
        ({"type": "function_call", "arguments": ""}, "must have a name and arguments, as texts"),
        ({"type": "custom_tool_call", "name": "f"}, "must have a name and input, as texts"),
        ({"type": "function_call_output"}, r"input\[0\]: output must be a text or a list"),
    ],
)
def test_malformed_items_are_refused_by_a_sentence(item: Any, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        chat(item)


@pytest.mark.parametrize(
    "fields",
    [{"previous_response_id": "resp_1"}, {"conversation": "c"}, {"prompt": {}}],
    ids=str,
)
def test_what_the_server_would_have_to_keep_is_refused(fields: Any) -> None:
    with pytest.raises(BadRequestError, match=f"{next(iter(fields))} is not supported, as the ser"):
        chat(**fields)
    with pytest.raises(BadRequestError, match="background is not supported"):
        chat(background=True)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": GRAMMAR}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{**ADD, "name": "spawn"}, ADD]}
SEARCH = {"type": "web_search", "external_web_access": True}
TOOLS = [ADD, PATCH, AGENTS, SEARCH]


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "required", "tools": list(tools)}


def test_tools_become_functions_with_names_of_their_own() -> None:
    found = {one["function"]["name"]: one["function"] for one in chat(tools=TOOLS).tools or ()}
    assert list(found) == ["add", "patch", "spawn", "agents__add"]
    assert body(tools=TOOLS).left_out == ["tools.web_search"]


def test_a_custom_tool_is_shown_as_a_function_of_one_text() -> None:
    (tool,) = chat(tools=[PATCH]).tools or ()
    assert tool["function"]["description"] == "Patches."
    schema = tool["function"]["parameters"]
    assert schema["required"] == ["input"]
    assert schema["properties"]["input"]["type"] == "string"
    assert 'start: "x"' in schema["properties"]["input"]["description"]
    assert input_grammars([tool]) == {"patch": ("lark", 'start: "x"')}
    assert (
        input_grammars(chat(tools=[ADD, {**PATCH, "format": {"type": "text"}}]).tools or ()) == {}
    )


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", "required"),
        ({"type": "function", "name": "spawn"}, "spawn"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "add", "namespace": "agents"}, "agents__add"),
        (allowed({"type": "custom", "name": "patch"}, {"type": "web_search"}), ["patch"]),
        (
            allowed({"type": "function", "name": "spawn", "namespace": "agents"}, ADD),
            ["spawn", "add"],
        ),
    ],
    ids=str,
)
def test_the_choice_of_a_tool(choice: Any, wanted: str | list[str]) -> None:
    found = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert found.parallel_tool_calls is False
    if isinstance(wanted, list):
        assert tool_choice(found) == (wanted, True, False)
    else:
        assert found.tool_choice in (wanted, {"type": "function", "function": {"name": wanted}})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must have a name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, r"tools\[0\]: tools must be a list"),
        ({"tools": [{**AGENTS, "tools": [{}]}]}, r"tools\[0\].tools\[0\] must have a name"),
        (
            {"tool_choice": {"type": "web_search"}},
            "tool_choice must be auto, requ",
        ),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar"}}]},
            "of 'patch' is a grammar, which mu",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "or with type allowed_tools and a list of"),
        ({"tool_choice": allowed("add")}, "tool_choice must be auto, requ"),
    ],
)
def test_malformed_tools_are_refused_by_a_sentence(fields: Any, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        chat(**fields)


@pytest.mark.parametrize(
    ("function", "arguments", "item"),
    [
        ("spawn", "{}", {"type": "function_call", "name": "spawn", "namespace": "agents"}),
        ("agents__add", "{}", {"type": "function_call", "name": "add", "namespace": "agents"}),
        ("add", "{}", {"type": "function_call", "name": "add"}),
        ("unknown", "{}", {"type": "function_call", "name": "unknown"}),
        ("patch", '{"input": "+\\"x\\"\\n"}', {"type": "custom_tool_call", "input": '+"x"\n'}),
        ("patch", '{"input": "+x', {"type": "custom_tool_call", "input": "+x"}),
        ("patch", '{"a": "b", "input": "+x"}', {"type": "custom_tool_call", "input": "+x"}),
        ("patch", '{"input": "\\x\\ud83d"}', {"type": "custom_tool_call", "input": "\\x\\ud83d"}),
        ("patch", '{"patch": "x"}', {"type": "custom_tool_call", "input": '{"patch": "x"}'}),
    ],
)
def test_calls_come_back_as_the_client_gave_the_tool(
    function: str, arguments: str, item: dict[str, Any]
) -> None:
    parts = call(0, function, [arguments[:4], arguments[4:]])
    (found,) = whole_of(answer(parts), tools=TOOLS)["output"]
    assert {name: found.get(name) for name in item} == item
    assert ("namespace" in found) == ("namespace" in item)
    again = {**found, "type": item["type"]}
    (message,) = chat(again, tools=TOOLS).messages
    assert message["tool_calls"][0]["function"]["name"] == function
    events = streamed(format_of(tools=TOOLS), answer(parts), 1)
    text = found["input"] if "input" in found else found["arguments"]
    assert "".join(event.get("delta", "") for event in events) == text
    kinds = {event["type"] for event in events if event["type"].endswith((".delta", "s.done"))}
    assert {kind.split(".")[1] for kind in kinds} == {
        "custom_tool_call_input" if "input" in found else "function_call_arguments"
    }
    assert events[-2]["item"]["call_id"] == events[2]["item"]["call_id"]


@given(text=st.text(), is_ascii=st.booleans(), pieces=st.integers(1, 9))
def test_the_input_of_a_custom_tool_comes_while_it_is_written(
    text: str, is_ascii: bool, pieces: int
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    size = -(-len(arguments) // pieces)
    cut = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    reader = CustomInput()
    assert "".join(map(reader.push, cut)) == text
    assert reader.finish() == ""
    for n in range(len(arguments)):
        reader = CustomInput()
        said = reader.push(arguments[:n])
        assert text.startswith(said)
        assert said + reader.finish() == input_of(arguments[:n])
    events = streamed(format_of(tools=TOOLS), answer(call(0, "patch", cut)), 1)
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
    assert kinds[0] == "output_item.added"
    assert kinds[-2:] == ["custom_tool_call_input.done", "output_item.done"]
    assert events[-3]["input"] == events[-2]["item"]["input"] == text


def test_the_input_of_a_custom_tool_is_not_held_back() -> None:
    parts = call(0, "patch", ['{"input": "', "+a\\n", "+b", '"}'])
    events = streamed(format_of(tools=TOOLS), answer(parts), 1)
    assert [event["delta"] for event in events if "delta" in event] == ["+a\n", "+b"]


def format_of(**fields: Any) -> ResponsesFormat:
    return ResponsesFormat(ResponseContext("m", None), body(**fields))


def whole_of(choice: CompletionChoice, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(format_of(**fields).whole([choice])))
    return found


def assembled(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last response of a stream; checks that its events come in order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
            is_open = True
        assert is_open
        assert event["output_index"] == len(items) - 1
        if "item" not in event:
            assert event["item_id"] == items[-1]["id"]
            assert event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            texts[-1] += event["delta"]
        elif kind == "output_item.done":
            item, is_open = event["item"], False
            assert item["id"] == items[-1]["id"]
            assert item["type"] == items[-1]["type"]
            said = item.get("arguments") or item["content"][0]["text"]
            assert texts[-1] == said or (texts[-1], said) == ("", "{}")
            items[-1] = item
    assert not is_open
    response: dict[str, Any] = events[-1]["response"]
    assert response["output"] == items
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {response["id"]}
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return response | {"id": "", "created_at": 0, "output": items}


@given(parts=block_parts(), pieces=st.integers(1, 5))
def test_a_stream_has_the_items_of_the_whole_response(parts: list[OutputPart], pieces: int) -> None:
    choice = answer(parts)
    found = assembled(streamed(format_of(), choice, pieces))
    whole = whole_of(choice)
    whole.pop("output_text")
    assert without_ids(found) | {"usage": 0} == without_ids(whole) | {"usage": 0}
    assert len({item["id"] for item in [*found["output"], *whole["output"]]}) == 2 * len(
        found["output"]
    )


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    parts = [OutputPart("x"), *call(0, "add", ['{"a'])]
    *_, last = streamed(format_of(max_output_tokens=2), answer(parts, "length"), 1)
    response = last["response"]
    assert last["type"] == "response.incomplete"
    assert (response["status"], response["max_output_tokens"]) == ("incomplete", 2)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"a'


def test_usage_counts_cached_tokens_and_tokens_of_reasoning() -> None:
    choice = answer([OutputPart("hm", "reasoning"), OutputPart("x")])
    *_, last = streamed(format_of(), choice, 1)
    assert last["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 9,
    }


def test_signs_of_life_and_failures_are_events() -> None:
    response_format = format_of()
    list(response_format.start([answer([])]))
    events = response_format.keep_alive() + response_format.failure(500, "the engine ended")
    alive, failed = (
        json.loads(event.split("data: ")[1]) for event in events.decode().strip().split("\n\n")
    )
    assert (alive["type"], alive["sequence_number"]) == ("response.in_progress", 2)
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 3)
    error = {"code": "server_error", "message": "the engine ended"}
    assert (failed["response"]["status"], failed["response"]["error"]) == ("failed", error)
    assert b'"code":"invalid_prompt"' in response_format.failure(400, "the answer cannot go on")


@pytest.mark.parametrize("kind", ["calls", "reasoning", "tools", "allowed"])
def test_the_time_of_a_request_grows_with_its_length(kind: str) -> None:
    n = 50_000
    call = {"type": "function_call", "name": "z", "arguments": "{}", "call_id": "c"}
    names = [{"type": "function", "name": f"f{i}"} for i in range(n)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": names}
    fields: dict[str, Any] = {
        "calls": {"input": [call] * n},
        "reasoning": {"input": [{"type": "reasoning", "content": "a" * 1000}] * n},
        "tools": {"input": [call] * n, "tools": names},
        "allowed": {"input": "Hi", "tools": names, "tool_choice": allowed},
    }
    began = time.process_time()
    tool_choice(chat_from_responses(ResponsesBody(**fields[kind])))
    assert time.process_time() - began < 5  # a minute and more if it grows with the square
