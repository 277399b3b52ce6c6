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


def check_link(path: Path) -> None:
    """Raises ConvertError for a link to a file outside of the link's folder.

    A downloaded folder could link its chat template to a private file, whose text would get into a
    GGUF that is passed on. Links to the blobs of the same Hugging Face cache are allowed.
    """
    target, folder = path.resolve(), path.parent.resolve()
    if not {folder, folder.parent.parent / "blobs"} & set(target.parents):
        raise ConvertError(f"{path}: is a link to {target}, out of its folder: copy the file")
