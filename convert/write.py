"""Writes GGUF files, and verifies them before they take their place. Source: ggml, docs/gguf.md."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from dflash_gguf._files import part_of, replaced, replacing

from .errors import ConvertError
from .gguf_header import read_header
from .plan import Metadata, TensorPlan
from .quantize import encode, n_threads
from .types import TYPE_IDS, row_bytes

VERSION = 3
ALIGNMENT = 32
RELEASE_BYTES = 32 << 20  # bytes written between two releases of mapped checkpoint pages
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_SCALARS = {
    "uint32": (_UINT32, "<I"),
    "int32": (_INT32, "<i"),
    "float32": (_FLOAT32, "<f"),
    "bool": (_BOOL, "<?"),
}
# GGUF element type of an array by the Python type of its values.
_ELEMENTS: dict[type, tuple[int, str]] = {
    bool: (_BOOL, "?"),
    int: (_INT32, "i"),
    float: (_FLOAT32, "f"),
}

Progress = Callable[[str, int, int], None]
"""Called after each chunk with tensor name, bytes written so far, and total bytes."""


def tensor_bytes(plan: TensorPlan, type_name: str) -> int:
    """Returns the bytes of a tensor's data, without padding."""
    return plan.n_rows * row_bytes(type_name, plan.n_columns)


def data_bytes(plans: Sequence[TensorPlan], types: Mapping[str, str]) -> int:
    """Returns the bytes of all tensor data, padding included."""
    return sum(_padded(tensor_bytes(plan, types[plan.name])) for plan in plans)


def write_gguf(
    path: Path,
    metadata: Metadata,
    plans: Sequence[TensorPlan],
    types: Mapping[str, str],
    progress: Progress | None = None,
    release: Callable[[], None] | None = None,
) -> None:
    """Writes a GGUF file, replacing a file of the same name; a failure leaves no file behind.

    Memory stays at a few chunks of rows. release: called regularly, frees mapped pages of the
    checkpoint. Raises ConvertError for lack of space or permission, or for bad values.
    """
    head = header_bytes(metadata, plans, types)
    total = len(head) + data_bytes(plans, types)
    try:
        _check_space(path, total)
        with replacing(path) as file:
            file.write(head)
            _write_tensors(file, plans, types, progress, release)
            file.flush()
            if (written := part_of(file)) is not None:
                _verify(written, plans, types, total)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be written: {error.strerror or error}") from error


def _check_space(path: Path, needed: int) -> None:
    target = replaced(path)
    if target is not None and (free := shutil.disk_usage(target.parent).free) < needed:
        raise ConvertError(f"{path}: needs {needed} bytes, but only {free} are free there")


def _write_tensors(
    file: BinaryIO,
    plans: Sequence[TensorPlan],
    types: Mapping[str, str],
    progress: Progress | None,
    release: Callable[[], None] | None,
) -> None:
    total, done, released = data_bytes(plans, types), 0, 0
    pool = ThreadPoolExecutor(n_threads())
    try:
        for plan in plans:
            start = done
            for chunk in encode(plan, types[plan.name], pool):
                file.write(chunk.data)
                done += chunk.nbytes
                if progress is not None:
                    progress(plan.name, done, total)
                if release is not None and done - released >= RELEASE_BYTES:
                    release()
                    released = done
            done = start + _padded(done - start)
            file.write(b"\0" * (done - start - tensor_bytes(plan, types[plan.name])))
    finally:
        pool.shutdown(cancel_futures=True)


def _verify(
    path: Path, plans: Sequence[TensorPlan], types: Mapping[str, str], n_bytes: int
) -> None:
    """Raises ConvertError if the header of the written file differs from the plan."""
    header = read_header(path)
    planned = [(p.name, p.shape, TYPE_IDS[types[p.name]]) for p in plans]
    found = [(t.name, t.shape, int(t.type)) for t in header.tensors.values()]
    if found != planned or header.file_bytes != n_bytes or header.missing_bytes:
        raise ConvertError(f"{path}: the written file differs from what was planned")


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(
    metadata: Metadata, plans: Sequence[TensorPlan], types: Mapping[str, str]
) -> bytes:
    """Returns all bytes before the tensor data, padding included."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(plans), len(metadata.values))]
    for key, (kind, value) in metadata.values.items():
        parts += [_string(key), _value(key, kind, value)]
    offset = 0
    for plan in plans:
        type_name = types[plan.name]
        sizes = plan.shape[::-1]
        parts.append(_string(plan.name))
        parts.append(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", TYPE_IDS[type_name], offset))
        offset += _padded(tensor_bytes(plan, type_name))
    head = b"".join(parts)
    return head.ljust(_padded(len(head)), b"\0")


def _string(text: str) -> bytes:
    # A damaged tokenizer.json can hold lone surrogates, which have no UTF-8 form.
    data = text.encode("utf-8", errors="replace")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, kind: str, value: Any) -> bytes:
    if kind == "raw":  # type and value, as in another GGUF file
        return bytes(value)
    if kind == "string":
        return struct.pack("<I", _STRING) + _string(value)
    if kind == "array":
        return _array(key, value)
    code, layout = _SCALARS[kind]
    try:
        return struct.pack("<I", code) + struct.pack(layout, value)
    except (struct.error, OverflowError) as error:
        raise ConvertError(f"{key}: {value!r} does not fit {kind}") from error


def _array(key: str, values: list[Any]) -> bytes:
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        raise ConvertError(f"{key}: an array needs values of one type")
    if kind is str:
        return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_string, values))
    code, letter = _ELEMENTS[kind]
    try:
        data = struct.pack(f"<{len(values)}{letter}", *values)
    except (struct.error, OverflowError) as error:
        raise ConvertError(f"{key}: a value does not fit its type") from error
    return struct.pack("<IIQ", _ARRAY, code, len(values)) + data
