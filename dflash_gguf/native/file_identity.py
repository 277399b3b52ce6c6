"""Identifies the content of a model's files, to match files that were made from it."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable
from itertools import takewhile

from ..convert.schema import SPLIT_ENDING

N_SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and bytes of samples of a file that identify the file, together with its size."""


def files_of(path: str) -> list[str]:
    """Returns the files of a model: the path and, for the first of split files, the later parts."""
    match = re.search(r"-00001-of-(\d{5})\.gguf$", path)
    if match is None:
        return [path]
    prefix, n = path[: match.start()], int(match[1])
    others = (prefix + SPLIT_ENDING % (i, n) for i in range(2, n + 1))
    return [path, *takewhile(os.path.exists, others)]


def stamps(path: str) -> list[tuple[int, int, int, int]]:
    """Returns device, inode, size and modification time of each existing file of a model."""
    found = [os.stat(part) for part in files_of(path) if os.path.exists(part)]
    return [(x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns) for x in found]


def file_identity(path: str) -> str:
    """Returns the size of a model, in one or several files, and a hash of samples of its bytes."""
    digest, size = hashlib.sha256(), 0
    for part in files_of(path):
        with open(part, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            for at in _samples(n_bytes):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
            size += n_bytes
    return f"{size} {digest.hexdigest()[:32]}"


def _samples(n_bytes: int) -> Iterable[int]:
    step = max(SAMPLE_BYTES, n_bytes // N_SAMPLES)
    return itertools.chain(range(0, n_bytes, step), [max(0, n_bytes - SAMPLE_BYTES)])
