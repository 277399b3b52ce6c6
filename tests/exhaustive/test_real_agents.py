"""Agents and SDKs, as docs/agents.md configures them, change a file on a scripted model's word."""

from __future__ import annotations

import json
import os
import platform
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
NODE = "node-linux-" + {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "none")
"""Package with Node 22, which clients need."""
SDK_TASKS = Path(__file__).with_name("sdk_tasks.py")
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

    answers: of the model, before `end`. edits: texts of the configuration, each with another.
    task: of sdk_tasks.py, with its arguments, for an SDK.
    """

    section: str
    package: str
    answers: Sequence[str]
    edits: Sequence[tuple[str, str]] = ()
    end: str = END
    task: str = ""


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
        [('model_catalog_json = "catalog.json"', "")],
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
        "opencode", "opencode-ai", OPENCODE, [("openai-compatible", "anthropic")]
    ),
    "opencode-responses": Agent("opencode", "opencode-ai", OPENCODE, [("-compatible", "")]),
    "pi": Agent("pi", "@mariozechner/pi-coding-agent", PI),
    "pi-responses": Agent(
        "pi", "@mariozechner/pi-coding-agent", PI, [("openai-completions", "openai-responses")]
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
    "aider": Agent("aider", "aider-chat==", (), end='hello.py\n```\nprint("Bonjour")\n```\n'),
    "mini": Agent(
        "mini-swe-agent",
        "mini-swe-agent==",
        [call("bash", command=line) for line in SHELL],
        end=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
}
REPORT = {"file": "hello.py", "greeting": "Bonjour"}
CHANGE = {"path": "hello.py", "old": "Hello", "new": "Bonjour"}
READ_EDIT = (call("read", path="hello.py"), call("edit", **CHANGE))
NO_V1 = ("8080/v1", "8080")


def sdk(section: str, package: str, task: str, end: str, *edits: tuple[str, str]) -> Agent:
    """Returns an SDK whose last answer is `end`, behind two calls unless it is instructor."""
    has_tools = not task.startswith("instructor")
    return Agent(section, package, READ_EDIT if has_tools else (), edits, end, task)


def langchain(method: str, *edits: tuple[str, str], package: str = "langchain-openai") -> Agent:
    end = call("Report", **REPORT) if method == "function_calling" else json.dumps(REPORT)
    return sdk(package, f"{package}==", f"langchain {method}", end, *edits)


def pydantic_ai(output: str, *edits: tuple[str, str]) -> Agent:
    end = call("final_result", **REPORT) if output == "tool" else json.dumps(REPORT)
    package = "pydantic-ai-slim[openai,anthropic]=="
    return sdk("pydantic-ai", package, f"pydantic_ai {output}", end, *edits)


def instructor(mode: str, *edits: tuple[str, str]) -> Agent:
    end = call("PartialChange", **CHANGE) if "TOOLS" in mode else json.dumps(CHANGE)
    edits = (("Mode.TOOLS", f"Mode.{mode}"), *edits)
    return sdk("instructor", "instructor[anthropic]==", "instructor", end, *edits)


AGENTS_SDK = ("OpenAI Agents SDK", "openai-agents==", "openai_agents", json.dumps(REPORT))
BY_RESPONSES = ('api_key="any")', 'api_key="any", use_responses_api=True)')
BY_MESSAGES = [
    *(("OpenAIChat", "Anthropic"), ("OpenAIP", "AnthropicP"), (".openai", ".anthropic"), NO_V1),
]
AGENTS |= {
    "openai-agents": sdk(*AGENTS_SDK),
    "openai-agents-chat": sdk(*AGENTS_SDK, ("OpenAIResponses", "OpenAIChatCompletions")),
    **{f"langchain-{x}": langchain(x) for x in ("json_schema", "function_calling", "json_mode")},
    **{
        f"langchain-responses-{x}": langchain(x, BY_RESPONSES)
        for x in ("json_schema", "function_calling")
    },
    **{
        f"langchain-messages-{x}": langchain(x, package="langchain-anthropic")
        for x in ("json_schema", "function_calling")
    },
    **{f"pydantic-ai-{x}": pydantic_ai(x) for x in ("tool", "native", "prompted")},
    **{
        f"pydantic-ai-responses-{x}": pydantic_ai(x, ("OpenAIChat", "OpenAIResponses"))
        for x in ("tool", "native")
    },
    **{f"pydantic-ai-messages-{x}": pydantic_ai(x, *BY_MESSAGES) for x in ("tool", "prompted")},
    **{
        f"instructor-{mode}": instructor(mode)
        for mode in ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")
    },
    **{
        f"instructor-messages-{mode}": instructor(
            mode, ("OpenAI", "Anthropic"), ("openai", "anthropic"), NO_V1
        )
        for mode in ("TOOLS", "JSON")
    },
}


def section_of(agent: Agent) -> tuple[str, str]:
    """Returns the version in the heading of a section of the page, and the section's text."""
    found = re.search(rf"^## {agent.section} (\S+)\n(.*?)(?=^## )", PAGE, FLAGS)
    assert found is not None
    return found[1], found[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of packages; `bins_of` fills it."""
    return {"": tmp_path_factory.mktemp("packages")}


def bins_of(agent: Agent, installed: dict[str, Path]) -> list[Path]:
    """Returns folders of a client's program and of Node; installs what is used first."""

    def folder_of(package: str, version: str) -> Path:
        if package not in installed:
            folder = installed[package] = installed[""] / str(len(installed))
            folder.mkdir()
            if package.endswith("=="):
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
                pip = [folder / "bin" / "pip", "install", "-q", package + version]
                subprocess.run(pip, check=True)
            else:
                npm = ["npm", "install", "--no-audit", "--no-fund", f"{package}@{version}"]
                subprocess.run([*npm, "--prefix", folder], check=True, cwd=folder)
        return installed[package]

    folder = folder_of(agent.package, section_of(agent)[0])
    if agent.package.endswith("=="):
        return [folder / "bin"]
    modules = Path("node_modules")
    return [folder / modules / ".bin", folder_of(NODE, "22.23.3") / modules / NODE / "bin"]


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
    for edit in agent.edits:
        assert edit[0] in text
        text = text.replace(*edit)
    for file, content in re.findall(r"^`~/(\S+)`.*?```\w+\n(.*?)```", text, FLAGS):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(content)
    if agent.task:
        (home / "configuration.py").write_text(re.findall(r"```python\n(.*?)```", text, FLAGS)[0])
        commands = f"PYTHONPATH=$HOME python {SDK_TASKS} {agent.task}"
    else:
        commands = re.findall(r"```sh\n(.*?)```", text, FLAGS)[0]
    answers = [*agent.answers, agent.end]
    job = {
        "folder": str(tmp_path),
        "answers": [x.replace(FILE, str(project / "hello.py")) for x in answers],
        "commands": commands,
        "path": ":".join([*map(str, bins_of(agent, installed)), os.environ["PATH"]]),
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
