"""The openai package as a client of dflash-serve, and random requests."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import USER, Served, tiny

from dflash_gguf.serve.foreign_fields import FOREIGN_FIELDS, SYNONYMS
from dflash_gguf.serve.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LlamaServerBody,
    SlotBody,
    TemplateBody,
    TokenizeBody,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    slots = str(tmp_path_factory.mktemp("slots"))
    found = tiny("--api-key", "secret-key", "-n", "16", "--slot-save-path", slots)
    found.client.headers["Authorization"] = "Bearer secret-key"
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret-key", max_retries=0) as found:
        yield found


def test_chat(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="any", messages=USER, max_tokens=12, seed=1)
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 12
    assert found.system_fingerprint is not None
    assert found.system_fingerprint.startswith("b")
    stream = client.chat.completions.create(
        model="any",
        messages=USER,
        max_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == found.choices[0].message.content
    assert usage == found.usage.model_copy(
        update={"prompt_tokens_details": usage.prompt_tokens_details}
    )


def test_several_choices_with_log_probabilities(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="x", messages=USER, n=2, logprobs=True, top_logprobs=3, temperature=1, max_tokens=5
    )
    assert len(found.choices) == 2
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_completions(client: openai.OpenAI) -> None:
    prompt = "def add(a, b):\n"
    found = client.completions.create(model="x", prompt=prompt, max_tokens=8, echo=True)
    assert found.choices[0].text.startswith(prompt)
    stream = client.completions.create(
        model="x", prompt=prompt, max_tokens=8, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == found.choices[0].text
    many = client.completions.create(model="x", prompt=[prompt, "x"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.choices[1].logprobs is not None
    assert len(many.choices[1].logprobs.token_logprobs or []) == 4


def test_models_and_errors(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["python-tiny"]
    assert client.models.retrieve("python-tiny").id == "python-tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.chat.completions.create(model="x", messages=USER, temperature=-1)
    with pytest.raises(
        openai.BadRequestError, match="exceeds the available context size"
    ) as caught:
        client.completions.create(model="x", prompt=[1] * 5000, stream=True)
    assert caught.value.type == "exceed_context_size_error"
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with (
        pytest.raises(openai.AuthenticationError, match="the key is not one of this server's"),
        stranger,
    ):
        stranger.models.list()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 5000), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=5), st.one_of(st.floats(), st.booleans()), max_size=3),
)
BODIES = (
    *(LlamaServerBody, CompletionBody, ChatBody),
    *(TemplateBody, TokenizeBody, DetokenizeBody, SlotBody),
)
FIELDS = sorted(
    {name for kind in BODIES for name in kind.__struct_fields__} | {*FOREIGN_FIELDS} | {*SYNONYMS}
)
PROMPTS = st.one_of(
    VALUES, st.just("def f(x):\n"), st.lists(st.integers(0, 4095), min_size=1, max_size=9)
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(VALUES, st.sampled_from(["user", "assistant", "system", "tool"])),
            "content": st.one_of(VALUES, st.lists(st.dictionaries(st.just("type"), VALUES))),
            "reasoning_content": VALUES,
            "tool_calls": st.lists(
                st.dictionaries(
                    st.sampled_from(["id", "name", "arguments", "function"]),
                    st.one_of(VALUES, st.just({"name": "f", "arguments": '{"a": 1}'})),
                ),
                max_size=2,
            ),
        },
    ),
    max_size=3,
)
PATHS = (
    "/completion",
    "/v1/completions",
    "/v1/chat/completions",
    "/chat/completions/input_tokens",
    "/apply-template",
    "/tokenize",
    "/detokenize",
    "/slots/0?action=save",
    "/slots/0?action=erase",
)
FUZZ = os.environ.get("DFLASH_FUZZ")
"""Number of random requests with --hypothesis-seed=N, instead of 150 fixed ones."""


@settings(
    max_examples=int(FUZZ or 150),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=FUZZ is None,
)
@given(
    path=st.sampled_from(PATHS),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    prompt=PROMPTS,
    messages=st.one_of(VALUES, MESSAGES, st.just([{"role": "user", "content": "x"}]).map(list)),
)
def test_no_request_makes_the_server_fail(
    served: Served, path: str, fields: dict[str, Any], prompt: Any, messages: Any
) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict", *SYNONYMS):
        limit = fields.get(name)
        if isinstance(limit, int) and (limit > 16 or limit == -1):
            fields[name] = 16
    fields |= {"prompt": prompt, "messages": messages, "content": prompt}
    try:
        found = served.post(path, fields)
    except (UnicodeEncodeError, ValueError):
        return
    assert found.status_code in (200, 400), f"{found.status_code} {found.text} for {fields}"
    if found.status_code == 400:
        error = found.json()["error"]
        assert error["message"], fields
        assert error["type"] in ("invalid_request_error", "exceed_context_size_error"), error
    if found.status_code == 200 and "event-stream" in found.headers["content-type"]:
        assert '"error"' not in found.text or "draft" in found.text, found.text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), data=st.binary(max_size=200))
def test_no_bytes_make_the_server_fail(served: Served, path: str, data: bytes) -> None:
    assert served.client.post(path, content=data).status_code in (200, 400)


def test_the_key_is_never_logged(served: Served) -> None:
    served.get("/v1/models", params={"key": "secret-key"})
    served.get("/v1/models", headers={"Authorization": "Bearer nearly-secret"})
    time.sleep(1.1)  # the log may have left lines out, which a new second ends
    served.get("/health")
    served.wait_for("GET /health 200")
    assert "secret" not in served.log


def test_keys_guard_everything_but_health(served: Served) -> None:
    right = (
        {"Authorization": "Bearer secret-key"},
        {"Authorization": "bearer secret-key"},
        {"X-Api-Key": "secret-key"},
    )
    wrong = (
        {},
        {"Authorization": "secret-key"},
        {"Authorization": "Basic secret-key"},
        {"Authorization": "Bearer secret-ke"},
        {"Authorization": "Bearer secret-key2"},
        {"X-Api-Key": ""},
    )
    with httpx.Client(base_url=served.url) as client:
        for headers in right:
            assert client.get("/v1/models", headers=headers).status_code == 200
        for headers in wrong:
            found = client.get("/v1/models", headers=headers)
            assert found.status_code == 401
            assert found.json()["error"]["type"] == "authentication_error"
            assert client.post("/completion", json={}, headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/v1/health").status_code == 200


def test_pages_of_this_machine_may_ask_and_no_others(served: Served) -> None:
    for origin, is_allowed in (
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://[", False),
    ):
        found = served.client.options("/v1/chat/completions", headers={"Origin": origin})
        assert found.status_code == 200
        assert found.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        found = served.get("/health", headers={"Origin": origin})
        assert ("access-control-allow-origin" in found.headers) is is_allowed
    asked = {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
    found = served.client.options("/", headers={"Origin": "http://localhost", **asked})
    assert found.headers["access-control-allow-credentials"] == "true"
    assert found.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert found.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    found = served.client.options("/", headers={"Origin": "http://localhost"})
    assert "Authorization" in found.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET http://example.org/health HTTP/1.1", 200),
        (b"GET HTTP://example.org/v1/health/?x=1 HTTP/1.1", 200),
        (b"GET http://example.org HTTP/1.1", 401),
        (b"GET /health/ HTTP/1.1", 200),
        (b"GET /v1/models/ HTTP/1.1", 401),
        (b"GET /nowhere// HTTP/1.1", 401),
        (b"GET /health", 400),
        (b"GET /health HTTP/1.1\r\nA B: c", 400),
        (b"GET /health HTTP/1.1\nA: b", 400),
        (b"GET /health HTTP/1.1\r\nA: b\nC: d", 400),
        (b"GET /health HTTP/1.1\r\nA: b\r\n c", 400),
        (b"GET /health HTTP/1.1\r\nA: b\r\n\tc", 400),
        (b"POST /health HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", 400),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\ncontent-length: 5", 400),
        (b"POST /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"GET /health HTTP/1.1\r\nA: content-length\r\nB: transfer-encoding: x", 200),
        (b"\x16\x03\x01\x02\x00\x01", 400),
    ],
)
def test_corners_of_http_are_answered_in_json(
    served: Served, request_line: bytes, status: int
) -> None:
    with socket.create_connection((served.host, served.port), 30) as connection:
        connection.sendall(request_line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"location:" not in head.lower()
    assert json.loads(body)


def test_bodies_and_heads_are_bounded(served: Served) -> None:
    big = b'{"prompt": "' + b"x" * (65 << 20) + b'"}'
    assert served.post("/completion", big).status_code == 413
    try:
        found = served.get("/health", headers={"X-Long": "y" * (4 << 20)})
    except httpx.TransportError:
        pass  # the server closed while the client was sending
    else:
        assert found.status_code in (400, 431)
    assert served.get("/health").status_code == 200


def test_no_path_of_a_request_reaches_the_file_system(served: Served) -> None:
    for body in (
        {"messages": USER, "chat_template_kwargs": {"template": "/etc/passwd"}, "max_tokens": 1},
        {"messages": USER, "model": "/etc/passwd", "max_tokens": 1},
    ):
        found = served.post("/v1/chat/completions", body)
        assert found.status_code == 200
        assert "root:" not in found.text
        assert found.json()["model"] == "python-tiny"
    body = {"messages": USER, "chat_template": "/etc/passwd"}
    found = served.post("/v1/chat/completions", body)
    assert (found.status_code, "root:" in found.text) == (400, False)
    assert served.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404
