"""README and docs name only commands, flags, links, files and Python names that exist."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import ARCHITECTURES
from dflash_gguf.convert.__main__ import _parser as convert_parser
from vocabularies import smollm2_file

from dflash_gguf import bundled
from dflash_gguf.backend_build import command as backend
from dflash_gguf.bench import command as bench
from dflash_gguf.cli import arguments as cli_arguments
from dflash_gguf.serve import arguments as serve_arguments
from dflash_gguf.train import command as train

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/**/*.md")), ROOT / "dflash_gguf" / "bundled" / "README.md"]
COMMANDS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "convert-hf-to-gguf": convert_parser,
    "dflash-backend": backend.parser,
    "dflash-bench": bench.parser,
    "dflash-run": cli_arguments.parser,
    "dflash-serve": serve_arguments.parser,
    "dflash-train": train.parser,
}
FENCED = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
OF_OTHERS = {"--force-reinstall", "--no-cache-dir"}
"""Flags of pip that the pages name."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [x[3] for x in FENCED.finditer(text_of(page)) if x[2] == language]


def prose(page: Path) -> str:
    return FENCED.sub("", text_of(page))


def spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yields the words of our commands in a page's shell blocks and spans."""
    shell = [block.replace("\\\n", " ") for block in blocks(page, "sh")]
    lines = [line for block in shell for line in block.splitlines()]
    for block in blocks(page, "console"):
        lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    for line in [*lines, *spans(page)]:
        whole = re.sub(r"\$\((.*?)\)", r"&& \1 &&", line)
        for part in whole.split("&&"):
            words = shlex.split(part, comments=True) if part.count('"') % 2 == 0 else []
            while words and re.fullmatch(r"[A-Z_]+=.*|export", words[0]):
                del words[0]
            name = Path(words[0]).name if words else ""
            if name in COMMANDS and (line in lines or any(x.startswith("-") for x in words[1:])):
                yield [name, *words[1:]]


def test_readme_is_short_enough_to_be_read() -> None:
    assert len(text_of(README).splitlines()) <= 150


def test_readme_begins_with_two_commands_and_ci_runs_the_second() -> None:
    before, first, _ = re.split(
        r"^```sh\n(.*?)^```$", text_of(README), maxsplit=1, flags=re.M | re.S
    )
    assert "\n## " not in before
    commands = [line for line in first.splitlines() if not line.startswith("#")]
    assert len(commands) == 2
    found = subprocess.run(
        ["grep", "-m", "1", r"scripts/check\.sh$", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == commands[1:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    for name, *words in command_lines(page):
        if name == "dflash-run" and not {"-p", "-i", "-f", "--plan", "--list-devices"} & set(words):
            words += ["-p", "x"]
        try:
            COMMANDS[name]().parse_args(["1" if word == "N" else word for word in words])
        except SystemExit as error:
            assert error.code == 0, f"{name_of(page)}: {name} {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = {flag for make in COMMANDS.values() for flag in option_strings(make())} | OF_OTHERS
    programs = (*ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/exhaustive/*.py"))
    scripts = "".join(text_of(x) for x in programs)
    known |= set(re.findall(r'"(-[-\w]+)"', scripts))
    known |= set(re.findall(r"^ +(--\w+)\)", text_of(ROOT / "scripts/check.sh"), re.MULTILINE))
    for span in spans(page):
        flag = re.match(r"--?[a-z][-\w]*(?=$| )", span)
        assert flag is None or flag[0] in known, f"{name_of(page)}: {span}"


def option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from option_strings(one)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(linked), f"{name_of(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "convert|csrc|dflash_gguf|docs|scripts|tests"
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.*-]*[\w*])", text_of(page)):
        if "NAME" not in path:
            assert list(ROOT.glob(path)), f"{name_of(page)}: {path}"


def test_the_map_has_every_folder_and_no_other() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [Path(line) for line in listed.stdout.splitlines()]
    folders = {f"{x.parent.as_posix()}/" for x in files if (ROOT / x).exists()} - {"./"}
    rows = re.findall(r"^\| `([^`]+/)` \|", text_of(ROOT / "docs/develop/map.md"), re.MULTILINE)
    assert sorted(rows) == sorted(folders)


def test_every_page_can_be_reached_from_readme() -> None:
    linked = {(README.parent / x).resolve() for x in re.findall(r"\]\(([^)#]+)", text_of(README))}
    assert [name_of(x) for x in PAGES if x != README and x not in linked] == []


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "models.md"], ids=name_of)
def test_every_architecture_is_told(page: Path) -> None:
    assert set(ARCHITECTURES) <= set(spans(page))


@pytest.mark.model
@pytest.mark.parametrize(
    ("page", "index"),
    [
        (page, i)
        for page in PAGES
        if page.name != "agents.md"  # tests/exhaustive/test_real_agents.py runs its blocks
        for i in range(len(blocks(page, "python")))
    ],
    ids=str,
)
def test_python_runs(page: Path, index: int, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_file())
    (tmp_path / "drafter.gguf").symlink_to(bundled.find("smollm2").drafter)
    code = blocks(page, "python")[index]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
