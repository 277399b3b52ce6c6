"""ConvertError, the exception of the converter."""

from __future__ import annotations

from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/"


class ConvertError(Exception):
    """Error that a user can correct: one sentence with the file, the value and the limit."""


def check_content(path: Path, head: bytes) -> None:
    """Raises ConvertError if `head`, the first bytes of a file, is that of a Git LFS pointer."""
    if head.startswith(LFS_POINTER):
        raise ConvertError(f"{path}: is a pointer of Git LFS, not the file: run `git lfs pull`")
