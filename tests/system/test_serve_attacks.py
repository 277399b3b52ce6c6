"""Requests and model files that would take the server from its other clients."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from serving import Served, tiny

from dflash_gguf import bundled

SILENT_S = 3.0
"""Seconds within which /health has to answer: one, with room for machines that are busy."""


class Watch:
    """Asks for /health all the time; `worst` is the longest time that an answer took."""

    def __init__(self, served: Served) -> None:
        self.worst = 0.0
        self._host, self._port = served.host, served.port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._is_over.wait(0.02):
            began = time.monotonic()
            client = HTTPConnection(self._host, self._port, timeout=60)  # a new one each time
            client.request("GET", "/health")
            client.getresponse()
            client.close()
            self.worst = max(self.worst, time.monotonic() - began)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("-c", "512", "--queue", "4", "--chat-template", "chatml")
    yield found
    found.close()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 128, "n": 128},
        {"prompt": ["a"] * 3, "n": 86},
        {"prompt": [[1, 2]] * 128, "n": 3, "logit_bias": {str(i): 1 for i in range(1200)}},
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_answers_of_one_request_are_bounded(served: Served, path: str, body: object) -> None:
    with Watch(served) as watch:
        found = served.post(path, body)
    assert found.status_code == 400
    assert "--max-answers is 256" in found.json()["error"]["message"]
    assert watch.worst < SILENT_S


def test_an_idle_server_takes_more_answers_than_may_wait(served: Served) -> None:
    """They count as waiting for the requests after them."""
    biases = {str(i): 1 for i in range(1200)}
    body = {"prompt": ["a"] * 64, "n": 4, "n_predict": 2, "logit_bias": biases, "seed": 1}
    with Watch(served) as watch, served.raw("/completion", **body):
        wait_until(lambda: any(slot["is_processing"] for slot in served.get("/slots").json()))
        busy = served.post("/completion", {"prompt": "b", "n_predict": 1})
    assert busy.status_code == 429
    assert "answers wait, the limit of --queue" in busy.json()["error"]["message"]
    assert watch.worst < SILENT_S
    wait_until(
        lambda: served.post("/completion", {"prompt": "b", "n_predict": 1}).status_code == 200
    )


def test_answers_of_one_request_have_the_texts_of_single_ones(served: Served) -> None:
    settings = {"n_predict": 8, "temperature": 1.5, "seed": 7}
    many = served.answer("/v1/completions", prompt=["a", "def f"], n=2, max_tokens=8, **settings)
    alone = [
        served.answer("/completion", prompt=prompt, **settings | {"seed": 7 + nth})["content"]
        for prompt in ("a", "def f")
        for nth in range(2)
    ]
    assert [choice["text"] for choice in many["choices"]] == alone


def test_stop_texts_are_bounded(served: Served) -> None:
    found = served.post("/completion", {"prompt": "a", "stop": ["x" * 9000, "y" * 9000]})
    assert found.status_code == 400
    assert "stop holds 18000 characters, the limit is 16384" in found.json()["error"]["message"]


def test_a_template_without_end_holds_nobody_up(tmp_path: Path) -> None:
    """system/test_template_process.py has more such templates."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "loop.jinja").write_text(loop)
    flags = ("-m", "python-tiny", "-t", "1", "-c", "256")
    served = Served(*flags, "--chat-template-file", str(tmp_path / "loop.jinja"))
    chat = {"messages": [{"role": "user", "content": "a"}]}
    try:
        with Watch(served) as watch, served.raw("/v1/chat/completions", **chat) as connection:
            for _ in range(3):
                time.sleep(0.3)
                served.answer("/completion", prompt="a", n_predict=2)
            answer = b""
            while b"}" not in answer:
                answer += connection.recv(4096)
            assert b"400 Bad Request" in answer
            assert b"takes longer than 10 s" in answer
        assert watch.worst < SILENT_S
        with served.raw("/v1/chat/completions", **chat):
            time.sleep(0.3)
            assert served.close() == 0
    finally:
        served.close()


