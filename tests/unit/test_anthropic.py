"""Anthropic's Messages: translation to chat requests, and answers as blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from blocks import answer, block_parts, call, streamed
from hypothesis import given
from hypothesis import strategies as st

from dflash_gguf.serve.anthropic_format import MessagesFormat
from dflash_gguf.serve.anthropic_request import MessagesBody, chat_from_messages
from dflash_gguf.serve.completion_choice import CompletionChoice
from dflash_gguf.serve.schemas import BadRequestError, ChatBody, read
from dflash_gguf.serve.serializers import ResponseContext
from dflash_gguf.serve.wire_format import encode
from dflash_gguf.text.reasoning import OutputPart

USER = {"role": "user", "content": "hi"}


def body(*messages: Any, **fields: Any) -> MessagesBody:
    return read(json.dumps({"messages": messages or [USER], **fields}).encode(), MessagesBody)[0]


def chat(*messages: Any, **fields: Any) -> ChatBody:
    return chat_from_messages(body(*messages, **fields))


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_system_blocks_become_one_message_without_the_billing_line() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.328.20d; cch=0f3;")
    blocks = [billing, text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]
    wanted = [{"role": "system", "content": "Be brief.\nBe kind."}, USER]
    assert chat(system=blocks).messages == wanted
    assert chat(system="Be brief.\nBe kind.").messages == wanted
    assert chat(system=[billing]).messages == chat().messages == [USER]


def test_cache_marks_and_the_form_of_content_do_not_change_the_conversation() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    inner = {"role": "system", "content": "tools: a"}
    listed = {"role": "system", "content": [text("tools: a", **mark)]}
    assert chat(USER, inner).messages == chat(USER, listed).messages
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
    as_list = {**result, "content": [text("4")], **mark}
    plain, marked = ({"role": "user", "content": [one]} for one in (result, as_list))
    assert chat(USER, plain).messages == chat(USER, marked).messages


def test_a_turn_with_calls_becomes_tool_calls_and_messages_of_role_tool() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    said = [
        {"type": "thinking", "thinking": "Sum.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("Let me add."),
        use,
        {**use, "id": "t2"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        text("Go"),
        text("on"),
    ]
    found = chat(USER, {"role": "assistant", "content": said}, {"role": "user", "content": results})
    function = {"name": "add", "arguments": {"a": 1}}
    assert found.messages[1:] == [
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "Sum.",
            "tool_calls": [
                {"id": name, "type": "function", "function": function} for name in ("t1", "t2")
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "Go\non"},
    ]


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "enabled", "budget_tokens": 7168}, True),
    ],
)
def test_thinking_is_on_if_it_is_asked_for(thinking: Any, is_on: bool) -> None:
    found = chat(thinking=thinking, output_config={"effort": "low"})
    assert (found.enable_thinking, found.reasoning_effort) == (is_on, "low")


def test_settings_and_fields_of_the_server_reach_the_chat_request() -> None:
    found = chat(max_tokens=7, stop_sequences=["x"], temperature=0.5, top_k=3, draft="none", seed=1)
    assert (found.max_tokens, found.stop, found.temperature) == (7, ["x"], 0.5)
    assert (found.top_k, found.draft, found.seed) == (3, "none", 1)


def test_fields_of_the_service_alone_are_ignored_without_a_warning() -> None:
    fields = {"metadata": {"user_id": "x"}, "context_management": {"edits": []}}
    data = json.dumps({"messages": [USER], "service_tier": "auto", **fields}).encode()
    assert read(data, MessagesBody)[1] == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def test_tools_become_functions_without_those_of_the_service() -> None:
    tools = [ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    found = body(tools=[{**tools[0], "cache_control": {"type": "ephemeral"}}, tools[1]])
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
    assert chat_from_messages(found).tools == [{"type": "function", "function": function}]
    assert found.left_out == ["tools.web_search_20250305"]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, wanted: Any) -> None:
    found = chat(tools=[ADD], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (wanted, None)
    one = chat(tools=[ADD], tool_choice={**(choice or {}), "disable_parallel_tool_use": True})
    assert (one.tool_choice, one.parallel_tool_calls) == (wanted, False)


def test_deferred_tools_are_described_where_a_result_refers_to_them() -> None:
    found = body(
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [
                        {"type": "tool_reference", "tool_name": "add"},
                        {"type": "tool_reference", "tool_name": "gone"},
                    ],
                }
            ],
        },
        tools=[{**ADD, "defer_loading": True}],
    )
    assert list(found.deferred_tools) == ["add"]
    (message,) = chat_from_messages(found).messages
    described, gone = message["content"].split("\n")
    assert json.loads(described) == {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert gone == "gone"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "tool", "content": "x"}, r"messages\[0\]: role is 'tool', must be user, assis"),
        ({"role": "user"}, r"messages\[0\]: content must be a text or a list of blocks"),
        ({"role": "user", "content": ["x"]}, "content must be a text or a list of blocks"),
        ({"role": "user", "content": [{"type": "image"}]}, "image input is not supported"),
        ({"role": "user", "content": [{"type": "audio"}]}, "block of type 'audio' is not support"),
        ({"role": "user", "content": [{"type": "text"}]}, "a block of type text must have a text"),
        ({"role": "user", "content": [{"type": "tool_result", "content": 1}]}, "content of a tool"),
    ],
)
def test_what_is_no_text_is_refused_by_a_sentence(message: Any, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        chat(message)


def test_an_unknown_kind_of_thinking_is_refused() -> None:
    with pytest.raises(BadRequestError, match="thinking: type is 'deep', must be adaptive, ena"):
        chat(thinking={"type": "deep"})


def whole_of(choice: CompletionChoice) -> dict[str, Any]:
    return MessagesFormat(ResponseContext("m", None)).whole([choice])


def assembled(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message of a stream; checks that its events come in order."""
    first, *middle, delta, last = events
    assert first["type"] == "message_start"
    assert last == {"type": "message_stop"}
    message = first["message"]
    is_open = False
    for event in middle:
        index = len(message["content"])
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == index
            message["content"].append(event["content_block"])
            grown, is_open = "", True
            continue
        assert is_open
        assert event["index"] == index - 1
        block = message["content"][-1]
        if kind == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(grown or "{}")
            continue
        assert kind == "content_block_delta"
        found = dict(event["delta"])
        assert found.pop("type") in ("text_delta", "thinking_delta", "signature_delta") or found
        ((name, value),) = found.items()
        if name == "partial_json":
            grown += value
        else:
            block[name] += value
    assert not is_open
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


