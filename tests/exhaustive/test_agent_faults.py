"""Agents get over faults of a server, of its model and of the connection, and change the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from agent_runs import AGENTS, Setting, run_agent
from echo_server import DIES, FAILS

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
    call = first[first.index("<tool_call>") :]
    faulty = "" if byte is None else chr(byte)
    entry = [f"{LOOK[:30]}{faulty}{LOOK[30:]}\n{call}", f"{LOOK}\n{call}"]
    done = run_agent(agent._replace(answers=[entry, *more]), tmp_path, installed, setting)
    assert shows in done.log, done.log
    assert done.file == 'print("Bonjour")\n', done.log
    assert done.code == 0, done.log
