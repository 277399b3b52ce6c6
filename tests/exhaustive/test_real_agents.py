"""Coding agents, as docs/agents.md configures them, change a file on a scripted model's word."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import call, scripted

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
FLAGS = re.MULTILINE | re.DOTALL
TIMEOUT_S = 900.0
ALONE = (
    *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-ec"),
)
"""Runs a shell with loopback alone as its network; all its processes end with it."""
PATCH = """*** Begin Patch
*** Update File: hello.py
@@
-print("Hello")
+print("Bonjour")
*** End Patch"""
FILE = "$ROOT/hello.py"
OLD_NEW = {"old_string": "Hello", "new_string": "Bonjour"}
TEXTS = {"old_text": "Hello", "new_text": "Bonjour"}
END = "The greeting is Bonjour now."


class Agent(NamedTuple):
    """A client. package: on npm, or with == on the Python package index.

    answers: of the model, before the last one. edits: a text of the configuration, and another.
    """

    section: str
    package: str
    answers: Sequence[str]
    edits: tuple[str, str] = ("", "")


OPENCODE = (
    call("read", filePath=FILE),
    call("edit", filePath=FILE, oldString="Hello", newString="Bonjour"),
)
PI = (
    "<think>\nI look.\n</think>\n\n" + call("read", path=FILE),
    call("edit", path=FILE, edits=[{"oldText": "Hello", "newText": "Bonjour"}]),
)
SHELL = ("cat hello.py", "sed -i s/Hello/Bonjour/ hello.py")
AGENTS = {
    "codex": Agent(
        "Codex",
        "@openai/codex",
        ("I look.\n" + call("exec_command", cmd="cat hello.py"), call("apply_patch", input=PATCH)),
    ),
    "codex-unknown-model": Agent(
        "Codex",
        "@openai/codex",
        [call("exec_command", cmd=command) for command in SHELL],
        ('model_catalog_json = "catalog.json"', ""),
    ),
    "claude": Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        (
            "<think>\nI look.\n</think>\n\n" + call("Read", file_path=FILE),
            call("Edit", file_path=FILE, **OLD_NEW),
        ),
    ),
    "opencode": Agent("opencode", "opencode-ai", OPENCODE),
    "opencode-messages": Agent(
        "opencode", "opencode-ai", OPENCODE, ("openai-compatible", "anthropic")
    ),
    "opencode-responses": Agent("opencode", "opencode-ai", OPENCODE, ("-compatible", "")),
    "pi": Agent("pi", "@mariozechner/pi-coding-agent", PI),
    "pi-responses": Agent(
        "pi", "@mariozechner/pi-coding-agent", PI, ("openai-completions", "openai-responses")
    ),
    "qwen": Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        (call("read_file", file_path=FILE), call("edit", file_path=FILE, **OLD_NEW)),
    ),
    "continue": Agent(
        "Continue CLI",
        "@continuedev/cli",
        (call("Read", filepath=FILE), call("Edit", file_path=FILE, **OLD_NEW)),
    ),
    "cline": Agent(
        "Cline CLI",
        "cline",
        (call("read_files", files=[{"path": FILE}]), call("editor", path=FILE, **TEXTS)),
    ),
    "aider": Agent("aider", "aider-chat==", ()),
    "mini": Agent(
        "mini-swe-agent", "mini-swe-agent==", [call("bash", command=line) for line in SHELL]
    ),
}
ENDS = {
    "aider": 'hello.py\n```\nprint("Bonjour")\n```\n',
    "mini": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
}


def answers_of(name: str) -> list[str]:
    return [*AGENTS[name].answers, ENDS.get(name, END)]


def section_of(agent: Agent) -> tuple[str, str]:
    """Returns the version in the heading of a section of the page, and the section's text."""
    found = re.search(rf"^## {agent.section} (\S+)\n(.*?)(?=^## )", PAGE, FLAGS)
    assert found is not None
    return found[1], found[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of programs by package; `bin_of` fills it."""
    return {"": tmp_path_factory.mktemp("packages")}


def bin_of(agent: Agent, installed: dict[str, Path]) -> Path:
    """Returns the folder of a client's program; installs the client at its first use."""
    if agent.package not in installed:
        folder = installed[""] / str(len(installed))
        folder.mkdir()
        version, _ = section_of(agent)
        if agent.package.endswith("=="):
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin" / "pip", "install", "-q", agent.package + version]
            subprocess.run(pip, check=True)
            installed[agent.package] = folder / "bin"
        else:
            npm = ["npm", "install", "--no-audit", "--no-fund", f"{agent.package}@{version}"]
            subprocess.run([*npm, "--prefix", folder], check=True, cwd=folder)
            installed[agent.package] = folder / "node_modules" / ".bin"
    return installed[agent.package]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which installs the agents")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_changes_a_file(name: str, tmp_path: Path, installed: dict[str, Path]) -> None:
    agent = AGENTS[name]
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / "hello.py").write_text('print("Hello")\n')
    _, text = section_of(agent)
    if agent.edits[0]:
        assert agent.edits[0] in text
        text = text.replace(*agent.edits)
    for file, content in re.findall(r"^`~/(\S+)`.*?```\w+\n(.*?)```", text, FLAGS):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(content)
    job = {
        "folder": str(tmp_path),
        "answers": [x.replace(FILE, str(project / "hello.py")) for x in answers_of(name)],
        "commands": re.findall(r"```sh\n(.*?)```", text, FLAGS)[0],
        "path": f"{bin_of(agent, installed)}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*ALONE, 'ip link set lo up; exec "$@"', "sh", sys.executable, __file__, json.dumps(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (project / "hello.py").read_text() == 'print("Bonjour")\n', done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def inside(job: dict[str, Any]) -> int:
    """Runs the commands of a client beside a server. Returns 0, or what went wrong as a number."""
    folder = Path(job["folder"])
    server = scripted(folder, job["answers"], "-np", "2", "-c", "131072", "--port", "8080")
    with closing(server) as served:
        done = subprocess.run(
            ["sh", "-ec", job["commands"]],
            cwd=folder / "project",
            env={"HOME": str(folder / "home"), "PATH": job["path"], "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
        )
        print(served.log)
    refused = re.findall(r"POST /v1/\S+ [45]\d\d", served.log)
    return done.returncode or len(refused)


if __name__ == "__main__":
    sys.exit(inside(json.loads(sys.argv[1])))