@given(parts=block_parts(), pieces=st.integers(1, 5))
def test_a_stream_has_the_blocks_of_the_whole_message(parts: list[OutputPart], pieces: int) -> None:
    choice = answer(parts)
    stream = assembled(streamed(MessagesFormat(ResponseContext("m", None)), choice, pieces))
    assert without_ids(stream) == json.loads(encode(without_ids(whole_of(choice))))


def test_usage_tells_cached_tokens_apart_also_if_the_stream_began_before_they_were_known() -> None:
    stream = streamed(MessagesFormat(ResponseContext("m", None)), answer([OutputPart("x")]), 1)
    usage = {"cache_creation_input_tokens": 0, "output_tokens": 1}
    assert stream[0]["message"]["usage"]["input_tokens"] == 7
    assert stream[-2]["usage"] == {"input_tokens": 3, "cache_read_input_tokens": 4, **usage}


@pytest.mark.parametrize(
    ("stop_reason", "stop_text", "parts", "wanted"),
    [
        ("token", None, [OutputPart("x")], ("end_turn", None)),
        ("text", "</a>", [OutputPart("x")], ("stop_sequence", "</a>")),
        ("length", None, [OutputPart("x")], ("max_tokens", None)),
        ("context", None, call(0, "add", ['{"a"']), ("max_tokens", None)),
        ("token", None, call(0, "add", ["{}"]), ("tool_use", None)),
    ],
)
def test_the_reason_of_the_end(stop_reason: str, stop_text: Any, parts: Any, wanted: Any) -> None:
    found = whole_of(answer(parts, stop_reason, stop_text))
    assert (found["stop_reason"], found["stop_sequence"]) == wanted


def test_malformed_arguments_reach_the_client_as_they_are() -> None:
    parts = call(0, "add", ['{"a": ', "oops"])
    assert whole_of(answer(parts))["content"][0]["input"] == '{"a": oops'
    stream = streamed(MessagesFormat(ResponseContext("m", None)), answer(parts), 1)
    assert [e["delta"]["partial_json"] for e in stream if "delta" in e and "index" in e] == [
        '{"a": ',
        "oops",
    ]


def test_every_answer_and_call_has_an_id_of_its_own() -> None:
    parts = [*call(0, "add", ["{}"]), *call(1, "add", ["{}"])]
    found = [whole_of(answer(parts)) for _ in range(2)]
    ids = [x["id"] for x in found] + [block["id"] for x in found for block in x["content"]]
    assert len(set(ids)) == 6


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    message_format = MessagesFormat(ResponseContext("m", None))
    assert message_format.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    event, data = message_format.failure(500, "the engine ended").decode().strip().split("\n")
    assert event == "event: error"
    found = json.loads(data.removeprefix("data: "))
    assert found["type"] == "error"
    # At an api_error clients stop.
    assert (found["error"]["type"], found["error"]["message"]) == (
        "overloaded_error",
        "the engine ended",
    )
    assert b'"type":"invalid_request_error"' in message_format.failure(400, "bad")
