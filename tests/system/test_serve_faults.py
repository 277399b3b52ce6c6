"""Known faults of similar servers, each tried on dflash-serve."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pairs import make_pair
from serve_trial import Trial, rss_bytes
from serving import CODE, START_S, Served, tiny
from vocabularies import smollm2_file

LONG = {"prompt": CODE, "ignore_eos": True, "draft": "none"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("--queue", "4")
    yield found
    found.close()


def smollm2(*flags: str) -> Served:
    return Served("-m", str(smollm2_file()), "-ub", "64", "-t", "1", "--temp", "0", *flags)


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server that needs seconds for a long prompt or answer."""
    found = smollm2("-c", "8192", "-b", "64", "--sse-ping-interval", "0.01", "--metrics")
    yield found
    found.close()


def in_background(act: Any, *args: Any, **settings: Any) -> Any:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(act, *args, **settings)
    pool.shutdown(wait=False)
    return future


def test_turns_of_a_chat_reuse_the_prefix_and_still_draft(served: Served) -> None:
    messages = [{"role": "user", "content": "add two numbers"}]
    n_cached, n_accepted = [], []
    for turn in range(3):
        found = served.answer(
            "/v1/chat/completions", messages=messages, max_tokens=48, draft="chain"
        )
        n_cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        n_accepted.append(found["timings"]["draft_n_accepted"])
        messages += [
            found["choices"][0]["message"],
            {"role": "user", "content": f"now number {turn}"},
        ]
        n_prompt = found["usage"]["prompt_tokens"]
    assert n_cached[0] < n_cached[1] < n_cached[2]
    assert n_prompt - n_cached[2] < 24
    assert min(n_accepted) > 5


