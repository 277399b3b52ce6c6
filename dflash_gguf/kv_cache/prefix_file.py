"""Prefix files: a GGUF file of tokens, attention rows by layer, recurrent states and checksums.

A file has one prefix, or several of the same text where a model can start only at a snapshot, the
longest first. Each prefix leaves out the K/V blocks that the one before it has.
A file that is damaged, or was made with another model, build or settings, is refused as a whole.
"""

from __future__ import annotations

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

from .._files import part_of, replacing
from ..native import Engine, Error, Prefix, PrefixTensor, ggml_version, library_build
from ..text.gguf_metadata import GgufMetadata

Bytes = NDArray[np.uint8]

PRIVATE = 0o600
"""Mode of prefix files, which hold the text of conversations."""
ARCHITECTURE = "dflash-prefix"
TOKENS, CHECKSUMS = "tokens", "checksums"
ALIGNMENT = 32
BLOCK_BYTES = 4096
"""Bytes of a block: a tensor's checksum covers the sums of 64-bit words in each block."""
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
    """Returns the properties that prefixes must share with an engine."""
    model, config = engine.model, engine.config
    shift = f" taps {config.draft_tap_shift:+}" if config.draft_tap_shift else ""
    return {
        "model": model.identity,
        "drafter": " ".join([x.identity + shift for x in engine.drafters]) or "none",
        "cache_types": f"{config.cache_type_k}/{config.cache_type_v}",
        "backend": " ".join([model.backend, *sorted(model.kernels)]),
        "build": f"{library_build()} {ggml_version()}",
    }


def save(prefixes: Sequence[Prefix], tokens: Sequence[int], engine: Engine, path: Path) -> int:
    """Writes a prefix file, returns its bytes. Errors: OSError, without leaving a partial file.

    prefixes: the prefix of all tokens, then shorter prefixes, the longest first.
    """
    rests = [prefix.without(base) for base, prefix in itertools.pairwise(prefixes)]
    try:
        return _save([prefixes[0], *rests], tokens, engine, path)
    finally:
        for rest in rests:
            rest.close()


def _save(prefixes: Sequence[Prefix], tokens: Sequence[int], engine: Engine, path: Path) -> int:
    head = _header(prefixes, identity(engine))
    n_bytes = len(head)
    with replacing(path, PRIVATE) as file:
        file.write(head)
        ids = np.asarray(tokens, dtype="<i4").view(np.uint8)
        sums = [zlib.crc32(head), _sum(ids)]
        n_bytes += _put(file, ids)

        for prefix in prefixes:

            def read(index: int, data: Bytes, prefix: Prefix = prefix) -> tuple[Bytes, int]:
                prefix.read(index, data)
                return data, _sum(data)

            for _, data, checksum in _ahead(prefix.parts(), read):
                n_bytes += _put(file, data)
                sums.append(checksum)
        n_bytes += _put(file, np.asarray(sums, dtype="<i8").view(np.uint8))
        file.flush()
        if part_of(file) is not None:
            os.fsync(file.fileno())
    return n_bytes


