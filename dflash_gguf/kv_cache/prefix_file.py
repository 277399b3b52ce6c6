"""Prefix files: a GGUF file of tokens, attention rows by layer, recurrent states and checksums.

A file is written under a temporary name, then renamed. A file that is damaged, or was made with
another model, build or settings, is refused as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..native import Engine, Error, Prefix, PrefixTensor, ggml_version, library_build
from ..text.gguf_metadata import GgufMetadata, files_of

Bytes = NDArray[np.uint8]

ARCHITECTURE = "dflash-prefix"
TOKENS, CHECKSUMS = "tokens", "checksums"
ALIGNMENT = 32
BLOCK_BYTES = 4096
"""Bytes of a block: a tensor's checksum covers the sums of 64-bit words in each block."""
N_SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and bytes of samples of a model file that identify the file, together with its size."""
TYPES = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8},
    **{"iq4_nl": 20, "i32": 26, "i64": 27, "bf16": 30},
}
"""Numbers of tensor types in GGUF."""
_STRING, _INT64, _ARRAY = 8, 11, 9
_IDENTITY = {
    "model": "another model file",
    "drafter": "another drafter",
    "cache_types": "other types of keys and values",
    "backend": "another device or other kernels",
    "build": "another build of dflash-gguf or ggml",
}
"""Properties that a prefix must share with an engine, and the error message for each mismatch."""


def identity(engine: Engine) -> dict[str, str]:
    """Returns the properties that prefixes must share with an engine. Errors: OSError."""
    model, drafter = engine.model, engine.drafter
    config = engine.config
    return {
        "model": _file_identity(model.path),
        "drafter": _file_identity(drafter.path) if drafter is not None else "none",
        "cache_types": f"{config.cache_type_k}/{config.cache_type_v}",
        "backend": " ".join([model.backend, *sorted(model.kernels)]),
        "build": f"{library_build()} {ggml_version()}",
    }


def save(prefix: Prefix, tokens: Sequence[int], engine: Engine, path: Path) -> int:
    """Writes a prefix file, returns its bytes. Errors: OSError, without leaving a partial file."""
    head, parts = _header(prefix, len(tokens), identity(engine)), prefix.parts()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(head)
            ids = np.asarray(tokens, dtype="<i4").view(np.uint8)
            sums = [zlib.crc32(head), _sum(ids)]
            _put(file, ids)

            def read(index: int, data: Bytes) -> tuple[Bytes, int]:
                prefix.read(index, data)
                return data, _sum(data)

            for _, data, checksum in _ahead(parts, read):
                _put(file, data)
                sums.append(checksum)
            _put(file, np.asarray(sums, dtype="<i8").view(np.uint8))
            file.flush()
            os.fsync(file.fileno())
            n_bytes = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return n_bytes


def load(engine: Engine, path: Path, make_room: Callable[[int], bool]) -> tuple[list[int], Prefix]:
    """Reads the tokens and the prefix of a file.

    make_room: makes room for a number of bytes; False if it cannot. Errors: OSError; ValueError for
    a damaged file, another engine's file, or one too large for the context or the memory.
    """
    n_bytes = path.stat().st_size
    with GgufMetadata(path) as values:
        if values.text("general.architecture") != ARCHITECTURE:
            raise ValueError(f"{path}: is not a prefix file; save_prefix writes such files")
        for name, wanted in identity(engine).items():
            if values.text(f"prefix.{name}") != wanted:
                raise ValueError(f"{path}: was made with {_IDENTITY[name]}; save the prefix again")
        n_tokens, start = (values.integer(f"prefix.{name}") for name in ("tokens", "start"))
        rows = values.array("prefix.rows", "int64")
    if n_tokens is None or start is None or rows is None or not 0 < start < n_bytes:
        raise ValueError(f"{path}: is damaged: prefix.tokens, .start or .rows is missing or wrong")
    if not make_room(n_bytes):
        raise ValueError(f"{path}: there is no room for its {n_bytes} bytes; raise cache_ram")
    with path.open("rb") as file:
        head = file.read(start)
        ids = _get(file, np.empty(4 * min(n_tokens, n_bytes), dtype=np.uint8))
        if len(ids) != 4 * n_tokens:
            raise ValueError(f"{path}: is damaged: tensor {TOKENS} is incomplete")
        tokens = ids.view("<i4").tolist()
        try:
            prefix = engine.create_prefix(tokens, rows.tolist())
        except Error as error:
            raise ValueError(f"{path}: is damaged or too long: {error}") from None
        try:
            if head != _header(prefix, n_tokens, identity(engine)):
                raise ValueError(f"{path}: is damaged: its header does not match its tokens")
            _fill(prefix, file, [zlib.crc32(head), _sum(np.asarray(tokens, dtype="<i4"))], path)
        except BaseException:
            prefix.close()
            raise
    return tokens, prefix


def _fill(prefix: Prefix, file: BinaryIO, sums: list[int], path: Path) -> None:
    parts = prefix.parts()

    def read(_: int, data: Bytes) -> tuple[Bytes, int]:
        data = _get(file, data)
        return data, _sum(data)

    for index, data, checksum in _ahead(parts, read):
        if len(data) != parts[index].n_bytes:
            raise ValueError(f"{path}: is damaged: tensor {parts[index].name} is incomplete")
        prefix.write(index, data)
        sums.append(checksum)
    stored = _get(file, np.empty(8 * len(sums), dtype=np.uint8))
    if len(stored) != 8 * len(sums):
        raise ValueError(f"{path}: is damaged: tensor {CHECKSUMS} is incomplete")
    names = ["its header", *(f"tensor {name}" for name in (TOKENS, *(x.name for x in parts)))]
    for name, have, wanted in zip(names, sums, stored.view("<i8").tolist(), strict=True):
        if have != wanted:
            raise ValueError(f"{path}: is damaged: {name} has another checksum")


def _sum(data: NDArray[Any]) -> int:
    """Returns the CRC-32 of block sums, as a CRC-32 of all bytes would be slower than a disk."""
    data = data.view(np.uint8)
    n = len(data) - len(data) % BLOCK_BYTES
    sums = data[:n].view("<u8").reshape(-1, BLOCK_BYTES // 8).sum(axis=1, dtype="<u8")
    return zlib.crc32(data[n:].data, zlib.crc32(sums.data))


def _ahead(
    parts: Sequence[PrefixTensor], read: Callable[[int, Bytes], tuple[Bytes, int]]
) -> Iterator[tuple[int, Bytes, int]]:
    """Yields index, bytes and checksum of each tensor, while a thread reads the next tensor."""
    spare = [np.empty(max((part.n_bytes for part in parts), default=0), np.uint8) for _ in "ab"]
    with ThreadPoolExecutor(1) as thread:
        work: Future[tuple[Bytes, int]] | None = None
        for index in range(len(parts) + 1):
            done = work
            if index < len(parts):
                work = thread.submit(read, index, spare[index % 2][: parts[index].n_bytes])
            if done is not None:
                yield index - 1, *done.result()


def _put(file: BinaryIO, data: Bytes) -> None:
    file.write(data.data)
    file.write(b"\0" * (-len(data) % ALIGNMENT))


def _get(file: BinaryIO, data: Bytes) -> Bytes:
    n_read = file.readinto(data.data)  # type: ignore[attr-defined]
    file.seek(-len(data) % ALIGNMENT, os.SEEK_CUR)
    return data[:n_read]


def _header(prefix: Prefix, n_tokens: int, values: dict[str, str]) -> bytes:
    parts, n_rows = prefix.parts(), prefix.n_rows()
    table: list[tuple[str, str, tuple[int, ...], int]] = [
        (TOKENS, "i32", (n_tokens,), 4 * n_tokens),
        *((part.name, part.type, part.ne, part.n_bytes) for part in parts),
    ]
    n_sums = len(table) + 1
    table.append((CHECKSUMS, "i64", (n_sums,), 8 * n_sums))
    entries = [("general.architecture", _text(ARCHITECTURE))]
    entries += [(f"prefix.{name}", _text(value)) for name, value in values.items()]
    numbers = struct.pack(f"<IQ{len(n_rows)}q", _INT64, len(n_rows), *n_rows)
    entries.append(("prefix.rows", struct.pack("<I", _ARRAY) + numbers))
    entries.append(("prefix.tokens", struct.pack("<Iq", _INT64, n_tokens)))
    infos, offset = [], 0
    for name, kind, ne, n_bytes in table:
        infos.append(_string(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        infos.append(struct.pack("<IQ", TYPES[kind], offset))
        offset += n_bytes + -n_bytes % ALIGNMENT
    start = _string("prefix.start") + struct.pack("<I", _INT64)
    parts_of = [b"GGUF", struct.pack("<IQQ", 3, len(table), len(entries) + 1)]
    parts_of += [_string(key) + value for key, value in entries]
    n_head = sum(map(len, (*parts_of, start, *infos))) + 8
    n_head += -n_head % ALIGNMENT
    head = b"".join([*parts_of, start, struct.pack("<q", n_head), *infos])
    return head.ljust(n_head, b"\0")


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _text(value: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(value)


def _file_identity(path: str) -> str:
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
