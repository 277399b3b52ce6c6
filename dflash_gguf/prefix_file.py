"""Prefixes in files: one GGUF of tokens, attention rows by layer, states, and a checksum of each.

A file is written beside its name and renamed. One that is damaged, or was made of another model, by
another build or with other settings, is refused whole.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from .convert.errors import ConvertError
from .convert.gguf_header import GgufHeader, TensorInfo, read_header
from .core import Engine, Error, Prefix, create_prefix, ggml_version, library_build
from .policy.known import files_of

ARCHITECTURE = "dflash-prefix"
TOKENS, CHECKSUMS = "tokens", "checksums"
ALIGNMENT = 32
N_SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of a model file, that tell it from others of its size."""
_Row = tuple[str, int, tuple[int, ...], int]
"""Of the tensor table: name, type, sizes, bytes."""
_STRING, _INT64, _ARRAY = 8, 11, 9
_IDENTITY = {
    "model": "another model file",
    "drafter": "another drafter",
    "cache_types": "other types of keys and values",
    "backend": "another device or other kernels",
    "build": "another build of dflash-gguf or ggml",
}
"""What a prefix belongs to, and what is said of one that does not."""


def identity(engine: Engine) -> dict[str, str]:
    """What prefixes of an engine belong to. Errors: OSError."""
    model, drafter = engine.model, engine.drafter
    config = model.config
    return {
        "model": _file_identity(model.path),
        "drafter": _file_identity(drafter.path) if drafter is not None else "none",
        "cache_types": f"{config.cache_type_k}/{config.cache_type_v}",
        "backend": " ".join([model.backend, *sorted(model.kernels)]),
        "build": f"{library_build()} {ggml_version()}",
    }


def save(prefix: Prefix, tokens: Sequence[int], engine: Engine, path: Path) -> int:
    """Writes a prefix of these tokens, in place of a file of that name; its bytes.

    Errors: OSError; nothing is left behind then.
    """
    parts = prefix.parts()
    types = {kind.name.lower(): int(kind) for kind in GGMLQuantizationType}
    rows: list[_Row] = [(TOKENS, types["i32"], (len(tokens),), 4 * len(tokens))]
    rows += [(part.name, types[part.type], part.ne, part.n_bytes) for part in parts]
    rows += [(CHECKSUMS, types["i64"], (len(rows) + 1,), 8 * (len(rows) + 1))]
    head = _header(identity(engine), prefix.n_rows(), rows)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(head)
            sums = [zlib.crc32(head), _put(file, np.asarray(tokens, dtype="<i4").view(np.uint8))]
            for index, part in enumerate(parts):
                data = np.empty(part.n_bytes, dtype=np.uint8)
                prefix.read(index, data)
                sums.append(_put(file, data))
            _put(file, np.asarray(sums, dtype="<i8").view(np.uint8))
            file.flush()
            os.fsync(file.fileno())
            n_bytes = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return n_bytes


def load(engine: Engine, path: Path, make_room: Callable[[int], bool]) -> tuple[list[int], Prefix]:
    """The tokens and the prefix of a file.

    make_room: makes room for so many bytes; whether there is.
    Errors: ValueError for one that is damaged, belongs to something else, has more tokens than the
        context or more bytes than there is room for; OSError.
    """
    try:
        header = read_header(path)
    except ConvertError as error:
        raise ValueError(str(error)) from None
    n_rows = _checked(header, engine, path)
    table = list(header.tensors.values())
    n_bytes = sum(info.n_bytes for info in table)
    if not make_room(n_bytes):
        raise ValueError(f"{path}: there is no room for its {n_bytes} bytes (cache_ram)")
    with path.open("rb") as file:
        head = file.read(table[0].start)
        sums = _get(file, table[-1]).view("<i8")
        if len(sums) != len(table) or zlib.crc32(head) != sums[0]:
            raise ValueError(f"{path}: is damaged: its header has another checksum")
        tokens = _proven(file, table[0], sums[1], path).view("<i4").tolist()
        try:
            prefix = create_prefix(engine, tokens, n_rows)
        except Error as error:
            raise ValueError(f"{path}: {error}") from None
        try:
            _fill(prefix, file, table[1:-1], sums[2:], path)
        except BaseException:
            prefix.close()
            raise
    return tokens, prefix