def load(
    engine: Engine, path: Path, make_room: Callable[[int], bool]
) -> tuple[list[int], list[Prefix]]:
    """Reads the tokens and the prefixes of a file, the prefix of all tokens first.

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
        start = values.integer("prefix.start")
        positions, rows = (
            values.array(f"prefix.{name}", "int64") for name in ("positions", "rows")
        )
    if start is None or positions is None or rows is None or not 0 < start < n_bytes:
        raise ValueError(
            f"{path}: is damaged, or of an earlier version: prefix.positions, .start or .rows is "
            "missing or wrong; save the prefix again"
        )
    ends = positions.tolist()
    if not ends or len(rows) % len(ends) or any(a <= b for a, b in itertools.pairwise([*ends, 0])):
        raise ValueError(f"{path}: is damaged: prefix.positions or .rows is wrong")
    n_tokens, n_caches = ends[0], len(rows) // len(ends)
    if not make_room(n_bytes):
        raise ValueError(f"{path}: there is no room for its {n_bytes} bytes; raise cache_ram")
    with path.open("rb") as file:
        head = file.read(start)
        ids = _get(file, np.empty(4 * min(n_tokens, n_bytes), dtype=np.uint8))
        if len(ids) != 4 * n_tokens:
            raise ValueError(f"{path}: is damaged: tensor {TOKENS} is incomplete")
        tokens = ids.view("<i4").tolist()
        prefixes: list[Prefix] = []
        n_left = n_bytes
        try:
            for end, n_rows in zip(ends, rows.reshape(-1, n_caches).tolist(), strict=True):
                base = prefixes[-1] if prefixes else None
                prefixes.append(engine.create_prefix(tokens[:end], n_rows, base))
                n_left -= sum(part.n_bytes for part in prefixes[-1].parts())
                if n_left < 0:
                    raise ValueError(f"{path}: is damaged: it is too short for its prefixes")
            if head != _header(prefixes, identity(engine)):
                raise ValueError(f"{path}: is damaged: its header does not match its tokens")
            _fill(prefixes, file, [zlib.crc32(head), _sum(np.asarray(tokens, dtype="<i4"))], path)
        except Error as error:
            _close(prefixes)
            raise ValueError(f"{path}: is damaged or too long: {error}") from None
        except BaseException:
            _close(prefixes)
            raise
    return tokens, prefixes


def _close(prefixes: Iterable[Prefix]) -> None:
    for prefix in prefixes:
        prefix.close()


def _fill(prefixes: Sequence[Prefix], file: BinaryIO, sums: list[int], path: Path) -> None:
    names = ["its header", f"tensor {TOKENS}"]

    def read(_: int, data: Bytes) -> tuple[Bytes, int]:
        data = _get(file, data)
        return data, _sum(data)

    for prefix in prefixes:
        parts = _parts(prefix)
        names += [f"tensor {part.name}" for part in parts]
        for index, data, checksum in _ahead(parts, read):
            if len(data) != parts[index].n_bytes:
                raise ValueError(f"{path}: is damaged: tensor {parts[index].name} is incomplete")
            prefix.write(index, data)
            sums.append(checksum)
    stored = _get(file, np.empty(8 * len(sums), dtype=np.uint8))
    if len(stored) != 8 * len(sums):
        raise ValueError(f"{path}: is damaged: tensor {CHECKSUMS} is incomplete")
    if file.read(1):
        raise ValueError(f"{path}: is damaged: it has bytes after its last tensor")
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


def _put(file: BinaryIO, data: Bytes) -> int:
    """Writes bytes and their padding; returns the number of both."""
    return file.write(data.data) + file.write(b"\0" * (-len(data) % ALIGNMENT))


def _get(file: BinaryIO, data: Bytes) -> Bytes:
    n_read = file.readinto(data.data)  # type: ignore[attr-defined]
    n_padding = -len(data) % ALIGNMENT if n_read == len(data) else 0
    if file.read(n_padding) != bytes(n_padding):
        raise ValueError(f"{file.name}: is damaged: a tensor is not followed by zeros")
    return data[:n_read]


def _parts(prefix: Prefix) -> list[PrefixTensor]:
    """Returns a prefix's tensors; their names begin with the prefix's length in tokens."""
    return [part._replace(name=f"{prefix.n_tokens}.{part.name}") for part in prefix.parts()]


def _header(prefixes: Sequence[Prefix], values: dict[str, str]) -> bytes:
    n_tokens = prefixes[0].n_tokens
    table: list[tuple[str, str, tuple[int, ...], int]] = [
        (TOKENS, "i32", (n_tokens,), 4 * n_tokens),
        *(
            (part.name, part.type, part.ne, part.n_bytes)
            for prefix in prefixes
            for part in _parts(prefix)
        ),
    ]
    n_sums = len(table) + 1
    table.append((CHECKSUMS, "i64", (n_sums,), 8 * n_sums))
    entries = [("general.architecture", _text(ARCHITECTURE))]
    entries += [(f"prefix.{name}", _text(value)) for name, value in values.items()]
    n_rows = [n for prefix in prefixes for n in prefix.n_rows()]
    for name, numbers in (("positions", [x.n_tokens for x in prefixes]), ("rows", n_rows)):
        array = struct.pack(f"<IIQ{len(numbers)}q", _ARRAY, _INT64, len(numbers), *numbers)
        entries.append((f"prefix.{name}", array))
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
