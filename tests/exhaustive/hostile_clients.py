"""Attacks a server at random beside an honest client, and measures what the client notices.

    hostile_clients.py [--seconds 3600] [--seed 1]
    hostile_clients.py --url http://127.0.0.1:8080 --pid PID    # another server with the keys KEYS

Attackers in processes of their own send requests of all kinds with keys of theirs, or without one.
The honest client asks the same question again and again. Prints one JSON object: how long /health
and the honest client's first token took, wrong answers, memory of the HTTP process, processes that
were left. The exit status is 1 if a limit of `problems` is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from serve_trial import rss_bytes
from serving import Served

HONEST = "honest"
ATTACKERS = ("attacker-1", "attacker-2", "attacker-3")
KEYS = ",".join((HONEST, *ATTACKERS))
ASKED = {"prompt": "def add(a, b):\n", "n_predict": 16, "temperature": 0, "ignore_eos": True}
HEALTH_S = 1.0
"""Limit of the 99th percentile of the time that /health takes."""
MEMORY = 512 << 20
"""Limit of the growth of the HTTP process in bytes."""

Address = tuple[str, int]


def head(path: str, length: int | str, key: str | None) -> bytes:
    with_key = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{with_key}Content-Length: {length}\r\n\r\n"
    ).encode()


class Attacker:
    """One client that sends what a server should not suffer from. Every attack takes seconds."""

    def __init__(self, address: Address, key: str, seed: int) -> None:
        self._address, self._key = address, key
        self._random = random.Random(seed)
        self._idle: list[socket.socket] = []

    def attack(self) -> None:
        """Makes one attack, chosen at random."""
        acts: list[Callable[[], None]] = [
            *(self.half_heads, self.slow_body, self.unread_stream, self.many_answers),
            *(self.large_prompt, self.long_stops, self.bad_bodies, self.bytes_of_any_kind),
            *(self.leave_early, self.hidden_end, self.large_chat, self.odd_routes),
        ]
        with contextlib.suppress(OSError):
            self._random.choice(acts)()

    def _open(self) -> socket.socket:
        one = socket.create_connection(self._address, 5)
        one.settimeout(2)
        return one

    def _send(self, path: str, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = self._random.choice((self._key, self._key, self._key, None))
        with self._open() as one:
            one.sendall(head(path, len(data), key) + data)
            while one.recv(1 << 16):
                pass

    def _endless(self, **more: Any) -> dict[str, Any]:
        prompt = "".join(self._random.choices("abc def\n", k=20))
        return {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True, **more}

    def half_heads(self) -> None:
        for _ in range(40):
            one = self._open()
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
            self._idle.append(one)
        while len(self._idle) > 200:
            self._idle.pop(0).close()

    def slow_body(self) -> None:
        with self._open() as one:
            one.sendall(head("/completion", 99999, self._key))
            for _ in range(10):
                one.sendall(b" ")
                time.sleep(0.1)

    def unread_stream(self) -> None:
        data = json.dumps(self._endless(n=4, n_probs=self._random.choice((0, 20, 1024)))).encode()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(self._address)
            one.sendall(head("/completion", len(data), self._key) + data)
            time.sleep(self._random.uniform(0, 3))

    def many_answers(self) -> None:
        n = self._random.choice((8, 64, 128))
        biases = {str(i): 1 for i in range(self._random.choice((0, 1200)))}
        body = self._endless(n=n, logit_bias=biases)
        self._send("/completion", body | {"prompt": ["a"] * self._random.choice((1, 2, 128))})

    def large_prompt(self) -> None:
        size = self._random.choice((10**4, 10**6, 8 * 10**6))
        text = self._random.choice(("a", " ", "word ", "\u00e9", "\n")) * size
        path = self._random.choice(("/completion", "/tokenize", "/v1/completions"))
        self._send(path, {"prompt": text, "content": text, "n_predict": 1})

    def long_stops(self) -> None:
        size = self._random.choice((200, 9000, 100_000))
        self._send("/completion", self._endless(stop=[" " * size + "b", "a" * size + "c"]))

    def bad_bodies(self) -> None:
        bodies = (b"[" * 10**6, b'{"prompt": ' + b"9" * 10**6 + b"}", b"{}", b"\xff" * 1000, b"")
        self._send(
            self._random.choice(("/completion", "/v1/chat/completions")),
            self._random.choice(bodies),
        )

    def bytes_of_any_kind(self) -> None:
        with self._open() as one:
            one.sendall(self._random.randbytes(self._random.choice((10, 1000, 100_000))))
            one.recv(100)

    def leave_early(self) -> None:
        for _ in range(20):
            data = json.dumps(self._endless()).encode()
            with self._open() as one:
                one.sendall(head("/completion", len(data), self._key) + data)
                if self._random.random() < 0.5:
                    one.recv(100)

    def hidden_end(self) -> None:
        data = json.dumps(self._endless()).encode()
        with self._open() as one:
            one.sendall(head("/completion", len(data), self._key) + data + b"x")

    def large_chat(self) -> None:
        messages = [{"role": "user", "content": "hi " * self._random.choice((1, 10**5))}]
        self._send("/v1/chat/completions", {"messages": messages * self._random.choice((1, 500))})

    def odd_routes(self) -> None:
        path = self._random.choice(
            (
                "/slots/0?action=save",
                "/slots/9?action=erase",
                "/props",
                "/%2e%2e/etc/passwd",
                "/" * 9,
            )
        )
        self._send(path, {"filename": self._random.choice(("../a", "a", "a" * 10**5))})


def attack_until(address: Address, key: str, seed: int, ends_at: float) -> None:
    attacker = Attacker(address, key, seed)
    while time.time() < ends_at:
        attacker.attack()


class Honest:
    """The honest client, and a watch of /health beside it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.firsts: list[float] = []
        self.health: list[float] = []
        self.n_wrong = self.n_failed = 0
        self.expected = ""
        self.why = ""

    def ask(self) -> None:
        """Asks for a stream; notes when the first token came, and whether the text was right."""
        began, first, text = time.monotonic(), None, ""
        connection = HTTPConnection(*self._address, timeout=120)
        try:
            body = json.dumps({**ASKED, "stream": True})
            connection.request("POST", "/completion", body, {"Authorization": f"Bearer {HONEST}"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(answer.read(200).decode())
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
                    text += json.loads(line[6:])["content"]
        except (OSError, HTTPException, ValueError) as error:
            self.n_failed += 1
            self.why = repr(error)[:300]
            return
        finally:
            connection.close()
        self.firsts.append(first or 0.0)
        self.expected = self.expected or text
        self.n_wrong += text != self.expected

    def watch(self, is_over: threading.Event) -> None:
        """Asks for /health over new connections until the event is set."""
        while not is_over.wait(0.05):
            began = time.monotonic()
            connection = HTTPConnection(*self._address, timeout=60)
            try:
                connection.request("GET", "/health")
                self.n_failed += connection.getresponse().status != 200
            except (OSError, HTTPException) as error:
                self.n_failed += 1
                self.why = repr(error)[:300]
            finally:
                connection.close()
            self.health.append(time.monotonic() - began)


def trial(address: Address, pid: int, seconds: float, seed: int) -> dict[str, Any]:
    """Attacks a server for some seconds; returns what the honest client noticed."""
    honest = Honest(address)
    for _ in range(10):
        honest.ask()
    alone_s = median(honest.firsts)
    before = rss_bytes(pid)
    honest.firsts.clear()
    ends_at = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    attackers = [
        context.Process(target=attack_until, args=(address, key, seed * 100 + i, ends_at))
        for i, key in enumerate(ATTACKERS)
    ]
    is_over, peak = threading.Event(), before
    watch = threading.Thread(target=honest.watch, args=(is_over,))
    for one in (*attackers, watch):
        one.start()
    while time.time() < ends_at and any(one.is_alive() for one in attackers):
        honest.ask()
        peak = max(peak, rss_bytes(pid))
    for one in attackers:
        one.join(30)
        one.kill()
    is_over.set()
    watch.join()
    return {
        "seconds": seconds,
        "seed": seed,
        "answers": len(honest.firsts),
        "wrong": honest.n_wrong,
        "failed": honest.n_failed,
        "last_failure": honest.why,
        "first_token_alone_s": round(alone_s, 4),
        "first_token_s": _quantiles(honest.firsts),
        "health_s": _quantiles(honest.health),
        "grown_mib": (peak - before) >> 20,
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    ranked = sorted(values) or [float("inf")]
    places = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: round(ranked[int(x * (len(ranked) - 1))], 3) for name, x in places.items()}


def problems(found: dict[str, Any]) -> list[str]:
    """Returns sentences about the limits that a trial exceeded."""
    first_s = 1.0 + len(ATTACKERS) * found["first_token_alone_s"]
    said = []
    if found["wrong"] or found["failed"] or not found["answers"]:
        said.append("answers of the honest client were wrong, failed or missing")
    if found["health_s"]["p99"] > HEALTH_S:
        said.append(f"/health took more than {HEALTH_S} s")
    if found["first_token_s"]["p99"] > first_s:
        said.append(f"the first token took more than {first_s:.2f} s")
    if found["grown_mib"] > MEMORY >> 20:
        said.append(f"the server grew by more than {MEMORY >> 20} MiB")
    return said


def left_processes(served: Served) -> int:
    """Kills a server with SIGKILL; returns how many of its processes are left 15 s later."""
    folder = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
    children = [int(x) for x in folder.read_text().split()]
    os.kill(served.process.pid, signal.SIGKILL)
    served.close()
    ends_at = time.monotonic() + 15
    while time.monotonic() < ends_at and any(Path(f"/proc/{x}").exists() for x in children):
        time.sleep(0.1)
    return sum(Path(f"/proc/{x}").exists() for x in children)


def start() -> Served:
    """Starts a server of the bundled model with the keys of all clients."""
    return Served("-m", "python-tiny", "-t", "1", "-c", "2048", "-np", "2", "--api-key", KEYS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server with the keys KEYS")
    parser.add_argument("--pid", type=int, help="its process")
    args = parser.parse_args()
    if args.url:
        parts = urlsplit(args.url)
        address = parts.hostname or "", parts.port or 80
        found = trial(address, args.pid, args.seconds, args.seed)
    else:
        served = start()
        found = trial((served.host, served.port), served.process.pid, args.seconds, args.seed)
        found["traceback"] = "Traceback" in served.log
        found["left_processes"] = left_processes(served)
    print(json.dumps(found))
    said = problems(found)
    for sentence in said:
        print(sentence, file=sys.stderr)
    return 1 if said or found.get("left_processes") or found.get("traceback") else 0


if __name__ == "__main__":
    sys.exit(main())
