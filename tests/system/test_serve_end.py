"""The end of processes: signals to dflash-serve while it answers, Ctrl-C while Python imports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import tiny

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r'"dflash_gguf\._entry:(\w+)"', (ROOT / "pyproject.toml").read_text())
FOREVER = {"max_tokens": 10**6, "n_predict": 10**6, "ignore_eos": True, "draft": "none"}
MESSAGES = [{"role": "user", "content": "a long story"}]
PATHS = ("/v1/chat/completions", "/v1/completions", "/completion")


def test_every_request_in_flight_is_answered_after_a_signal() -> None:
    served = tiny("-np", "6", "-c", "65536")

    def ask(path: str, is_stream: bool) -> httpx.Response:
        body = {"prompt": "def f", "messages": MESSAGES, "stream": is_stream, **FOREVER}
        return served.post(path, body)

    with (
        ThreadPoolExecutor(6) as pool,
        socket.create_connection((served.host, served.port), 30) as late,
        httpx.Client(base_url=served.url) as watcher,
    ):
        late.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        jobs = [pool.submit(ask, path, kind) for path in PATHS for kind in (True, False)]
        served.wait_until(
            lambda: sum(x["is_processing"] for x in watcher.get("/slots").json()) == 6
        )
        watcher.close()
        served.process.send_signal(signal.SIGTERM)
        assert b" 503 " in late.recv(1 << 16)
    for job in jobs:
        found = job.result()
        if found.headers["content-type"] == "text/event-stream":
            error = json.loads(found.text.split("data: ")[-1])["error"]
        else:
            error = found.json()["error"]
            assert found.status_code == 503
        assert (error["code"], error["type"]) == (503, "unavailable_error")
    assert served.process.wait(20) == 0
    served.close()
    assert len(re.findall("ending: 7 requests in flight have 3 s", served.log)) == 1
    assert "Traceback" not in served.log


def test_a_second_signal_ends_the_server_at_once() -> None:
    served = tiny("-c", "65536")
    engine = served.engine_pid
    with served.raw("/completion", prompt="def f", stream=True, **FOREVER) as connection:
        assert connection.recv(10)
        served.process.send_signal(signal.SIGINT)
        served.wait_for("ending: 1 requests")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(2) == 128 + signal.SIGTERM
    stat = Path(f"/proc/{engine}/stat")
    served.wait_until(lambda: not stat.exists() or ") Z" in stat.read_text())
    assert "Traceback" not in served.log
    served.close()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("module", ["argparse", "numpy"])
def test_ctrl_c_during_imports_shows_no_traceback(
    command: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    code = f"from dflash_gguf._entry import {command}; {command}()"
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (130, "")
