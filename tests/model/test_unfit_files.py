"""Readers of models refuse pipes, folders and pointers of Git LFS; names may be any bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_gguf.convert.__main__ import main as convert

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.bench.command import main as bench
from dflash_gguf.cli import main as run
from dflash_gguf.serve.command import main as serve

TINY = bundled.find("python-tiny")
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a file"),
    "folder": (Path.mkdir, "not a file but a folder"),
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "is a pointer of Git LFS, not the file: run `git lfs pull`",
    ),
}
COMMANDS: dict[str, Callable[[str], int]] = {
    "target": lambda path: run(["-p", "a", "-m", path]),
    "whole context": lambda path: run(["-p", "a", "-c", "0", "-m", path]),
    "plan": lambda path: run(["--plan", "-m", path]),
    "drafter": lambda path: run(["-p", "a", "-m", str(TINY.target), "-md", path]),
    "prompt cache": lambda path: run(["-p", "a", "-m", "python-tiny", "--prompt-cache", path]),
    "inspect": lambda path: convert(["--inspect", path]),
    "bench": lambda path: bench(["--pair", path, path]),
    "server": lambda path: serve(["--port", "0", "-m", path]),
    "server's drafter": lambda path: serve(["--port", "0", "-m", "python-tiny", "-md", path]),
}


@pytest.fixture(params=KINDS)
def unfit(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    make, sentence = KINDS[request.param]
    make(tmp_path / "x.gguf")
    return tmp_path / "x.gguf", sentence


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_them(
    unfit: tuple[Path, str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sentence = unfit
    try:
        code = COMMANDS[command](str(path))
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1]
    if command == "prompt cache" and path.is_dir():
        sentence = "is a folder"
    assert said.startswith("error: ") and str(path) in said and sentence in said


def test_python_refuses_them(unfit: tuple[Path, str]) -> None:
    path, sentence = unfit
    for files in ((path, None), (TINY.target, path)):
        with pytest.raises((ValueError, dflash_gguf.Error), match=f"{path}: {sentence}"):
            dflash_gguf.load(files[0], drafter=files[1])
    decoder = dflash_gguf.load("python-tiny", n_ctx=64)
    with decoder, pytest.raises((ValueError, dflash_gguf.Error), match=f"{path}: {sentence}"):
        decoder.load_prefix(path)


def test_names_that_are_not_utf8_name_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, prefix = (tmp_path / os.fsdecode(b"\xff" + x) for x in (b"t", b"d", b"p"))
    shutil.copy(TINY.target, target)
    shutil.copy(TINY.drafter, drafter)
    with dflash_gguf.load(target, drafter=drafter, n_ctx=64) as decoder:
        tokens = decoder.generate("def f(x):", max_tokens=4).tokens
        decoder.save_prefix(prefix, decoder.tokenize("def f(x"))
    with dflash_gguf.load("python-tiny", n_ctx=64) as decoder:
        assert decoder.load_prefix(prefix)
        assert decoder.generate("def f(x):", max_tokens=4).tokens == tokens
    assert convert(["--inspect", str(target)]) == 0
    capsys.readouterr()
    assert serve(["--port", "0", "-m", str(target)]) == 1
    assert "the name is not UTF-8" in capsys.readouterr().err


def test_a_missing_file_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        dflash_gguf.load(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        dflash_gguf.load("python-tiny", drafter=tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        dflash_gguf.plan(tmp_path / "absent.gguf")
    with pytest.raises(TypeError, match="not bool"):  # and the file that is open as 1 stays open
        dflash_gguf.load("python-tiny", drafter=True)  # type: ignore[arg-type]
    os.fstat(1)
