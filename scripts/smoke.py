"""Checks that a deployed dflash-serve (or llama-server) does the things that clients rely on.

    scripts/smoke.py http://127.0.0.1:8080 [--api-key KEY] [--tokens 2000] [--draft-type none]

Prints one line for each check; the exit code is 1 if any check fails. Needs only Python's standard
library.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
TIMEOUT_S = 300
MIN_ACCEPTED = 0.05
"""Minimum accepted share of the drafted tokens; a drafter of shuffled weights reaches 0.00."""
TASKS = (
    "reverses a string",
    "counts the words of a file",
    "returns the largest of a list",
    "checks if a number is prime",
    "sorts a list of names",
)


class Site:
    """An HTTP client of the server under test."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname or "127.0.0.1", parts.port or 8080
        self._kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            self._kind, self.address = (
                http.client.HTTPSConnection,
                (
                    self.address[0],
                    parts.port or 443,
                ),
            )
        self.is_plain = parts.scheme != "https"
        self.headers = {"Content-Type": "application/json"}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Sends a GET, or a POST if there is a body; returns the response's status and body."""
        connection = self._kind(*self.address, timeout=TIMEOUT_S)
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, path, body and json.dumps(body), self.headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def answer(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the parsed JSON of a response; raises AssertionError unless the status is 200."""
        status, data = self.ask(path, body)
        if status != 200:
            raise AssertionError(f"{path} answered {status}: {data[:200]!r}")
        return json.loads(data)


def chat(text: str, n: int = 24, **more: Any) -> dict[str, Any]:
    """Returns the body of a greedy chat request with one user message and at most n new tokens."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": n, "temperature": 0, **more}


def words(found: Any) -> str:
    """Returns the text of a chat completion, reasoning included."""
    message = found["choices"][0]["message"]
    return str(message.get("reasoning_content") or "") + str(message.get("content") or "")


def health(site: Site) -> str:
    """Checks that the server is healthy and lists a model; returns the names of its models."""
    site.answer("/health")
    names = [model["id"] for model in site.answer("/v1/models")["data"]]
    assert names, "no model is listed"
    return ", ".join(names)


def whole(site: Site) -> str:
    """Checks that a chat completion has text and counts its tokens."""
    found = site.answer(CHAT, chat("Say hello."))
    usage = found["usage"]
    assert 0 < usage["completion_tokens"] <= 24, usage
    assert usage["prompt_tokens"] > 0, usage
    assert words(found), "the answer has no text"
    return repr(words(found)[:40])


