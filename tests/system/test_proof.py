"""Extra buffer types are tried in a child process, and results are cached for one ggml build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_gguf import _cache_dir
from dflash_gguf.native import proof
from dflash_gguf.native._ffi import ggml_library
from dflash_gguf.native.ggml import extra_buffer_types
from dflash_gguf.native.proof import proven_buffer_types


class Children:
    """Fake child processes: an ending for each buffer type, and the types that were tried."""

    def __init__(self, **endings: str) -> None:
        self.endings = endings
        self.tried: list[str] = []

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        """Replaces subprocess.run by a real child that ends as specified."""
        name = command[-1]
        self.tried.append(name)
        ending = self.endings[name]
        if ending == "hangs":
            raise subprocess.TimeoutExpired(command, 60)
        return _run([sys.executable, "-c", ending], **options)  # type: ignore[call-overload, no-any-return]


_run = subprocess.run
WORKS = "pass"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
WRONG = f"raise SystemExit({proof.REFUTED})"
BROKEN = "raise ImportError('half an installation')"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libggml.so"
    path.write_bytes(b"one build")
    return path


def use(monkeypatch: pytest.MonkeyPatch, **endings: str) -> Children:
    children = Children(**endings)
    monkeypatch.setattr(proof.subprocess, "run", children.run)
    return children


def test_only_what_runs_and_multiplies_rightly_is_proven(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, REPACK=WORKS, AMX=CRASHES, ODD=WRONG)
    assert proven_buffer_types(["AMX", "REPACK", "ODD"], library) == ["REPACK"]


def test_a_settled_trial_is_not_repeated(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = use(monkeypatch, REPACK=WORKS, AMX=CRASHES, ODD=WRONG)
    for _ in range(2):
        assert proven_buffer_types(["AMX", "REPACK"], library) == ["REPACK"]
    assert children.tried == ["AMX", "REPACK"]
    assert proven_buffer_types(["AMX", "REPACK", "ODD"], library) == ["REPACK"]
    assert children.tried == ["AMX", "REPACK", "ODD"]


@pytest.mark.parametrize("ending", [BROKEN, "hangs"])
def test_a_trial_that_settled_nothing_is_repeated(
    library: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    children = use(monkeypatch, REPACK=ending)
    assert proven_buffer_types(["REPACK"], library) == []
    children.endings["REPACK"] = WORKS
    assert proven_buffer_types(["REPACK"], library) == ["REPACK"]


def test_another_build_of_ggml_is_tried_again(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = use(monkeypatch, AMX=CRASHES)
    proven_buffer_types(["AMX"], library)
    library.write_bytes(b"another build")
    children.endings["AMX"] = WORKS
    assert proven_buffer_types(["AMX"], library) == ["AMX"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": 1}', "\0" * 9])
def test_a_damaged_memory_is_replaced(
    library: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    use(monkeypatch, REPACK=WORKS)
    proven_buffer_types(["REPACK"], library)
    file = _cache_dir.cache_folder() / "buffer-types.json"
    file.write_text(content)
    assert proven_buffer_types(["REPACK"], library) == ["REPACK"]
    assert json.loads(file.read_text())["value"] == {"REPACK": True}
    assert list(file.parent.iterdir()) == [file]


def test_a_damaged_entry_is_not_trusted(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, REPACK=WORKS)
    proven_buffer_types(["REPACK"], library)
    file = _cache_dir.cache_folder() / "buffer-types.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "value": ["REPACK"]}))
    assert proven_buffer_types(["REPACK"], library) == ["REPACK"]


def test_without_a_place_to_remember_it_is_tried_each_time(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    children = use(monkeypatch, REPACK=WORKS)
    for _ in range(2):
        assert proven_buffer_types(["REPACK"], library) == ["REPACK"]
    assert children.tried == ["REPACK", "REPACK"]


def test_the_real_trial_settles_every_type_of_this_machine() -> None:
    names = extra_buffer_types()
    proven = proven_buffer_types(names, ggml_library())
    runs = json.loads((_cache_dir.cache_folder() / "buffer-types.json").read_text())["value"]
    assert [name for name in names if runs[name]] == proven
    assert "CPU_REPACK" not in names or "CPU_REPACK" in proven
