"""Opens files safely: models are regular files, and no device, pipe or link is ever replaced."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

AnyPath = str | os.PathLike[str]
AnyPaths = AnyPath | Sequence[AnyPath] | None
"""Path, sequence of paths, or None where no file is given."""
SHARED = 0o666
"""Mode of new files, less the umask."""


LFS_POINTER = b"version https://git-lfs.github.com/"


def message_of(error: Exception) -> str:
    """Returns the sentence of an error, without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else repr(error))


def listed_paths(paths: AnyPaths) -> list[AnyPath]:
    """Returns the paths as a list."""
    if paths is None:
        return []
    if isinstance(paths, Sequence) and not isinstance(paths, str):
        return list(paths)
    return [paths]


def check_file(path: AnyPath) -> None:
    """Raises ValueError for a path that cannot name a model's file.

    A pipe would be waited for, and a pointer of Git LFS stands for a file that is elsewhere.
    Errors: OSError for a missing file.
    """
    mode = os.stat(os.fspath(path)).st_mode  # a number would name an open file
    if not stat.S_ISREG(mode):
        what = " but a folder" if stat.S_ISDIR(mode) else ""
        raise ValueError(f"{os.fspath(path)}: not a file{what}")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(
                f"{os.fspath(path)}: is a pointer of Git LFS, not the file: run `git lfs pull`"
            )


def replaced(path: AnyPath) -> Path | None:
    """Returns the file that a write to `path` replaces, with links followed.

    None if `path` names something else: a device, a pipe, or an open file such as /dev/stdout.
    Errors: OSError, also for a folder.
    """
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, a file name is needed", path)
        if not stat.S_ISREG(mode):
            return None
    target = Path(path)
    while target.is_symlink():
        folder = target.parent.resolve()
        if Path("/proc") in folder.parents:
            return None
        target = folder / os.readlink(target)
    return target


def check_output(flag: str, path: AnyPath) -> None:
    """Raises ValueError if the output file of a flag cannot be written, before any work is done.

    A pipe without a reader is not an error yet.
    """
    try:
        target = replaced(path)
        problem = None if target is None else _problem_of_folder(target.parent)
    except OSError as error:
        problem = error.strerror
    if problem:
        raise ValueError(f"{flag} {os.fspath(path)}: {problem}")


def _problem_of_folder(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written"
    return None


def appending(path: AnyPath) -> BinaryIO:
    """Opens a file to append to; OSError for a pipe without a reader, which would be waited for."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error = OSError(error.errno, "a pipe that nobody reads, or a socket", os.fspath(path))
        raise error from None
    os.set_blocking(file, True)
    return open(file, "ab")


@contextmanager
def replacing(path: AnyPath, mode: int = SHARED) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends, if it ends without error.

    The file keeps the mode and, where permitted, the owner of the one that it replaces. Links are
    followed; what is no regular file is written into. mode: another one than SHARED is the file's,
    whatever the replaced one had. Errors: OSError.
    """
    target = replaced(path)
    if target is None:
        with appending(path) as file:
            yield file
        return
    part = target.with_name(f".dflash-{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.unlink(missing_ok=True)
        # Mode x (O_EXCL) fails if somebody has put a link at this path since the unlink.
        opened = open(part, "x+b", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    try:
        with opened as file:
            yield file
        with suppress(OSError):
            old = target.stat()
            if mode == SHARED:
                part.chmod(stat.S_IMODE(old.st_mode))
            os.chown(part, old.st_uid, old.st_gid)
        part.replace(target)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # that of a full disk names no file
        raise
    finally:
        part.unlink(missing_ok=True)


def write_text(path: AnyPath, text: str) -> None:
    """Writes a text file in UTF-8; replaces an existing file only once all is written."""
    with replacing(path) as file:
        file.write(text.encode())


def part_of(file: BinaryIO) -> Path | None:
    """Returns the path of a temporary file that `replacing` opened; None for a device or pipe."""
    return Path(file.name) if isinstance(file.name, str) else None
