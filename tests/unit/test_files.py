"""Files are replaced whole and only where they are regular files."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_gguf._files import (
    appending,
    check_file,
    check_output,
    message_of,
    replacing,
    write_text,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file", "x"), "x: No such file"),
        (OSError(28, "No space left"), "No space left"),
        (OSError("told"), "told"),
        (MemoryError(), "out of memory"),
        (ValueError("x is 3"), "x is 3"),
    ],
)
def test_errors_have_sentences_without_numbers(error: Exception, message: str) -> None:
    assert message_of(error) == message


def test_a_regular_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_text() == "old"
    with path.open() as reader:
        write_text(path, "new")
        assert reader.read() == "old"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "no" / "x", "new")
    assert caught.value.filename == str(tmp_path / "no" / "x")


@pytest.mark.parametrize("target", ["real", "missing"])
def test_links_stay_and_the_file_that_they_name_is_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real").write_text("old")
    (tmp_path / "link").symlink_to(f"folder/{target}")
    (tmp_path / "link-of-link").symlink_to(tmp_path / "link")
    write_text(tmp_path / "link-of-link", "new")
    assert (tmp_path / "link-of-link").is_symlink() and (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / target).read_text() == "new"


@pytest.mark.parametrize("via", ["/dev/fd", "/proc/self/fd"])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_an_open_file_is_written_into(tmp_path: Path, via: str, kind: str) -> None:
    with (tmp_path / "log").open("w+b") as log:
        log.write(b"before ")
        log.flush()
        before = os.stat(log.name).st_ino
        reader, writer = os.pipe() if kind == "pipe" else (log.fileno(), log.fileno())
        write_text(f"{via}/{writer}", "new")
        log.seek(0)
        assert os.read(reader, 99) == (b"new" if kind == "pipe" else b"before new")
        assert os.stat(log.name).st_ino == before
    if kind == "pipe":
        os.close(reader)
        os.close(writer)


@pytest.fixture
def terminal() -> Iterator[tuple[int, Path]]:
    """A device of our own, as a fault in `replacing` would destroy one of the machine."""
    ends = os.openpty()
    yield ends[0], Path(os.ttyname(ends[1]))
    for end in ends:
        os.close(end)


def test_a_device_is_written_into(tmp_path: Path, terminal: tuple[int, Path]) -> None:
    (tmp_path / "link").symlink_to(terminal[1])
    for path in (terminal[1], tmp_path / "link"):
        write_text(path, "new")
        with open(terminal[0], "rb", buffering=3, closefd=False) as screen:
            assert screen.read(3) == b"new"
    assert terminal[1].is_char_device() and (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_into_if_somebody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for write in (lambda: write_text(path, "x"), lambda: appending(path)):
        with pytest.raises(OSError, match="a pipe that nobody reads"):
            write()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "read")
    assert os.read(reader, 99) == b"read"
    os.close(reader)
    assert path.is_fifo()


def test_only_regular_files_are_read(tmp_path: Path, terminal: tuple[int, Path]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "socket", terminal[1]):
        with pytest.raises(ValueError, match=f"{path}: not a file"):
            check_file(path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("folder", "--out .*folder: is a folder, a file name is needed"),
        ("missing/x", "--out .*/x: the folder .*/missing does not exist"),
        ("file/x", "--out .*/x: Not a directory"),
        ("loop", "--out .*/loop: Too many levels of symbolic links"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=problem):
        check_output("--out", tmp_path / name)
    check_output("--out", tmp_path / "new")
    check_output("--out", "/dev/stdout")


def test_threads_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    started = threading.Barrier(2)

    def write(text: str) -> None:
        with replacing(tmp_path / "x") as file:
            started.wait()
            file.write(text.encode())

    threads = [threading.Thread(target=write, args=[text]) for text in ("a" * 9, "b" * 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "x").read_text() in ("a" * 9, "b" * 9)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