def test_clients_with_keys_take_turns() -> None:
    """One key asks for answers without end; each of three others is served in its turn."""
    served = tiny("-c", "8192", "--api-key", "a,b,c,d", "--queue", "64")

    def ask(key: str, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return served.post("/completion", {"prompt": f"{key} = ", **body}, headers=headers)

    endless = {"n_predict": -1, "ignore_eos": True, "n": 8, "draft": "none"}
    try:
        ask("b", n_predict=2)
        head = {"Authorization": "Bearer a"}
        with served.client.stream(
            "POST", "/completion", json={"prompt": "a", "stream": True, **endless}, headers=head
        ) as stream:
            next(stream.iter_lines())
            with ThreadPoolExecutor(3) as pool:
                began = time.monotonic()
                found = [pool.submit(ask, key, n_predict=8, draft="none") for key in "bcd"]
                assert [one.result().status_code for one in found] == [200] * 3
            assert time.monotonic() - began < 1 + 3 * 1.5
        assert ask("a", n_predict=2).status_code == 200
    finally:
        served.close()


def test_a_model_that_waits_for_another_holds_nobody_else_up(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").symlink_to(bundled.find("python-tiny").target)
    served = Served("--models", str(tmp_path), "-t", "1", "-c", "8192", wait=False)
    long = {"prompt": "a", "n_predict": 4000, "ignore_eos": True, "stream": True, "draft": "none"}
    try:
        served.answer("/completion", model="a", prompt="a", n_predict=1)
        with served.raw("/completion", model="a", **long) as answer, ThreadPoolExecutor(2) as pool:
            answer.recv(100)
            of_b = pool.submit(served.answer, "/completion", model="b", prompt="a", n_predict=1)
            time.sleep(0.3)
            began = time.monotonic()
            assert served.answer("/tokenize", model="a", content="a")["tokens"]
            for path in ("/health", "/slots?model=a", "/props?model=a", "/v1/models"):
                assert served.get(path).status_code == 200
            assert time.monotonic() - began < SILENT_S
            behind = pool.submit(served.answer, "/completion", model="a", prompt="b", n_predict=1)
            time.sleep(0.3)
            assert not of_b.done()
            assert not behind.done()
            answer.close()
            assert of_b.result(60)["model"] == "b"
            assert behind.result(60)["model"] == "a"
    finally:
        assert served.close() == 0


def test_whole_answers_hold_a_bounded_number_of_probabilities(served: Served) -> None:
    body = {"prompt": "a", "n": 8, "n_predict": 400, "n_probs": 1024}
    found = served.post("/completion", body)
    assert found.status_code == 400
    assert "3276800 log-probabilities" in found.json()["error"]["message"]
    with Watch(served) as watch:
        found = served.post("/completion", {**body, "n": 2, "ignore_eos": True, "draft": "none"})
    assert watch.worst < SILENT_S
    assert sum(len(one["completion_probabilities"]) for one in found.json()) == 800


def test_a_client_that_left_is_seen_behind_what_it_sent(served: Served) -> None:
    data = b'{"prompt": "a", "n_predict": -1, "ignore_eos": true, "draft": "none", "stream": true}'
    head = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
    for behind in (b"x", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"y" * (65 << 10)):
        with socket.create_connection((served.host, served.port)) as connection:
            connection.sendall(head + data)
            connection.recv(100)
            with contextlib.suppress(ConnectionError):  # too much of it ends the connection
                connection.sendall(behind)
        wait_until(lambda: served.is_idle, 5)


def test_a_client_that_never_reads_takes_turns() -> None:
    """Clients without keys, told apart by address."""
    served = tiny("-c", "8192")
    body = b'{"prompt": "a", "n_predict": -1, "ignore_eos": true, "n_probs": 64, "stream": true}'
    head = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    asked = {"prompt": "b = ", "n_predict": 16, "draft": "none"}
    try:
        served.answer("/completion", **asked)
        began = time.monotonic()
        served.answer("/completion", **asked)
        alone = time.monotonic() - began
        with contextlib.ExitStack() as stack:
            for last in (2, 3):
                deaf = socket.create_connection(
                    (served.host, served.port), source_address=(f"127.0.0.{last}", 0)
                )
                stack.enter_context(deaf).sendall(head + body)
            time.sleep(2)
            with Watch(served) as watch:
                began = time.monotonic()
                served.answer("/completion", **asked)
                assert time.monotonic() - began < SILENT_S + 3 * alone
            assert watch.worst < SILENT_S
        wait_until(lambda: served.is_idle, 10)
    finally:
        served.close()


def test_half_heads_at_the_limit_of_files_hold_nobody_up() -> None:
    served = Served("-m", "python-tiny", "-t", "1", "-c", "512", n_files=256)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                half = socket.create_connection((served.host, served.port))
                stack.enter_context(half).sendall(b"POST /completion HTTP/1.1\r\n")
            with Watch(served) as watch:
                assert served.answer("/completion", prompt="a", n_predict=2)["content"]
                time.sleep(1)
            assert watch.worst < SILENT_S
    finally:
        assert served.close() == 0


def test_prompts_are_refused_before_they_are_tokenized(served: Served) -> None:
    for path, body in (
        ("/completion", {"prompt": "a " * (2 << 20)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * (2 << 20)}]}),
    ):
        found = served.post(path, body)
        assert found.status_code == 400, path
        assert re.search(r"at least \d+ tokens, .* the maximum of 512", found.text), path


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["json_schema", "response_format", "tools"])
def test_numbers_beyond_64_bits_are_refused_and_do_not_wait(served: Served, name: str) -> None:
    schema = {"type": "integer", "maximum": 10**30}
    fields: dict[str, object] = {
        "json_schema": schema,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for _ in range(6):  # more than --queue
        found = served.post("/v1/chat/completions", body | {name: fields[name]})
        assert found.status_code == 400
        assert "-2^63 to 2^64 - 1" in found.json()["error"]["message"]
    assert served.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ],
)
def test_routes_without_a_list_of_answers_refuse_several(
    served: Served, path: str, body: dict[str, object]
) -> None:
    found = served.post(path, body | {"n": 2})
    assert found.status_code == 400
    assert "n is 2, must be 1" in found.json()["error"]["message"]


def test_tools_that_are_not_shown_are_bounded(served: Served) -> None:
    tool = {"input_schema": {"type": "object"}, "defer_loading": True, "strict": True}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "tools": [{"name": f"f{i}", **tool} for i in range(20_000)],
        "tool_choice": {"type": "any"},
    }
    with Watch(served) as watch:
        found = served.post("/v1/messages", body)
    assert found.status_code == 400
    assert "tools holds 20000 tools, the limit is 2000" in found.json()["error"]["message"]
    assert watch.worst < SILENT_S