def test_a_hybrid_computes_only_what_is_new_of_a_turn(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen35")
    flags = ("-t", "1", "-c", "512", "-ub", "16", "--temp", "0")
    served = Served("-m", str(pair.target), "-md", str(pair.drafter), *flags)
    try:
        prompt = [(7 * i) % 250 for i in range(90)]
        settings = {"return_tokens": True, "ignore_eos": True, "n_predict": 20, "draft": "tree"}
        for _ in range(3):
            found = served.answer("/completion", prompt=prompt, **settings)
            alone = served.answer("/completion", prompt=prompt, cache_prompt=False, **settings)
            assert found["tokens"] == alone["tokens"]
            prompt = [*prompt, *found["tokens"], 11, 12, 13]
            found = served.answer("/completion", prompt=prompt, **settings)
            assert found["timings"]["cache_n"] >= len(prompt) - 24
            prompt = [*prompt, *found["tokens"], 14, 15]
    finally:
        assert served.close() == 0


def test_a_hybrid_keeps_what_it_computed_for_a_client_that_left(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen35")
    flags = ("-t", "1", "-c", "8192", "-ub", "16", "-b", "16", "--temp", "0")
    served = Served("-m", str(pair.target), "-md", str(pair.drafter), *flags)
    try:
        prompt = [(7 * i + i // 9) % 250 for i in range(6000)]
        settings = {"n_predict": 1, "stream": True, "return_progress": True}
        seen = b""
        with served.raw("/completion", prompt=prompt, **settings) as connection:
            while b'"processed":256,' not in seen:
                seen += connection.recv(4096)
        time.sleep(1)
        found = served.answer("/completion", prompt=prompt, n_predict=1)
        assert found["timings"]["cache_n"] >= 256
    finally:
        assert served.close() == 0


@pytest.mark.parametrize("draft", ["none", "chain", "tree"])
def test_a_stop_text_or_end_inside_a_draft_leaves_nothing_behind(
    served: Served, draft: str
) -> None:
    whole = served.answer("/completion", prompt=CODE, n_predict=60, draft="none")["content"]
    for stop in (whole[9:12], whole[25:27], whole[40:48]):
        cut = whole[: whole.index(stop)]
        settings = {"prompt": CODE, "n_predict": 60, "draft": draft, "stop": [stop]}
        found = served.answer("/completion", **settings)
        assert (found["content"], found["stop_type"]) == (cut, "word")
        assert found["stopping_word"] == stop
        events = served.events("/completion", **settings)
        assert "".join(event["content"] for event in events) == cut
        follow = {"prompt": CODE + cut + "#", "n_predict": 30, "draft": draft}
        after = served.answer("/completion", **follow)
        assert after["timings"]["cache_n"] > 0 or not cut
        alone = served.answer("/completion", cache_prompt=False, **follow)
        assert after["content"] == alone["content"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_answer_and_no_other(slow: Served, is_stream: bool) -> None:
    before = slow.metric("tokens_predicted_total")
    with slow.raw("/completion", stream=is_stream, n_predict=4000, **LONG) as connection:
        if is_stream:
            assert connection.recv(100)
        slow.wait_until(lambda: not slow.is_idle)
        other = in_background(slow.answer, "/completion", prompt=CODE, n_predict=5)
        slow.wait_until(lambda: slow.metric("requests_deferred") == 1)
    assert len(other.result()["content"]) > 0
    slow.wait_idle()
    assert slow.metric("tokens_predicted_total") - before < 4000


def test_a_client_that_leaves_during_its_prompt_frees_the_slot(slow: Served) -> None:
    prompt = [(13 * i) % 9000 + 100 for i in range(8000)]
    settings = {"n_predict": 1, "stream": True, "return_progress": True}
    with slow.raw("/completion", prompt=prompt, **settings) as connection:
        seen = b""
        while b'"processed":256,' not in seen:
            seen += connection.recv(4096)
        assert not slow.is_idle
    slow.wait_idle()
    with slow.raw("/completion", prompt=prompt, **settings) as connection:
        seen = b""
        while (cached := re.search(rb'"cache":(\d+),', seen)) is None:
            seen += connection.recv(4096)
    assert 0 < int(cached[1]) < 8000
    slow.wait_idle()


def test_a_client_that_leaves_while_it_waits_is_never_begun(slow: Served) -> None:
    before = slow.metric("tokens_predicted_total")
    with slow.raw("/completion", n_predict=300, **LONG) as first:
        slow.wait_until(lambda: not slow.is_idle)
        with slow.raw("/completion", n_predict=4000, **LONG):
            slow.wait_until(lambda: slow.metric("requests_deferred") == 1)
        first.settimeout(60)
        assert b"200 OK" in first.recv(4096)
    slow.wait_idle()
    assert slow.metric("tokens_predicted_total") - before == 300


def test_a_long_prompt_shows_signs_of_life(slow: Served) -> None:
    prompt = [(17 * i) % 9000 + 100 for i in range(1500)]
    body = {"prompt": prompt, "n_predict": 2, "stream": True, "cache_prompt": False}
    lines = []
    with slow.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines += response.iter_lines()
    before, *_ = (n for n, line in enumerate(lines) if line.startswith("data:"))
    assert lines[:before].count(": keep-alive") >= 2
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


def test_a_reader_that_reads_nothing_does_not_stall_the_others(served: Served) -> None:
    """The answer exceeds socket buffers, pauses, and goes on when its reader reads."""
    settings = {**LONG, "n_predict": 800, "n_probs": 500, "stream": True}
    with served.raw("/completion", **settings) as connection:
        connection.recv(10)
        for _ in range(3):
            time.sleep(0.5)
            assert served.answer("/completion", prompt=CODE, n_predict=4)["tokens_predicted"] == 4
        assert rss_bytes(served.process.pid) < 200 << 20
        size = 0
        connection.settimeout(30)
        while part := connection.recv(1 << 20):
            size += len(part)
            if part.endswith(b"0\r\n\r\n"):
                break
        assert size > 20 << 20  # the late reader gets the whole answer


def test_a_reader_that_never_reads_is_given_up() -> None:
    served = tiny("--timeout", "1.5")
    try:
        with served.raw("/completion", **LONG, n_predict=1000, n_probs=800, stream=True):
            served.wait_for("client (does not read|left)")  # server or kernel detects the stall
        assert served.answer("/completion", prompt=CODE, n_predict=4)["tokens_predicted"] == 4
        with socket.create_connection((served.host, served.port)) as half_open:
            half_open.sendall(b"POST /completion HTTP/1.1\r\nHost:")
            half_open.settimeout(60)
            assert half_open.recv(10) == b""  # closed, since the request head is incomplete
        with socket.create_connection((served.host, served.port)) as slow_body:
            slow_body.sendall(
                b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            slow_body.settimeout(60)
            assert b" 408 " in slow_body.recv(100)
    finally:
        assert served.close() == 0


def test_the_queue_is_bounded() -> None:
    served = tiny("--queue", "1", "-c", "2048")
    try:
        prompt = [(13 * i) % 4000 for i in range(2000)]
        bodies = [{"prompt": [n, *prompt], "n_predict": 1} for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda body: served.post("/completion", body), bodies))
        codes = [one.status_code for one in found]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 2
        refused = next(one for one in found if one.status_code == 429)
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert served.answer("/completion", prompt=CODE, n_predict=1)
    finally:
        assert served.close() == 0


def test_a_dead_engine_is_started_again(served: Served) -> None:
    wanted = served.answer("/completion", prompt=CODE, n_predict=16)["content"]
    restarts = served.get("/health").json()["restarts"]
    long = {**LONG, "n_predict": 2000, "prompt": [5]}
    whole = in_background(served.post, "/completion", long)
    waiting = in_background(served.post, "/v1/completions", long | {"stream": True})
    served.wait_until(lambda: not served.is_idle)
    os.kill(served.engine_pid, signal.SIGABRT)
    for future in (whole, waiting):
        found = future.result()
        if found.headers["content-type"] == "text/event-stream":
            error = json.loads(found.text.splitlines()[-2].removeprefix("data: "))
        else:
            error = found.json()
            assert found.status_code == 503
        assert error["error"]["code"] == 503
        assert "SIGABRT" in error["error"]["message"]
    codes = set()
    deadline = time.monotonic() + START_S
    while (found := served.get("/health")).status_code != 200:
        codes.add(found.status_code)
        assert served.post("/completion", {"prompt": CODE}).status_code in (200, 503)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert codes == {503}
    assert found.json()["restarts"] == restarts + 1
    assert served.answer("/completion", prompt=CODE, n_predict=16)["content"] == wanted


def test_requests_get_503_while_the_model_is_loaded() -> None:
    served = tiny(wait=False)
    try:
        health, found = served.get("/health"), served.post("/completion", {"prompt": "x"})
        assert (health.status_code, found.status_code) == (503, 503)
        assert found.json()["error"]["type"] == "unavailable_error"
        assert "Retry-After" in found.headers
        served.wait_for("loaded ")
        assert served.get("/health").status_code == 200
    finally:
        assert served.close() == 0


def test_the_context_is_whole_whatever_runs_beside() -> None:
    served = tiny("-np", "4", "-c", "1024")
    try:
        assert {slot["n_ctx"] for slot in served.get("/slots").json()} == {1024}
        found = served.answer("/completion", prompt=[3] * 1000, n_predict=2)
        assert found["tokens_evaluated"] == 1000
    finally:
        assert served.close() == 0


def test_a_signal_ends_the_server_within_an_answer_and_frees_the_port() -> None:
    served = tiny()
    pid = served.engine_pid
    settings = {**LONG, "n_predict": 2000, "n_probs": 500, "stream": True}
    with served.raw("/completion", **settings) as connection:
        assert connection.recv(10)
        assert served.close() == 0
        events = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert events.count(b"data: ") < 2000
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((served.host, served.port))


def test_an_engine_ends_with_its_server() -> None:
    served = tiny()
    pid = served.engine_pid
    served.process.kill()
    stat = Path(f"/proc/{pid}/stat")
    served.wait_until(lambda: not stat.exists() or "Z" in stat.read_text())
    served.close()


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_many_at_once_get_what_each_gets_alone(n_parallel: int) -> None:
    # A prefix cache of 1 MiB is full after the first requests, so that memory stays flat.
    served = tiny("-np", str(n_parallel), "--queue", "4", "--cache-ram", "1")
    try:
        try_many(served)
    finally:
        assert served.close() == 0


def try_many(served: Served) -> None:
    trial = Trial(served.url)
    memory = []
    for _ in range(2):
        report = trial.run(150, at_once=8)
        assert not report["wrong"], report["wrong"][:3]
        assert report["server_errors"] == 0
        assert report["answered"] > 80
        assert report["refused"] > 20
        memory.append([rss_bytes(pid) for pid in (served.process.pid, served.engine_pid)])
    grown = [after - before for before, after in zip(*memory, strict=True)]
    assert max(grown) < 8 << 20, f"bytes that 150 requests left: {grown}"
    served.wait_idle()


def test_a_long_prompt_of_one_does_not_silence_another() -> None:
    served = smollm2("-c", "4096", "-np", "2")
    try:
        prompt = [(17 * i) % 9000 + 100 for i in range(1200)]
        with served.raw("/completion", **LONG, n_predict=1500, stream=True) as talker:
            talker.settimeout(60)
            assert talker.recv(4096)
            other = in_background(served.answer, "/completion", prompt=prompt, n_predict=1)
            n_events = 0
            while not other.done():
                n_events += talker.recv(65536).count(b"data: ")
        assert n_events >= 10
        assert other.result()["tokens_predicted"] == 1
    finally:
        assert served.close() == 0
