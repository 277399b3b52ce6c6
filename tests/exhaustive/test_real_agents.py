"""Agents and SDKs change a file on a scripted model's word, as docs/agents.md configures them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from agent_runs import AGENTS, run_agent

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which installs the agents"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("packages")}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_changes_a_file(name: str, tmp_path: Path, installed: dict[str, Path]) -> None:
    done = run_agent(AGENTS[name], tmp_path, installed)
    assert done.file == 'print("Bonjour")\n', done.log
    assert done.code == 0, done.log
    assert not re.search(r"POST /v1/\S+ [45]\d\d", done.log), done.log
