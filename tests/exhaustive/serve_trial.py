"""Sends thousands of short requests to a dflash-serve, and checks answers and memory.

    tests/exhaustive/serve_trial.py http://127.0.0.1:8080 [-n 10000] [--at-once 16] [--pid PID]

First sends each of 30 different requests alone, without drafts. Then sends many at once: whole,
streamed, cancelled by the client, invalid, or too long. Complete answers must equal those alone;
invalid requests must get a 4xx. Requests refused by a full queue (429) are repeated. --pid is the
server's process, whose memory and engine's memory are reported. The last line is one JSON object.
The exit code is 1 if a request was lost, wrong, or got a 5xx.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 300
PROMPTS = (
    "def add(a, b):\n",
    "import os\n",
    "class A:\n    def __init__(self",
    "def main():\n    print(",
    "x = [1, 2, ",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0, "repeat_penalty": 1.2, "repeat_last_n": 20},
    {"temperature": 0, "draft": "tree", "n_probs": 2},
    {"temperature": 0.7, "seed": 9, "draft": "chain", "ignore_eos": True},
    {"temperature": 0, "stop": ["\n\n", "return"]},
)
WRONG = (b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "top_p": 7}', b"{}", b"\xff\x00")
KINDS = ("whole", "stream", "whole", "chat", "left", "wrong", "stream", "long", "whole", "left")


class Trial:
    """A server, and its answers to requests sent alone."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname or "127.0.0.1", parts.port or 8080
        self.headers = {"Content-Type": "application/json"}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"
        self.bodies = [
            {"prompt": prompt, "n_predict": 12 + 3 * n, **settings}
            for n, prompt in enumerate(PROMPTS)
            for settings in SETTINGS
        ]
        self.n_ctx = self._json("GET", "/props")["default_generation_settings"]["n_ctx"]
        plain = {"draft": "none", "cache_prompt": False}
        self.alone = [
            self._json("POST", "/completion", body | plain)["content"] for body in self.bodies
        ]
        self.chat = {
            "messages": [{"role": "user", "content": "add two numbers"}],
            "max_tokens": 16,
            "temperature": 0,
        }
        self.chat_alone = self._json("POST", "/v1/chat/completions", self.chat)["choices"][0]

    def run(self, n: int, at_once: int, seed: int = 0) -> dict[str, Any]:
        """Sends n requests and returns counts of their outcomes."""
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda i: self._ask(i, random.Random(f"{seed} {i}")), range(n)))
        counts = Counter(outcome for outcome, _ in found)
        return {
            "requests": n,
            "at_once": at_once,
            "seconds": round(time.perf_counter() - began, 2),
            "answered": counts["right"],
            "refused": counts["refused"],
            "left": counts["left"],
            "asked_again": sum(again for _, again in found),
            "server_errors": counts["5xx"],
            "wrong": [
                outcome for outcome in counts if outcome not in ("right", "refused", "left", "5xx")
            ],
        }

    def _ask(self, number: int, rng: random.Random) -> tuple[str, int]:
        """Sends one request. Returns its outcome or an error, and the number of 429s."""
        kind = KINDS[number % len(KINDS)]
        at = rng.randrange(len(self.bodies))
        body: dict[str, Any] = dict(self.bodies[at])
        if kind == "left":
            self._leave(body | {"stream": rng.random() < 0.5, "n_predict": 200}, rng)
            return "left", 0
        path, data = "/completion", json.dumps(body | {"stream": kind == "stream"}).encode()
        if kind == "wrong":
            data = rng.choice(WRONG)
        elif kind == "long":
            data = json.dumps({"prompt": [5] * (self.n_ctx + 1)}).encode()
        elif kind == "chat":
            path, data = "/v1/chat/completions", json.dumps(self.chat).encode()
        n_again = 0
        while True:
            status, answer = self._send("POST", path, data)
            if status != 429:
                break
            n_again += 1
            time.sleep(0.01 + 0.05 * rng.random())
        if status >= 500:
            return "5xx", n_again
        if kind in ("wrong", "long"):
            return ("refused" if status == 400 else f"{kind}: {status}"), n_again
        if status != 200:
            return f"{status} {answer[:200]!r}", n_again
        if kind == "chat":
            same = json.loads(answer)["choices"][0] == self.chat_alone
            return ("right" if same else "another answer to the chat"), n_again
        text = _streamed(answer) if kind == "stream" else json.loads(answer)["content"]
        if text == self.alone[at]:
            return "right", n_again
        return f"{body}: {text!r}, alone {self.alone[at]!r}", n_again

    def _leave(self, body: dict[str, Any], rng: random.Random) -> None:
        """Sends a request and closes the connection after up to 0.1 s."""
        data = json.dumps(body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        with socket.create_connection(self.address, TIMEOUT_S) as connection:
            connection.sendall(head.encode() + b"\r\n" + data)
            time.sleep(rng.choice((0.0, 0.001, 0.01, 0.05, 0.1)))

    def _send(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, data, self.headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        status, data = self._send(method, path, None if body is None else json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {data[:300]!r}")
        return json.loads(data)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> dict[str, int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"http": pid, "engine": int(children[0])}


def _streamed(data: bytes) -> str:
    """Returns the text of a stream in llama-server's format."""
    lines = data.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    if not events or not events[-1].get("stop"):
        return f"an end too soon: {events[-1:]}"
    return "".join(event["content"] for event in events)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("url", help="like http://127.0.0.1:8080")
    p.add_argument("-n", type=int, default=10_000, help="requests (default: 10000)")
    p.add_argument("--at-once", type=int, default=16, metavar="N")
    p.add_argument("--api-key", metavar="KEY")
    p.add_argument("--pid", type=int, help="of the server, on this machine")
    args = p.parse_args()
    trial = Trial(args.url, args.api_key)
    warm = max(args.n // 10, 1)
    reports = [trial.run(warm, args.at_once, seed=1)]
    pids = family(args.pid) if args.pid else {}
    before = {name: (rss_bytes(pid), cpu_s(pid)) for name, pid in pids.items()}
    reports.append(trial.run(args.n - warm, args.at_once, seed=2))
    report = reports[-1] | {"wrong": reports[0]["wrong"] + reports[1]["wrong"]}
    for name, pid in pids.items():
        grown = rss_bytes(pid) - before[name][0]
        report[f"{name}_bytes_a_request"] = round(grown / max(args.n - warm, 1), 1)
        report[f"{name}_cpu_s"] = round(cpu_s(pid) - before[name][1], 2)
    for sentence in report["wrong"]:
        print(sentence, file=sys.stderr)
    report["wrong"] = len(report["wrong"])
    report["server_errors"] += reports[0]["server_errors"]
    print(json.dumps(report))
    return 1 if report["wrong"] or report["server_errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
