"""dflash-serve as a child process, with the bundled pair."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import echo_server
import httpx

START_S = 240.0
"""Seconds after which a server that does not start, end or become idle counts as hanging."""
COMMAND = ("-c", "import sys; from dflash_gguf.serve.command import main; sys.exit(main())")
CODE = "def add(a, b):\n"
USER: Any = [{"role": "user", "content": "add two numbers"}]
ROUTES = ("/completion", "/v1/completions", "/v1/chat/completions")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}def {{ m.content }}\n"
    "{% else %}# {{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)


class Served:
    """A running server; `log` is its standard error."""

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
        n_files: int | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """n_files: limit of open files that the server cannot raise. command: of Python."""
        self.log = ""
        limit = [] if n_files is None else ["sh", "-c", f'ulimit -n {n_files}; exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*limit, sys.executable, *command, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = self.wait_for(r"listening on (https?)://(\S+):(\d+)")
        self.host, self.port = found[2].strip("[]"), int(found[3])
        self.url = f"{found[1]}://{found[2]}:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=False)
        if wait:
            self.wait_for("loaded ")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log):
                return found
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log}")

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.client.get(path, **settings)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """Sends a POST request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self.client.post(path, content=data, **settings)

    def answer(self, path: str, **body: Any) -> Any:
        found = self.post(path, body)
        assert found.status_code == 200, found.text
        return found.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        data = json.dumps({"stream": True, **body}).encode()
        found = []
        with self.client.stream("POST", path, content=data) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    found.append(json.loads(line[6:]))
        return found

    @contextlib.contextmanager
    def raw(self, path: str, **body: Any) -> Iterator[socket.socket]:
        """Sends a request over a new connection, which the with block closes at its end."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((self.host, self.port), 30) as connection:
            connection.sendall(head.encode() + data)
            yield connection

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next(
            int(child)
            for child in children.read_text().split()
            if b"serve.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        )

    @property
    def is_idle(self) -> bool:
        return not any(slot["is_processing"] for slot in self.get("/slots").json())

    def wait_idle(self) -> None:
        self.wait_until(lambda: self.is_idle)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def metric(self, name: str) -> int:
        """Returns a counter of /metrics, which counts completed answers."""
        found = re.search(rf"^llamacpp:{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def close(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_S)
        finally:
            self.process.kill()
            self._reader.join(5)
            assert self.process.stderr is not None
            self.process.stderr.close()


def tiny(*flags: str, **settings: Any) -> Served:
    """Starts a server with the bundled pair, on one thread, greedy."""
    context = ("-m", "python-tiny", "-t", "1", "--temp", "0", "--chat-template", TEMPLATE)
    return Served(*context, *flags, **settings)


def echoing(folder: Path, *flags: str) -> Served:
    """Starts a server whose answers are the texts that prompts ask for; see echo_server."""
    model = echo_server.model_file(folder)
    return Served("-m", str(model), *flags, command=(echo_server.__file__,))


def scripted(
    folder: Path,
    answers: Sequence[str | Sequence[str]],
    *flags: str,
    env: dict[str, str] | None = None,
    wait: bool = True,
) -> Served:
    """Starts a server whose answers to requests with tools are given; see echo_server."""
    script = folder / "script.json"
    script.write_text(json.dumps(answers))
    model = echo_server.model_file(folder)
    command = ("-m", str(model), "--chat-template", echo_server.SCRIPTED, *flags)
    env = {"DFLASH_SCRIPT": str(script)} | (env or {})
    return Served(*command, env=env, wait=wait, command=(echo_server.__file__,))


def call(name: str, **arguments: Any) -> str:
    """Returns the text of a tool call of a scripted answer."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text_of(found: Any) -> str:
    """Returns the text of an answer of one of ROUTES."""
    if "content" in found:
        return str(found["content"])
    choice = found["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
