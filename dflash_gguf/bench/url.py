"""dflash-bench --url: latencies and speed of an OpenAI-compatible server under load."""

from __future__ import annotations

import http.client
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from .prompts import Prompt

TIMEOUT_S = 600.0


@dataclass
class TimedResponse:
    """The response to a request: text, seconds since the request, and the server's own figures."""

    first_s: float = 0.0
    total_s: float = 0.0
    events_s: list[float] = field(default_factory=list)
    n_tokens: int = 0
    timings: dict[str, Any] = field(default_factory=dict)
    n_rounds: int = 0
    text: str = ""
    failure: str | None = None


class ServerClient:
    """Client of an OpenAI-compatible server."""

    def __init__(self, url: str, key: str | None) -> None:
        """url: with or without /v1 at its end; ValueError for no HTTP URL. key: API key."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: must be like http://127.0.0.1:8080")
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def stream(self, path: str, body: dict[str, Any]) -> TimedResponse:
        """Sends a request and reads its event stream. Errors are in `TimedResponse.failure`."""
        answer = TimedResponse()
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        began = time.perf_counter()
        try:
            connection.request("POST", self._path + path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                answer.failure = f"{response.status} {response.read(200)!r}"
                return answer
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(answer, json.loads(line[6:]), time.perf_counter() - began)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.failure = str(error) or type(error).__name__
        finally:
            answer.total_s = time.perf_counter() - began
            connection.close()
        return answer

    def _take(self, answer: TimedResponse, event: dict[str, Any], seconds: float) -> None:
        if "error" in event:
            answer.failure = str(event["error"])
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            if any(delta.get(name) for name in ("content", "text", "reasoning_content")):
                answer.first_s = answer.first_s or seconds
                answer.events_s.append(seconds)
                answer.text += delta.get("content") or delta.get("text") or ""
        if usage := event.get("usage"):
            answer.n_tokens = usage["completion_tokens"]
        answer.timings = event.get("timings") or answer.timings
        answer.n_rounds = (event.get("dflash") or {}).get("rounds", answer.n_rounds)


@dataclass
class Level:
    """Responses to requests of which n_at_once were sent in parallel."""

    n_at_once: int
    seconds: float
    answers: list[TimedResponse]

    @property
    def good(self) -> list[TimedResponse]:
        """Responses without failure."""
        return [answer for answer in self.answers if answer.failure is None]

    @property
    def n_failed(self) -> int:
        return len(self.answers) - len(self.good)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready figures; milliseconds are medians and 95th percentiles."""
        good = self.good
        firsts = [1e3 * answer.first_s for answer in good if answer.events_s]
        betweens = [
            1e3 * (answer.events_s[-1] - answer.events_s[0]) / (answer.n_tokens - 1)
            for answer in good
            if answer.n_tokens > 1 and len(answer.events_s) > 1
        ]
        drafted = sum(answer.timings.get("draft_n", 0) for answer in good)
        accepted = sum(answer.timings.get("draft_n_accepted", 0) for answer in good)
        rounds = sum(answer.n_rounds for answer in good)
        n_tokens = sum(answer.n_tokens for answer in good)
        return {
            "concurrency": self.n_at_once,
            "requests": len(self.answers),
            "failed": self.n_failed,
            "failure": next((answer.failure for answer in self.answers if answer.failure), None),
            "tokens": n_tokens,
            "tokens_per_s": round(n_tokens / self.seconds, 2),
            "first_token_ms": _middle(firsts),
            "first_token_ms_p95": _high(firsts),
            "between_tokens_ms": _middle(betweens),
            "between_tokens_ms_p95": _high(betweens),
            "acceptance": round(accepted / drafted, 4) if drafted else None,
            "tokens_per_round": round((n_tokens - len(good)) / rounds, 3) if rounds else None,
        }


def bodies(
    prompts: Sequence[Prompt],
    chat: str | None,
    n_tokens: int,
    temperature: float,
    seed: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[tuple[str, dict[str, Any]]]:
    """Builds path and body of a request for each prompt.

    chat: instruction before each prompt. more: further fields of every body.
    """
    common = {
        "max_tokens": n_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    requests = []
    for prompt in prompts:
        if chat is None or prompt.text is None:
            text: Any = prompt.text if prompt.text is not None else list(prompt.tokens)
            requests.append(("/v1/completions", {"prompt": text, **common}))
        else:
            content = f"{chat}\n\n{prompt.text}" if chat else prompt.text
            messages = [{"role": "user", "content": content}]
            requests.append(("/v1/chat/completions", {"messages": messages, **common}))
    return requests


def load(
    server: ServerClient, requests: Sequence[tuple[str, dict[str, Any]]], n_at_once: int
) -> Level:
    """Sends requests, n_at_once in parallel; repeats them if there are fewer than 2 * n_at_once."""
    n = max(len(requests), 2 * n_at_once)
    began = time.perf_counter()
    with ThreadPoolExecutor(n_at_once) as pool:
        todo = (requests[i % len(requests)] for i in range(n))
        answers = list(pool.map(lambda request: server.stream(*request), todo))
    return Level(n_at_once, time.perf_counter() - began, answers)


def table(levels: Sequence[Level]) -> str:
    """Formats latencies and speed as a table, one row for each number of parallel requests."""
    lines = ["at once  requests  failed  tokens/s  first token, ms (p95)  between, ms  accepted"]
    for level in levels:
        d = level.to_dict()
        accepted = "" if d["acceptance"] is None else f"{d['acceptance']:.0%}"
        first = f"{_shown(d['first_token_ms'])} ({_shown(d['first_token_ms_p95'])})"
        lines.append(
            f"{d['concurrency']:7}  {d['requests']:8}  {d['failed']:6}  {d['tokens_per_s']:8.1f}  "
            f"{first:>21}  {_shown(d['between_tokens_ms']):>11}  {accepted:>8}"
        )
    return "\n".join(lines)


def _middle(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _high(values: Sequence[float]) -> float | None:
    """Returns the 95th percentile by nearest rank."""
    ordered = sorted(values)
    return round(ordered[math.ceil(0.95 * len(ordered)) - 1], 2) if ordered else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
