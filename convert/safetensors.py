"""Reads safetensors files. Source: format section of huggingface/safetensors' README."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConvertError, check_file

MAX_HEADER_BYTES = 100_000_000  # longest header that the safetensors library accepts

# Bytes per element of each dtype in the format.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
# numpy types of weights; uint16 stands for bfloat16, which numpy lacks.
FLOAT_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
PACKED_DTYPES: dict[str, Any] = {"U8": np.uint8, "I64": np.int64}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file. shape: row-major. start, end: byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file. Views keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_file(path)
            with path.open("rb") as file:
                size = path.stat().st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
        self.entries = self._parse()

    def _fail(self, text: str) -> ConvertError:
        return ConvertError(f"{self.path}: corrupt safetensors file: {text}")

    def _parse(self) -> dict[str, Entry]:
        if self._map is None or len(self._map) < 8:
            raise self._fail("shorter than the 8 bytes of its header length")
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise self._fail(f"header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise self._fail(f"header of {length} bytes, but the file has {size} bytes")
        try:
            header = json.loads(self._map[8 : 8 + length], object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._fail("the header is not JSON") from error
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        self._check_cover(list(entries.values()), 8 + length, size)
        return entries

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise self._fail(f"{twice!r} occurs twice in the header")
        return result

    def _entry(self, name: str, value: Any, base: int) -> Entry:
        fields = value if isinstance(value, dict) else {}
        dtype: Any = fields.get("dtype")
        shape: Any = fields.get("shape")
        offsets: Any = fields.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise ConvertError(f"{self.path}: tensor {name!r} has the unknown dtype {dtype!r}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._fail(
                f"tensor {name!r} has an invalid shape {shape!r} or data_offsets {offsets!r}"
            )
        begin, end = offsets
        n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != n_bytes:
            raise self._fail(
                f"tensor {name!r} takes {end - begin} bytes, but {dtype} {shape} needs {n_bytes}"
            )
        return Entry(name, dtype, tuple(shape), base + begin, base + end)

    def _check_cover(self, entries: list[Entry], base: int, size: int) -> None:
        position, before = base, ""
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
            if entry.end > size:
                raise self._fail(
                    f"tensor {entry.name!r} ends at byte {entry.end}, but the file has {size} bytes"
                )
            if entry.start < position:
                raise self._fail(f"tensors {before!r} and {entry.name!r} overlap")
            if entry.start > position:
                raise self._fail(f"{entry.start - position} unused bytes before {entry.name!r}")
            position, before = entry.end, entry.name
        if position != size:
            raise self._fail(f"{size - position} unused bytes at the end")

    def view(self, name: str, *, packed: bool = False) -> NDArray[Any]:
        """Returns a zero-copy view: float32, float16, bfloat16 as uint16; integers if packed."""
        entry = self.entries[name]
        dtypes = PACKED_DTYPES if packed else FLOAT_DTYPES
        if entry.dtype not in dtypes:
            raise ConvertError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}; "
                f"{'blocks' if packed else 'weights'} must be one of {', '.join(dtypes)}"
            )
        dtype = np.dtype(dtypes[entry.dtype])
        count = math.prod(entry.shape)
        if self._map is None or count == 0:
            return np.zeros(entry.shape, dtype)
        return np.frombuffer(self._map, dtype, count, entry.start).reshape(entry.shape)

    def release(self) -> None:
        """Lets the system drop mapped pages, so that they do not count as this process's memory."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
