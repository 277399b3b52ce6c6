"""Commands and their child processes import nothing from the current folder.

A downloaded model's folder may contain an argparse.py.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dflash_gguf._run_module import module_command
from dflash_gguf.bundled import TARGET
from dflash_gguf.native.ggml import extra_buffer_types

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["-m", "python-tiny", "-t", "1", "-c", "256"]
MINE = "import argparse, json, sys; print(json.dumps([__name__, *sys.argv]))"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fills the current folder with modules that report their import; returns the report."""
    report, folder = tmp_path / "report", tmp_path / "current"
    folder.mkdir()
    names = {module.name for module in pkgutil.iter_modules()} | sys.stdlib_module_names
    for name in names | {"dflash_gguf", "sitecustomize", "usercustomize"}:
        code = f"open({str(report)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(3)\n"
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return report


def start(command: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sysconfig.get_path("scripts"), command)), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(trap: Path, said: str, words: str) -> None:
    """Asserts that no trap was imported and that the output contains `words`."""
    assert not trap.exists(), f"imported from the current folder: {trap.read_text()}"
    assert words in said, said


def check_trials(trap: Path) -> None:
    if types := extra_buffer_types():
        file = trap.parent / "cache" / "dflash-gguf" / "buffer-types.json"
        assert set(json.loads(file.read_text())["value"]) == set(types)


def test_dflash_run(trap: Path) -> None:
    said, _ = start("dflash-run", *MODEL, "-n", "1", "-p", "a").communicate()
    check(trap, said, "tokens")
    check_trials(trap)


def test_dflash_bench(trap: Path) -> None:
    prompts = trap.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "a"}')
    options = ["-f", str(prompts), "-n", "2", "--settings", "none", *MODEL[2:]]
    said, _ = start("dflash-bench", "--pair", "python-tiny", *options).communicate()
    check(trap, said, '"setting": "none"')
    check_trials(trap)


def test_dflash_serve(trap: Path) -> None:
    said = ""
    with start("dflash-serve", *MODEL, "--port", "0") as server:
        assert server.stdout is not None
        for line in server.stdout:
            said += line
            if "loaded" in line or trap.exists():
                break
        server.terminate()
    check(trap, said, "loaded")
    check_trials(trap)


def test_dflash_backend(trap: Path) -> None:
    cache = ["--cache", str(trap.parent / "modules")]
    said, _ = start("dflash-backend", "list", *cache).communicate()
    check(trap, said, "CPU: ")
    no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    said, _ = start("dflash-backend", "build", "vulkan", *cache, **no_index).communicate()
    check(trap, said, "No matching distribution found")


def test_convert_hf_to_gguf(trap: Path) -> None:
    said, _ = start("convert-hf-to-gguf", "--inspect", str(TARGET)).communicate()
    check(trap, said, "general.architecture")


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("place", ["PYTHONPATH", "PYTHONUSERBASE"])
def test_a_child_imports_from_the_users_folders(trap: Path, place: str, safe_path: str) -> None:
    folder = base = trap.with_name("users")
    if place == "PYTHONUSERBASE":
        scheme = sysconfig.get_preferred_scheme("user")
        folder = Path(sysconfig.get_path("purelib", scheme, {"userbase": str(base)}))
    folder.mkdir(parents=True)
    module = folder / "mine.py"
    module.write_text(MINE)
    # A virtual environment's python ignores the user's site folder.
    python = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")
    done = subprocess.run(
        [str(python), *module_command("mine")[1:], "a", "b"],
        env={**os.environ, "PYTHONSAFEPATH": safe_path, place: str(base)},
        capture_output=True,
        text=True,
    )
    check(trap, done.stdout + done.stderr, "mine.py")
    assert json.loads(done.stdout) == ["__main__", str(module), "a", "b"]


def test_one_module_starts_python() -> None:
    ways = ("sys.executable", "multiprocessing", "ProcessPoolExecutor")
    found = {
        path.name
        for folder in ("dflash_gguf", "convert")
        for path in (ROOT / folder).rglob("*.py")
        if any(way in path.read_text(encoding="utf-8") for way in ways)
    }
    assert found == {"_run_module.py"}
