"""Reads the metadata of a GGUF file: keys and values, not the tensors.

Values are decoded on demand, so that opening a file with a large vocabulary takes milliseconds.
Every length is checked against the size of the file. Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files import check_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY_BYTES = 65535
BOOL, STRING, ARRAY = 7, 8, 9
TYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool"),
    *("string", "array", "uint64", "int64", "float64"),
)
DTYPES = {
    code: np.dtype("uint8" if name == "bool" else name).newbyteorder("<")
    for code, name in enumerate(TYPE_NAMES)
    if code not in (STRING, ARRAY)
}
"""numpy types of scalars and array items, by GGUF type code."""
NUMBERS = {(code, code) for code, dtype in DTYPES.items() if code != BOOL}
INTEGERS = {(code, code) for code, dtype in DTYPES.items() if dtype.kind in "iu" and code != BOOL}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """Position of one key and its value in the file, in bytes.

    type: GGUF type code. item_type, count: of an array's items, else `type` and 1. begin: start of
    the key. start: start of the value, after type codes and array length. end: end of both.
    """

    type: int
    item_type: int
    count: int
    begin: int
    start: int
    end: int

    @property
    def type_name(self) -> str:
        """Name of the value's type for error messages, such as "uint32" or "array of string"."""
        name = TYPE_NAMES[self.item_type]
        return f"array of {name}" if self.type == ARRAY else name


class GgufMetadata:
    """The metadata of one GGUF file. ValueError for a damaged file names it and the defect.

    Typed reads return None for a missing key and raise ValueError for a value of another type.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Finds all metadata entries; OSError if the file cannot be read."""
        self.path = os.fspath(path)
        check_file(self.path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ValueError(f"{self.path}: has {size} bytes, too short for a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.entries: dict[str, MetadataEntry] = {}
        self._string_ends: dict[str, list[int]] = {}
        try:
            self._walk()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the file; its values can no longer be read."""
        self._data.close()

    def __enter__(self) -> GgufMetadata:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def text(self, key: str) -> str | None:
        entry = self._typed(key, {(STRING, STRING)}, "string")
        if entry is None:
            return None
        try:
            return self._data[entry.start + 8 : entry.end].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {key} is not valid UTF-8") from None

    def integer(self, key: str) -> int | None:
        entry = self._typed(key, INTEGERS, "an integer")
        return None if entry is None else int(self._scalar(entry))

    def number(self, key: str) -> int | float | None:
        """Returns an integer, or a float with the digits of a float32."""
        entry = self._typed(key, NUMBERS, "a number")
        if entry is None:
            return None
        value = self._scalar(entry)
        return int(value) if (entry.type, entry.item_type) in INTEGERS else float(f"{value:.7g}")

    def boolean(self, key: str) -> bool | None:
        entry = self._typed(key, {(BOOL, BOOL)}, "bool")
        return None if entry is None else bool(self._scalar(entry))

    def array(self, key: str, *type_names: str) -> NDArray[Any] | None:
        """Returns a copy of a numeric array, whose items must be of one of the named types."""
        kinds = {(ARRAY, TYPE_NAMES.index(name)) for name in type_names}
        entry = self._typed(key, kinds, f"array of {' or '.join(type_names)}")
        if entry is None:
            return None
        dtype = DTYPES[entry.item_type]
        return np.frombuffer(self._data, dtype, entry.count, entry.start).copy()

    def texts(self, key: str) -> list[bytes] | None:
        """Returns an array of strings as raw bytes."""
        entry = self._typed(key, {(ARRAY, STRING)}, "array of string")
        if entry is None:
            return None
        data, ends = self._data[entry.start : entry.end], self._string_ends[key]
        return [data[start + 8 : end] for start, end in pairwise([0, *ends])]

    def raw(self, key: str) -> bytes:
        """Returns the bytes of an entry in the file: key, type and value."""
        entry = self.entries[key]
        return self._data[entry.begin : entry.end]

    def _typed(
        self, key: str, kinds: Collection[tuple[int, int]], expected: str
    ) -> MetadataEntry | None:
        entry = self.entries.get(key)
        if entry is not None and (entry.type, entry.item_type) not in kinds:
            raise ValueError(f"{self.path}: {key} is {entry.type_name}, expected {expected}")
        return entry

    def _scalar(self, entry: MetadataEntry) -> Any:
        return np.frombuffer(self._data, DTYPES[entry.type], 1, entry.start)[0]

    def _walk(self) -> None:
        if self._data[:4] != MAGIC:
            raise ValueError(f"{self.path}: is not a GGUF file (it begins with {self._data[:4]!r})")
        version, _, n_entries = struct.unpack_from("<IQQ", self._data, 4)
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big")
            why = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
            raise ValueError(f"{self.path}: {why}, expected little-endian version 2 or 3")
        position = 24
        for _ in range(n_entries):
            position = self._walk_entry(position)

    def _walk_entry(self, begin: int) -> int:
        key_end = self._string_end(begin)
        if key_end - begin - 8 > MAX_KEY_BYTES:
            raise ValueError(
                f"{self.path}: a metadata key has {key_end - begin - 8} bytes, "
                f"the limit is {MAX_KEY_BYTES}"
            )
        try:
            key = self._data[begin + 8 : key_end].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: a metadata key is not valid UTF-8") from None
        if key in self.entries:
            raise ValueError(f"{self.path}: {key} occurs twice")
        self._require(key_end, 4)
        (code,) = struct.unpack_from("<I", self._data, key_end)
        item_type, count, start = code, 1, key_end + 4
        if code == ARRAY:
            self._require(start, 12)
            item_type, count = struct.unpack_from("<IQ", self._data, start)
            start += 12
        if item_type in DTYPES:
            self._require(start, count * DTYPES[item_type].itemsize)
            end = start + count * DTYPES[item_type].itemsize
        elif item_type == STRING:
            end = self._walk_strings(key, start, count)
        else:
            what = "an array of arrays" if item_type == ARRAY else f"of unknown type {item_type}"
            raise ValueError(f"{self.path}: {key} is {what}")
        self.entries[key] = MetadataEntry(code, item_type, count, begin, start, end)
        return end

    def _walk_strings(self, key: str, start: int, count: int) -> int:
        self._require(start, 8 * count)
        data, unpack, limit = self._data, _U64.unpack_from, len(self._data) - 8
        position, ends = start, []
        for _ in range(count):
            if position > limit:
                break
            position += 8 + unpack(data, position)[0]
            ends.append(position - start)
        if len(ends) < count or position > len(data):
            raise ValueError(f"{self.path}: is truncated or damaged within {key}")
        self._string_ends[key] = ends
        return position

    def _string_end(self, position: int) -> int:
        self._require(position, 8)
        (length,) = _U64.unpack_from(self._data, position)
        self._require(position + 8, length)
        return int(position + 8 + length)

    def _require(self, position: int, n_bytes: int) -> None:
        if position + n_bytes > len(self._data):
            raise ValueError(
                f"{self.path}: is truncated or damaged, its metadata needs {n_bytes} bytes at "
                f"offset {position} of {len(self._data)}"
            )