def stream(site: Site) -> str:
    """Checks that a streamed answer has the same text as an answer in one response."""
    body = chat("Count to ten.", stream=True, stream_options={"include_usage": True})
    status, data = site.ask(CHAT, body)
    assert status == 200, f"the stream has status {status}"
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    events = [json.loads(line) for line in lines[:-1]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(d.get("reasoning_content") or "" for d in deltas)
    text += "".join(d.get("content") or "" for d in deltas)
    assert text == words(site.answer(CHAT, chat("Count to ten."))), (
        "the streamed text differs from the text in one response"
    )
    assert events[-1]["usage"]["completion_tokens"] > 0
    return f"{len(deltas)} events"


def long_prompt(site: Site, n_tokens: int) -> str:
    """Checks that a repeated prompt of about n_tokens is mostly found in the prefix cache."""
    text = " ".join(f"line {n} of {time.time_ns()}." for n in range(n_tokens // 26))
    times, cached = [], []
    for _ in range(2):
        began = time.perf_counter()
        usage = site.answer(CHAT, chat(text, 4))["usage"]
        times.append(time.perf_counter() - began)
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    n = usage["prompt_tokens"]
    assert cached[1] > n // 2, f"only {cached[1]} of {n} prompt tokens came from the cache"
    return f"{n} tokens, {times[0]:.2f} s, then {times[1]:.2f} s with {cached[1]} cached"


def leave(site: Site) -> str:
    """Checks that a client that disconnects mid-answer does not delay the next request."""
    data = json.dumps(chat("Write a very long story.", 100000, stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in site.headers.items())
    with socket.create_connection(site.address, 30) as connection:
        connection.sendall(head.encode() + b"\r\n" + data)
        connection.recv(1)
        time.sleep(0.5)
    began = time.perf_counter()
    site.answer(CHAT, chat("Say hello.", 1))
    seconds = time.perf_counter() - began
    assert seconds < 10, f"the next answer took {seconds:.1f} s"
    return f"the next answer took {seconds:.2f} s"


def parallel(site: Site) -> str:
    """Checks that 8 requests at once get the same answers as when sent one after the other."""
    texts = [f"Write one sentence about the number {n}." for n in range(8)]
    alone = [words(site.answer(CHAT, chat(text))) for text in texts]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda text: words(site.answer(CHAT, chat(text))), texts))
    assert found == alone, "an answer differs from that to the same request alone"
    return f"8 at once in {time.perf_counter() - began:.2f} s"


def drafting(site: Site, draft_type: str) -> str:
    """Checks that one drafter proposes tokens and that the model accepts enough of them.

    A server that silently drafts nothing answers as correctly as one that drafts. Repeated chats
    detect a server that drafts for new prompts only. llama-server ignores `draft` and `draft_type`.
    """
    n_drafted = n_accepted = 0
    texts = ["Write a Python function that adds two numbers."] * 5
    texts += [f"Write a Python function that {task}." for task in TASKS]
    for text in texts:
        body = chat(text, 48, draft="chain", draft_type=draft_type)
        timings = site.answer(CHAT, body).get("timings", {})
        assert timings.get("draft_n", 0) > 0, f"no token was drafted for {text!r}"
        n_drafted += timings["draft_n"]
        n_accepted += timings["draft_n_accepted"]
    found = f"{n_accepted} of {n_drafted} drafted tokens accepted"
    assert n_accepted / n_drafted >= MIN_ACCEPTED, f"only {found}"
    return found


def routing(site: Site) -> str:
    """Checks that the model name "any" is answered, and that its time of last use advances."""

    def last_used(name: str) -> float | None:
        for model in site.answer("/v1/models")["data"]:
            if model["id"] == name:
                ms = model.get("last_used_ms")
                return model.get("last_used") if ms is None else ms / 1000
        return None

    name = site.answer(CHAT, chat("Say hello.", 1, model="any"))["model"]
    before = last_used(name)
    if before is None:
        return f"answered by {name}; the server reports no time of last use"
    time.sleep(1)
    site.answer(CHAT, chat("Say hello.", 1, model="any"))
    after = last_used(name)
    assert after is not None and after > before, f"last_used of {name} stays at {after}"
    return f"answered by {name}, last used {after - before:.0f} s later"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("url", help="address of the server, e.g. http://127.0.0.1:8080")
    p.add_argument("--api-key", metavar="KEY")
    p.add_argument("--tokens", type=int, default=2000, metavar="N", help="long prompt's length")
    p.add_argument(
        "--draft-type",
        default="dflash",
        metavar="NAME",
        help="draft type that must be engaged; none: skip this check (default: dflash)",
    )
    args = p.parse_args()
    site = Site(args.url, args.api_key)
    checks: dict[str, Callable[[Site], str]] = {"health": health, "chat": whole, "stream": stream}
    checks["long prompt"] = lambda site: long_prompt(site, args.tokens)
    if site.is_plain:
        checks["leave"] = leave
    checks |= {"parallel": parallel, "routing": routing}
    if args.draft_type != "none":
        checks["drafting"] = lambda site: drafting(site, args.draft_type)
    n_failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check(site)}", flush=True)
        except (AssertionError, OSError, http.client.HTTPException, KeyError, ValueError) as error:
            n_failed += 1
            print(f"FAIL  {name}: {error or type(error).__name__}", flush=True)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
