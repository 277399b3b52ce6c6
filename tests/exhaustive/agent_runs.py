"""Agents and SDKs as docs/agents.md configures them, and runs of each beside a scripted model.

As a script, this file is the part of a run that has loopback alone as its network.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple

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
    answers: Sequence[str | Sequence[str]]
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


def bins_of(agent: Agent, installed: dict[str, Path]) -> list[Path]:
    """Returns folders of a client's program and of Node; installs what is used first.

    installed: folders of packages, with "" for the folder of them all.
    """

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


class Setting(NamedTuple):
    """What differs from an undisturbed run.

    flags, env: of the server. ready: if the client starts when the model is loaded. cut: if a proxy
    closes the connection of the first answer to a request with tools in its middle.
    """

    flags: Sequence[str] = ("-c", "131072")
    env: dict[str, str] = {}  # noqa: RUF012
    ready: bool = True
    cut: bool = False


class Run(NamedTuple):
    """What a run left behind. log: of the client and the server. file: the text of hello.py.

    asked: the index of the script's entry for each request; -1 for one without tools.
    """

    code: int
    log: str
    file: str
    asked: list[int]


def run_agent(
    agent: Agent, folder: Path, installed: dict[str, Path], setting: Setting | None = None
) -> Run:
    """Runs a client's task in a folder, on loopback alone.

    The entries of the script are the agent's answers; see echo_server.
    """
    project, home = folder / "project", folder / "home"
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
    answers = json.dumps([*agent.answers, agent.end]).replace(FILE, str(project / "hello.py"))
    job = {
        "folder": str(folder),
        "answers": json.loads(answers),
        "commands": commands,
        "path": ":".join([*map(str, bins_of(agent, installed)), os.environ["PATH"]]),
        "setting": (setting or Setting())._asdict(),
    }
    done = subprocess.run(
        [*ALONE, 'ip link set lo up; exec "$@"', "sh", sys.executable, __file__, json.dumps(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    places = folder / "script.json.asked"
    asked = places.read_text().split() if places.exists() else []
    return Run(
        done.returncode, done.stdout, (project / "hello.py").read_text(), [int(x) for x in asked]
    )


class Proxy(ThreadingTCPServer):
    """Passes connections on to a port. Closes one in the middle of an answer with tools."""

    daemon_threads = True

    def __init__(self, port: int, target: int) -> None:
        self.has_cut = False
        self.target = target
        super().__init__(("127.0.0.1", port), Connection)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Connection(BaseRequestHandler):
    """A connection of the proxy."""

    server: Proxy

    def handle(self) -> None:
        has_tools = threading.Event()
        with socket.create_connection(("127.0.0.1", self.server.target)) as upstream:

            def ask() -> None:
                while data := self.request.recv(1 << 16):
                    if b'"tools":[' in data:
                        has_tools.set()
                    upstream.sendall(data)

            threading.Thread(target=ask, daemon=True).start()
            n_deltas = 0
            while data := upstream.recv(1 << 16):
                self.request.sendall(data)
                n_deltas += data.count(b"delta") * has_tools.is_set()
                if n_deltas > 5 and not self.server.has_cut:
                    self.server.has_cut = True
                    return


def inside(job: dict[str, Any]) -> int:
    """Runs the commands of a client beside a server; returns the exit code of the client."""
    folder, setting = Path(job["folder"]), Setting(**job["setting"])
    port = 8081 if setting.cut else 8080
    flags = ("-np", "2", "--port", str(port), *setting.flags)
    server = scripted(folder, job["answers"], *flags, env=setting.env, wait=setting.ready)
    proxy = Proxy(8080, port) if setting.cut else None
    with closing(server) as served:
        done = subprocess.run(
            ["sh", "-ec", job["commands"]],
            cwd=folder / "project",
            env={"HOME": str(folder / "home"), "PATH": job["path"], "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
        )
        print(served.log)
    assert proxy is None or proxy.has_cut
    return done.returncode


if __name__ == "__main__":
    sys.exit(inside(json.loads(sys.argv[1])))
