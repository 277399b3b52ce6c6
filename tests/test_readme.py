"""The README's file tree is the repository, and CI runs the README's test command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_block(heading: str) -> list[str]:
    """Lines of the first code block under a heading."""
    match = re.search(rf"^## {heading}\n.*?^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"README.md has no code block under {heading!r}")
    return match[1].splitlines()


def expand(name: str) -> list[str]:
    """`a.{h,cpp}` as its two names."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [match[1] + x + match[3] for x in match[2].split(",")] if match else [name]


def tree_files() -> list[str]:
    """Paths of the tree: a folder ends in a slash and holds the lines indented below it."""
    found, folders = [], [(-1, "")]
    for line in filter(str.strip, code_block("Files")):
        indent = len(line) - len(line.lstrip())
        name, _, what = line.strip().partition("  ")
        while folders[-1][0] >= indent:
            folders.pop()
        if name.endswith("/"):
            folders.append((indent, folders[-1][1] + name))
        else:
            assert what.strip(), f"{name}: the tree does not say what it is"
            found += [folders[-1][1] + one for one in expand(name)]
    return found


def test_the_tree_names_every_file_and_no_other() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tree, files = tree_files(), set(listed.stdout.splitlines())
    assert len(tree) == len(set(tree))
    assert sorted(files - set(tree)) == [], "not in the README's file tree"
    assert sorted(set(tree) - files) == [], "in the README's file tree only"


def test_ci_runs_the_test_command() -> None:
    commands = [line for line in code_block("Use") if not line.startswith("#")]
    assert len(commands) == 2
    found = subprocess.run(
        ["grep", "-m", "1", r"scripts/check\.sh$", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == commands[1:]
