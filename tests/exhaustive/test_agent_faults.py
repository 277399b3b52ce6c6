"""Agents get over faults of a server, of its model and of the connection, and change the file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from agent_runs import AGENTS, END, Setting, run_agent
from echo_server import DIES, FAILS
from serving import call

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which installs the agents"),
]
CLIENTS = ("codex", "claude", "opencode")
LOOK = "I will read the file first, and then I will change the greeting in it."
"""Text before the first call. Faults lie in it, as some clients keep a call that was cut."""


class Fault(NamedTuple):
    """A fault. shows: what the log says of it. byte: of the first answer, in the middle."""

    shows: str
    setting: Setting = Setting()
    byte: int | None = None


FAULTS = {
    "cut": Fault("", Setting(cut=True)),
    "error": Fault("the device is gone", byte=FAILS),
    "death": Fault("the process ended: exit code 1", byte=DIES),
    "loading": Fault(" 503 ", Setting(env={"DFLASH_LOAD_S": "20"}, ready=False)),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("packages")}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_gets_over_a_fault(
    client: str, fault: str, tmp_path: Path, installed: dict[str, Path]
) -> None:
    agent, (shows, setting, byte) = AGENTS[client], FAULTS[fault]
    first, *more = agent.answers
    read = first[first.index("<tool_call>") :]
    faulty = "" if byte is None else chr(byte)
    entry = [f"{LOOK[:30]}{faulty}{LOOK[30:]}\n{read}", f"{LOOK}\n{read}"]
    done = run_agent(agent._replace(answers=[entry, *more]), tmp_path, installed, setting)
    assert shows in done.log, done.log
    assert done.file == 'print("Bonjour")\n', done.log
    assert done.code == 0, done.log


SLOW = {
    "codex": (30, ("idle_timeout_ms = 3600000", "idle_timeout_ms = 10000")),
    "claude": (310, ("API_TIMEOUT_MS=3600000", "API_TIMEOUT_MS=3600000")),
    "opencode": (30, ('"apiKey": "any"', '"apiKey": "any", "chunkTimeout": 10000')),
}
"""Seconds of the first prompt, and a change to the configuration: to a shorter limit of silence.

Claude Code's limit is 300 s at least.
"""


@pytest.mark.parametrize("client", SLOW)
def test_an_agent_waits_for_a_prompt_beyond_its_limit_of_silence(
    client: str, tmp_path: Path, installed: dict[str, Path]
) -> None:
    seconds, edit = SLOW[client]
    agent = AGENTS[client]._replace(edits=[edit])
    setting = Setting(("--sse-ping-interval", "2"), {"DFLASH_PREFILL_S": str(seconds)})
    done = run_agent(agent, tmp_path, installed, setting)
    assert done.asked.count(0) == 1, done.log
    assert done.file == 'print("Bonjour")\n', done.log
    assert done.code == 0, done.log


LONG = {
    "codex": ("131072", ('"context_window": 65536', '"context_window": 20000')),
    "claude": ("65536", ("MAX_CONTEXT_TOKENS=65536", "MAX_CONTEXT_TOKENS=200000")),
    "opencode": ("36000", ('"context": 65536', '"context": 200000')),
}
"""The server's context, and a change to the configuration: to a context that is taken for its size.

Codex compacts by the number of tokens of an answer; the others because the server refuses a prompt.
"""


@pytest.mark.parametrize("client", LONG)
def test_an_agent_compacts_a_conversation_that_outgrows_the_context(
    client: str, tmp_path: Path, installed: dict[str, Path]
) -> None:
    n_ctx, edit = LONG[client]

    def shell(command: str) -> str:
        if client == "codex":
            return call("exec_command", cmd=command)
        name = {"claude": "Bash", "opencode": "bash"}[client]
        return call(name, command=command, description="x")

    first = [shell("seq 4000"), shell("sed -i s/Hello/Bonjour/ hello.py")]
    second = [shell("true"), END] if client == "codex" else END
    agent = AGENTS[client]._replace(edits=[edit], answers=[first, second])
    done = run_agent(agent, tmp_path, installed, Setting((), {"DFLASH_N_CTX": n_ctx}))
    if client != "codex":
        assert re.search(r"POST /v1/\S+ 400", done.log), done.log
    assert done.asked.count(0) == 2, done.log
    assert done.file == 'print("Bonjour")\n', done.log
