"""Routes of coding agents: Anthropic's Messages, and OpenAI's Responses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, tiny

from dflash_gguf.serve.anthropic_request import MessagesBody
from dflash_gguf.serve.responses_request import ResponsesBody
from dflash_gguf.serve.schemas import ChatBody

FUZZ = os.environ.get("DFLASH_FUZZ")
"""Number of random requests a route with --hypothesis-seed=N, instead of fixed ones."""
USER = {"role": "user", "content": "add two numbers"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("-c", "1024", "--api-key", "k")
    found.client.headers["X-Api-Key"] = "k"
    yield found
    found.close()


def messages(**fields: Any) -> dict[str, Any]:
    return {"model": "claude", "messages": [USER], "max_tokens": 24} | fields


def joined(events: list[Any]) -> str:
    deltas = [x["delta"] for x in events if x["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


@pytest.mark.parametrize("draft", ["none", "auto", "chain", "tree"])
def test_messages_are_the_chats_answer_with_and_without_drafts(served: Served, draft: str) -> None:
    settings = {"temperature": 0.9, "seed": 5, "draft": draft, "stop_sequences": ["before_ad"]}
    chat = messages(temperature=0.9, seed=5, draft="none", stop=["before_ad"])
    wanted = served.answer("/v1/chat/completions", **chat)
    found = served.answer("/v1/messages", **messages(**settings))
    events = served.events("/v1/messages?beta=true", **messages(**settings))
    text = wanted["choices"][0]["message"]["content"]
    assert [block["text"] for block in found["content"]] == [text]
    assert joined(events) == text
    assert found["usage"]["output_tokens"] == wanted["usage"]["completion_tokens"]
    assert found["stop_reason"] == "max_tokens"
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_both_kinds_of_keys_are_taken_and_errors_are_anthropics(served: Served) -> None:
    for headers in ({"X-Api-Key": "k"}, {"Authorization": "Bearer k"}):
        found = httpx.post(
            f"{served.url}/v1/messages",
            json=messages(max_tokens=1),
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", **headers},
        )
        assert found.status_code == 200
    for headers, status, kind in (
        ({"X-Api-Key": "no"}, 401, "authentication_error"),
        ({"X-Api-Key": "k"}, 400, "invalid_request_error"),
    ):
        found = httpx.post(f"{served.url}/v1/messages", json={"messages": 1}, headers=headers)
        error = found.json()
        assert (found.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_understand(
    served: Served, is_stream: bool
) -> None:
    long = [{"role": "user", "content": "zq " * 1500}]
    n = served.answer("/v1/messages/count_tokens", messages=long)["input_tokens"]
    found = served.post("/v1/messages", messages(messages=long, stream=is_stream))
    assert found.status_code == 400
    assert found.json()["error"]["message"] == f"prompt is too long: {n} tokens > 1024 maximum"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_several_answers_are_refused(served: Served, path: str) -> None:
    for stream in (False, True):
        found = served.post(path, {"messages": [USER], "input": "x", "n": 2, "stream": stream})
        assert found.status_code == 400
        assert "n is 2, must be 1" in found.json()["error"]["message"]


def test_a_compressed_body_is_refused(served: Served) -> None:
    headers = {"Content-Encoding": "zstd"}
    found = served.post("/v1/responses", b"\x28\xb5\x2f\xfd", headers=headers)
    assert found.status_code == 415
    assert "Content-Encoding is 'zstd'" in found.json()["error"]["message"]


def test_max_tokens_is_cut_to_the_context_that_is_left(served: Served) -> None:
    fields = {"max_tokens": 32000, "ignore_eos": True}
    found = served.answer("/v1/messages", **messages(**fields))
    assert found["stop_reason"] == "max_tokens"
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] < 20
    assert found["usage"]["output_tokens"] > 900


def test_a_second_turn_is_cached_though_cache_marks_have_moved(served: Served) -> None:
    def content(text: str, *, is_marked: bool) -> list[Any]:
        mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
        return [{"type": "text", "text": text, **mark}]

    def system(suffix: str) -> list[Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.{suffix};"
        return [{"type": "text", "text": text} for text in (billing, "Be brief. " * 9)]

    first = {"role": "user", "content": content("one two three", is_marked=True)}
    answer = served.answer("/v1/messages", **messages(messages=[first], system=system("a")))
    said = {"role": "assistant", "content": answer["content"]}
    again = {"role": "user", "content": "one two three"}
    more = {"role": "user", "content": content("four", is_marked=True)}
    found = served.answer(
        "/v1/messages", **messages(messages=[again, said, more], system=system("b"))
    )
    usage = found["usage"]
    before = sum(answer["usage"][name] for name in ("input_tokens", "output_tokens"))
    assert usage["cache_read_input_tokens"] >= before - 4
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
        == served.answer(
            "/v1/messages/count_tokens", messages=[again, said, more], system=system("c")
        )["input_tokens"]
    )


@pytest.mark.parametrize("n_title", [100, 350], ids=["beside", "instead"])
def test_a_title_between_two_turns_evicts_nothing(n_title: int) -> None:
    def chat(*texts: str) -> dict[str, Any]:
        turns = [("user", "assistant")[i % 2] for i in range(len(texts))]
        said = [{"role": role, "content": text} for role, text in zip(turns, texts, strict=True)]
        found: dict[str, Any] = served.answer("/v1/messages", **messages(messages=said))
        return found

    with closing(tiny("-c", "512", "-np", "1")) as served:
        asked = "one two three " * 20
        first = chat(asked)
        n_before = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        chat("title " * (n_title // 2))
        usage = chat(asked, first["content"][0]["text"], "four")["usage"]
        assert usage["cache_read_input_tokens"] >= n_before - 4


def test_a_stream_begins_at_once_and_shows_signs_of_life_while_others_run() -> None:
    with (
        closing(tiny("-c", "1024")) as served,
        served.raw("/completion", prompt="x", n_predict=900, ignore_eos=True, stream=True) as other,
    ):
        assert other.recv(1)
        data = json.dumps(messages(stream=True, sse_ping_interval=1)).encode()
        with served.client.stream("POST", "/v1/messages", content=data) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            assert other.recv(1)  # the other answer still runs
            assert response.headers["content-type"] == "text/event-stream"
            events = [line for line in lines if line.startswith("event: ")]
    assert events[-1] == "event: message_stop"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("draft", ["none", "auto", "chain", "tree"])
def test_responses_are_the_chats_answer_with_and_without_drafts(
    served: Served, client: openai.OpenAI, draft: str
) -> None:
    settings: Any = {"temperature": 0.9, "max_output_tokens": 24}
    more = {"seed": 5, "draft": draft, "stop": ["before_ad"]}
    chat = messages(temperature=0.9, seed=5, draft="none", stop=["before_ad"])
    wanted = served.answer("/v1/chat/completions", **chat)
    found = client.responses.create(model="x", input=USER["content"], extra_body=more, **settings)
    assert found.output_text == wanted["choices"][0]["message"]["content"]
    assert found.usage is not None
    assert found.usage.output_tokens == wanted["usage"]["completion_tokens"]
    assert found.status == "incomplete"
    events = list(
        client.responses.create(
            model="x", input=USER["content"], stream=True, extra_body=more, **settings
        )
    )
    assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == (
        found.output_text
    )
    assert events[-1].type == "response.incomplete"


def test_the_package_of_openai_follows_a_stream_to_its_end(client: openai.OpenAI) -> None:
    settings: Any = {"input": USER["content"], "extra_body": {"stop": ["before_ad"]}}
    with client.responses.stream(model="x", **settings) as stream:
        types = [event.type for event in stream]
        found = stream.get_final_response()
    assert found.status == "completed"
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-2:] == ["response.output_item.done", "response.completed"]
    assert found.output_text == client.responses.create(model="x", **settings).output_text


def test_a_stream_of_a_prompt_that_is_too_long_fails_with_the_code_that_makes_codex_compact(
    served: Served, client: openai.OpenAI
) -> None:
    created, progress, failed = client.responses.create(model="x", input="zq " * 1500, stream=True)
    assert (created.type, progress.type) == ("response.created", "response.in_progress")
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "context_length_exceeded"
    found = served.post("/v1/responses", {"input": "zq " * 1500})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_items_that_are_unknown_are_named_in_a_header(served: Served) -> None:
    items = [{"type": "web_search_call"}, {"role": "user", "content": "x"}]
    found = served.post("/v1/responses", {"input": items, "max_output_tokens": 1})
    assert found.status_code == 200
    assert found.headers["X-Ignored-Fields"] == "input.web_search_call"
    served.wait_for("the field input.web_search_call of a request is unknown and ignored")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from(["", "x", "user", "auto", "\ud83d", "web_search", "{}", '{"a": 1}', 1.5]),
    st.lists(st.sampled_from(["x", 1, None, {}, {"type": "text"}]), max_size=2),
    st.dictionaries(st.sampled_from(["type", "name", "text", "effort"]), st.just("x"), max_size=2),
)
TYPES = {
    "/v1/chat/completions": (
        *("text", "image_url", "input_audio", "refusal", "function", "custom", "allowed_tools"),
        *("json_schema", "json_object", "grammar", "regex", "auto", "required", "none"),
    ),
    "/v1/messages": (
        *("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document"),
        *("tool_reference", "custom", "web_search_20250305", "tool", "any", "none", "adaptive"),
    ),
    "/v1/responses": (
        *("message", "function_call", "function_call_output", "custom_tool_call", "reasoning"),
        *("custom_tool_call_output", "input_text", "output_text", "reasoning_text", "input_image"),
        *("function", "custom", "namespace", "web_search", "item_reference", "json_schema"),
    ),
}
SOUND: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        USER,
        {"role": "system", "content": [{"type": "text", "text": "inner"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "x"}]},
    ],
    "/v1/messages": [
        USER,
        {"role": "system", "content": [{"type": "text", "text": "inner"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ],
    "/v1/responses": [
        USER,
        {"role": "developer", "content": [{"type": "input_text", "text": "inner"}]},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": "x"},
    ],
}
"""Messages and items without a fault, so that a part of the requests is answered."""
NAMES = (
    *("text", "content", "thinking", "name", "id", "input", "tool_use_id", "call_id", "arguments"),
    *("output", "summary", "namespace", "tools", "parameters", "input_schema", "description"),
    *("function", "tool_calls", "tool_call_id", "schema", "json_schema"),
    *("source", "data", "format", "definition", "strict", "defer_loading", "tool_name", "cache"),
)
FIELDS = {
    "/v1/chat/completions": ChatBody.__struct_fields__,
    "/v1/messages": MessagesBody.__struct_fields__,
    "/v1/responses": ResponsesBody.__struct_fields__,
}


def blocks(path: str) -> st.SearchStrategy[Any]:
    """Blocks, items, parts and tools, that hold further ones."""

    def block(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        value = st.one_of(JUNK, inner, st.lists(inner, max_size=2))
        kinds = st.one_of(st.sampled_from(TYPES[path]), JUNK)
        roles = st.one_of(st.sampled_from(["user", "assistant", "system", "developer"]), JUNK)
        fixed = {"type": kinds, "role": roles, "content": value}
        more = st.dictionaries(st.sampled_from(NAMES), value, max_size=4)
        return st.builds(
            lambda known, unknown: {**unknown, **known},
            st.fixed_dictionaries({}, optional=fixed),
            more,
        )

    return st.recursive(block(JUNK), block, max_leaves=4)


LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


@pytest.mark.parametrize("n", [200, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", list(TYPES))
def test_no_request_makes_the_server_fail(served: Served, path: str, n: int) -> None:
    many = st.one_of(st.lists(blocks(path), max_size=3), JUNK)
    sound = st.lists(st.sampled_from(SOUND[path]), min_size=1, max_size=4)
    conversation = "input" if path == "/v1/responses" else "messages"
    count = f"{path}/count_tokens" if path == "/v1/messages" else path

    @settings(
        max_examples=int(FUZZ or n),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=FUZZ is None,
    )
    @given(
        fields=st.dictionaries(st.sampled_from(FIELDS[path]), st.one_of(JUNK, many), max_size=2),
        items=st.one_of(sound, many),
        tools=st.one_of(st.none(), st.none(), many),
        counts=st.booleans(),
    )
    def asked(fields: dict[str, Any], items: Any, tools: Any, counts: bool) -> None:
        fields |= {conversation: items, "tools": tools} | dict.fromkeys(LENGTHS, 2)
        body = json.dumps(fields).encode()
        found = served.post(count if counts else path, body)
        assert found.status_code in (200, 400), f"{found.status_code} {found.text} for {fields}"
        if found.status_code == 400:
            assert found.json()["error"]["message"], fields

    asked()