def _fill(
    prefix: Prefix, file: BinaryIO, table: Sequence[TensorInfo], sums: Any, path: Path
) -> None:
    parts = prefix.parts()
    found = [(x.name, GGMLQuantizationType(x.type).name.lower(), x.shape[::-1]) for x in table]
    wanted = [(part.name, part.type, part.ne) for part in parts]
    if found != wanted:
        name = next((a[0] for a, b in zip(found, wanted, strict=False) if a != b), "the last")
        raise ValueError(f"{path}: tensor {name} is not one of this model's prefixes")
    for index, (info, checksum) in enumerate(zip(table, sums, strict=True)):
        prefix.write(index, _proven(file, info, checksum, path))


def _checked(header: GgufHeader, engine: Engine, path: Path) -> list[int]:
    """Rows of each cache. ValueError unless the file is a whole one of this engine."""
    values = {key: entry.value for key, entry in header.metadata.items()}
    if values.get("general.architecture") != ARCHITECTURE:
        raise ValueError(f"{path}: is no file of a prefix")
    for name, wanted in identity(engine).items():
        if values.get(f"prefix.{name}") != wanted:
            raise ValueError(f"{path}: was made with {_IDENTITY[name]}")
    names = list(header.tensors)
    rows = values.get("prefix.rows")
    is_whole = len(names) > 2 and (names[0], names[-1]) == (TOKENS, CHECKSUMS)
    if header.missing_bytes or not is_whole or not isinstance(getattr(rows, "head", 0), tuple):
        raise ValueError(f"{path}: is damaged: {header.missing_bytes} bytes are missing")
    assert rows is not None
    return [int(n) for n in rows.head]


def _put(file: BinaryIO, data: NDArray[np.uint8]) -> int:
    """Writes a tensor; its checksum."""
    file.write(data.data)
    file.write(b"\0" * (-len(data) % ALIGNMENT))
    return zlib.crc32(data.data)


def _get(file: BinaryIO, info: TensorInfo) -> NDArray[np.uint8]:
    data = np.empty(info.n_bytes, dtype=np.uint8)
    file.seek(info.start)
    n_read = file.readinto(data.data)  # type: ignore[attr-defined]
    return data[:n_read]


def _proven(file: BinaryIO, info: TensorInfo, checksum: int, path: Path) -> NDArray[np.uint8]:
    data = _get(file, info)
    if len(data) != info.n_bytes or zlib.crc32(data.data) != checksum:
        raise ValueError(f"{path}: is damaged: tensor {info.name} has another checksum")
    return data


def _header(
    values: dict[str, str],
    n_rows: Sequence[int],
    table: Sequence[_Row],
) -> bytes:
    entries = [("general.architecture", _text(ARCHITECTURE))]
    entries += [(f"prefix.{name}", _text(value)) for name, value in values.items()]
    numbers = struct.pack(f"<IQ{len(n_rows)}q", _INT64, len(n_rows), *n_rows)
    entries.append(("prefix.rows", struct.pack("<I", _ARRAY) + numbers))
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(table), len(entries))]
    parts += [_string(key) + value for key, value in entries]
    offset = 0
    for name, kind, ne, n_bytes in table:
        parts.append(_string(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        parts.append(struct.pack("<IQ", kind, offset))
        offset += n_bytes + -n_bytes % ALIGNMENT
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _text(value: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(value)


def _file_identity(path: str) -> str:
    """Of a model file of one part or several: its size, and samples of its bytes."""
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
