"""ConvertError, the exception of the converter."""

from __future__ import annotations

from pathlib import Path

from dflash_gguf import _files


class ConvertError(Exception):
    """Error that a user can correct: one sentence with the file, the value and the limit."""


def check_file(path: Path) -> None:
    """Raises ConvertError for a pipe, a folder or a pointer of Git LFS, OSError for no file."""
    try:
        _files.check_file(path)
    except ValueError as error:
        raise ConvertError(str(error)) from None
