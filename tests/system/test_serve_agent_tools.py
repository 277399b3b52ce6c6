"""Tool calls, reasoning, signs of life and failures of agents' routes, by a scripted model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_server import FAILS, MARK, PAUSE, SCRIPTED
from serving import Served, call, scripted

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [{"name": "read", "input_schema": SCHEMA}],
    "/v1/responses": [
        {"type": "function", "name": "read", "parameters": SCHEMA},
        {"type": "custom", "name": "patch"},
    ],
}
READ_A = call("read", path="a.py")
PATCH = '*** Begin Patch\n+print("é")\n*** End Patch'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    answers = [
        "<think>\nI look.\n</think>\n\nReading.\n"
        + call("read", path="a.py")
        + call("read", path="b.py"),
        call("read", path="c.py"),
        call("patch", input=PATCH),
        "Done.",
        '<tool_call>\n{"name": "read", "arguments": {"path": oops}}\n</tool_call>',
        f"Yes, {chr(FAILS)}no",
    ]
    found = scripted(tmp_path_factory.mktemp("script"), answers)
    yield found
    found.close()


def asked(path: str, **more: Any) -> dict[str, Any]:
    user = [{"role": "user", "content": "Change a.py"}]
    conversation = (
        {"messages": user, "max_tokens": 32000} if "messages" in path else {"input": user}
    )
    return conversation | {"tools": TOOLS[path]} | more


def answer_of(served: Served, path: str, number: int) -> tuple[httpx.Response, list[Any]]:
    """Returns an answer of the script, whole and streamed, behind as many tool results."""
    body = asked(path)
    for n in range(number):
        name = f"call_{n}"
        if path == "/v1/messages":
            use = {"type": "tool_use", "id": name, "name": "read", "input": {}}
            result = {"type": "tool_result", "tool_use_id": name, "content": "x"}
            body["messages"] += [
                {"role": role, "content": [block]}
                for role, block in (("assistant", use), ("user", result))
            ]
        else:
            call_ = {"type": "function_call", "call_id": name, "name": "read", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": name, "output": "x"}
            body["input"] += [call_, output]
    return served.post(path, body), served.events(path, **body)


def test_a_conversation_with_tools_by_messages(served: Served) -> None:
    body = asked("/v1/messages", thinking={"type": "adaptive"})
    first = served.answer("/v1/messages", **body)
    thinking, text, one, two = first["content"]
    assert (thinking["thinking"], text["text"]) == ("I look.", "Reading.")
    assert [x["input"] for x in (one, two)] == [{"path": "a.py"}, {"path": "b.py"}]
    assert first["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": x["id"], "content": "x"} for x in (one, two)]
    body["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    third = served.answer("/v1/messages", **body)
    assert third["content"][0]["name"] == "patch"


def test_a_conversation_with_tools_by_responses(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        items: Any = [{"role": "user", "content": "Change a.py"}]
        tools: Any = TOOLS["/v1/responses"]
        with client.responses.stream(model="x", input=items, tools=tools) as stream:
            types = [event.type for event in stream]
            first = stream.get_final_response()
        assert [item.type for item in first.output] == [
            *("reasoning", "message", "function_call", "function_call"),
        ]
        assert first.output_text == "Reading."
        assert types.count("response.output_item.done") == 4
        assert first.usage is not None
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        calls = [item for item in first.output if item.type == "function_call"]
        assert [item.arguments for item in calls] == ['{"path": "a.py"}', '{"path": "b.py"}']
        items += first.output + [
            {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
            for item in calls
        ]
        second = client.responses.create(model="x", input=items, tools=tools)
        (patch,) = second.output
        assert patch.type == "custom_tool_call"
        assert patch.input == PATCH
        items += [
            patch,
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"},
        ]
        assert client.responses.create(model="x", input=items, tools=tools).output_text == "Done."


@pytest.mark.parametrize("path", list(TOOLS))
def test_drafts_change_nothing(served: Served, path: str) -> None:
    def said(draft: str) -> list[Any]:
        found = served.answer(path, **asked(path, draft=draft))
        blocks = found.get("content") or found["output"]
        return [{x: block[x] for x in block if x not in ("id", "call_id")} for block in blocks]

    plain = said("none")
    assert len(plain) == 4
    for draft in ("auto", "chain", "tree"):
        assert said(draft) == plain


def test_one_call_ends_the_answer_if_calls_are_not_parallel(served: Served) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = served.answer("/v1/messages", **asked("/v1/messages", tool_choice=choice))
    assert [block["type"] for block in found["content"]].count("tool_use") == 1
    body = asked("/v1/responses", parallel_tool_calls=False)
    found = served.answer("/v1/responses", **body)
    assert [item["type"] for item in found["output"]].count("function_call") == 1


def test_a_stream_begins_at_once_and_has_events_while_the_prompt_is_computed(
    served: Served,
) -> None:
    wanted = {
        "/v1/messages": ["message_start", "ping", "ping", "content_block_start"],
        "/v1/responses": [
            *("response.created", *["response.in_progress"] * 3, "response.output_item.added"),
        ],
    }
    for path, kinds in wanted.items():
        body = asked(path, sse_ping_interval=1)
        (body.get("messages") or body["input"])[0]["content"] = PAUSE
        events = served.events(path, **body)
        assert [event["type"] for event in events[: len(kinds)]] == kinds


def test_a_stream_whose_engine_ends_says_so_in_the_words_of_its_protocol(served: Served) -> None:
    whole, (*_, message) = answer_of(served, "/v1/messages", 5)
    _, (*_, response) = answer_of(served, "/v1/responses", 5)
    assert (whole.status_code, whole.json()["type"]) == (500, "error")
    assert (message["type"], message["error"]["type"]) == ("error", "overloaded_error")
    assert message["error"]["message"] == "the device is gone"
    assert response["type"] == "response.failed"
    assert response["response"]["error"]["code"] == "server_error"


def test_a_malformed_call_reaches_the_client(served: Served) -> None:
    whole, events = answer_of(served, "/v1/messages", 4)
    given = whole.json()["content"][0]["input"]
    assert "oops" in given
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == given
    whole, events = answer_of(served, "/v1/responses", 4)
    assert whole.json()["output"][0]["arguments"] == given
    assert "".join(event.get("delta", "") for event in events) == given


ODD = '{"path":"a.py",   "line": 1}'
REWRITTEN = {"line": 1, "all": False, "path": "a.py"}


def turns_of(path: str, served: Served) -> tuple[int, dict[str, Any]]:
    """Returns the tokens of a turn with reasoning and a call, and the usage of the next turn.

    The client of the next turn has rewritten the call and dropped the reasoning.
    """
    if path == "/v1/messages":
        body = asked(path)
        first = served.answer(path, **body)
        use = next(block for block in first["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "x"}
        blocks = ("assistant", {**use, "input": REWRITTEN}), ("user", result)
        body["messages"] += [{"role": role, "content": [block]} for role, block in blocks]
    elif path == "/v1/responses":
        body = asked(path)
        first = served.answer(path, **body)
        item = next(item for item in first["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        body["input"] += [{**item, "arguments": json.dumps(REWRITTEN)}, output]
    else:
        tool = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "Change a.py"}], "tools": [tool]}
        first = served.answer(path, **body)
        (called,) = first["choices"][0]["message"]["tool_calls"]
        function = {"name": "read", "arguments": json.dumps(REWRITTEN)}
        body["messages"] += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**called, "function": function}],
            },
            {"role": "tool", "tool_call_id": called["id"], "content": "x"},
        ]
    usage = first["usage"]
    n_before = sum(n for name, n in usage.items() if isinstance(n, int) and name != "total_tokens")
    return n_before, served.answer(path, **body)["usage"]


@pytest.mark.parametrize("path", [*TOOLS, "/v1/chat/completions"])
def test_a_turn_is_cached_whose_call_the_client_has_rewritten(tmp_path: Path, path: str) -> None:
    answer = f'<think>\nI look.\n</think>\n<tool_call>\n{{"name": "read", "arguments": {ODD}}}'
    template = SCRIPTED.replace(
        "{{ m.role }}: ",
        f"{{% if m.role != 'assistant' %}}{{{{ m.role }}}}: {{% else %}}{MARK}{{% endif %}}",
    )
    flags = ("--chat-template", template)
    served = scripted(tmp_path, [answer + "\n</tool_call>", "Done."], *flags)
    try:
        n_before, usage = turns_of(path, served)
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        n_cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        assert n_cached >= n_before - 1  # the last token of an answer is not computed
    finally:
        assert served.close() == 0


def test_retry_after_grows_with_the_time_that_a_model_has_been_loading(tmp_path: Path) -> None:
    slow = scripted(tmp_path, ["x"], env={"DFLASH_LOAD_S": "6"}, wait=False)
    with closing(slow) as served:
        first = served.post("/v1/messages", asked("/v1/messages"))
        time.sleep(3)
        second = served.post("/v1/messages", asked("/v1/messages"))
        assert first.status_code == second.status_code == 503
        assert int(second.headers["Retry-After"]) >= int(first.headers["Retry-After"]) + 2
