"""Reader of GGUF headers: metadata, tensor table and data layout, with every length checked.

It accepts any bytes: the `gguf` package's reader would trust the lengths in a file.
Source: ggml, docs/gguf.md and src/gguf.cpp, which refuses the same headers.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import ConvertError, check_file
from .schema import SPLIT_ENDING, Key

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 63
DEFAULT_ALIGNMENT = 32
ARRAY_HEAD = 512  # values kept of each array, enough for one value per layer
_MIN_ENTRY_BYTES = {"metadata entries": 13, "tensors": 32}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """Array in the metadata: its length, and its first ARRAY_HEAD values."""

    count: int
    head: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """Metadata value with its type; for an ArrayValue, `type` is the type of an element."""

    type: str
    value: Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Entry of the tensor table. shape: row-major. start: byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a GGUF file. `file_bytes` is the size on disk, even if tensor data is cut off."""

    path: Path
    file_bytes: int
    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo] = field(repr=False)
    data_start: int

    @property
    def needed_bytes(self) -> int:
        """Bytes of a complete file, up to the end of its last tensor; 0 without tensors."""
        return max((t.start + t.n_bytes for t in self.tensors.values()), default=0)

    @property
    def missing_bytes(self) -> int:
        """Bytes of tensor data that the file lacks; 0 if it is complete."""
        return max(0, self.needed_bytes - self.file_bytes)

    def integer(self, key: str, default: int) -> int:
        """Returns an integer of the metadata. Raises ConvertError if the value is no integer."""
        found = self.metadata.get(key)
        if found is None:
            return default
        if type(found.value) is not int:
            raise ConvertError(f"{self.path}: {key} is {found.value!r}, an integer is needed")
        return found.value


def read_header(path: Path) -> GgufHeader:
    """Returns the header of a file, even of a truncated one. Raises ConvertError if malformed."""
    try:
        check_file(path)
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                raise ConvertError(f"{path}: is empty, not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error


def read_parts(path: Path) -> list[GgufHeader]:
    """Returns the headers of a file and, if it is part 1 of a split model, of the other parts."""
    first = read_header(path)
    n = first.integer(Key.SPLIT_COUNT, 1)
    if n <= 1 or first.integer(Key.SPLIT_NO, 0) != 0:
        return [first]
    ending = SPLIT_ENDING % (1, n)
    if not path.name.endswith(ending):
        raise ConvertError(
            f"{path}: is the first of {n} files, its name must end in {ending}, by which the "
            "other parts are found"
        )
    parts, names = [first], set(first.tensors)
    for i in range(1, n):
        name = path.name.removesuffix(ending) + SPLIT_ENDING % (i + 1, n)
        parts.append(read_header(path.with_name(name)))
        found = parts[-1].integer(Key.SPLIT_NO, -1), parts[-1].integer(Key.SPLIT_COUNT, 1)
        if found != (i, n):
            raise ConvertError(
                f"{parts[-1].path}: its split.no is {found[0]} and its split.count {found[1]}, "
                f"expected {i} and {n} after {path}"
            )
        if twice := names & parts[-1].tensors.keys():
            raise ConvertError(f"{parts[-1].path}: an earlier part holds {min(twice)!r} too")
        names |= parts[-1].tensors.keys()
    total = first.integer(Key.SPLIT_TENSORS_COUNT, -1)
    if total != len(names):
        raise ConvertError(
            f"{path}: its {n} parts hold {len(names)} tensors, split.tensors.count is {total}"
        )
    return parts


class _Reader:
    """Cursor over the bytes of a file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, problem: str) -> NoReturn:
        raise ConvertError(f"{self.path}: {problem}")

    def number(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        if self.size - self.at < width:
            self.fail(f"ends at byte {self.size}, within {what}")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value

    def skip_string(self, what: str) -> int:
        """Moves past a string; returns the position of its first byte."""
        length = self.number("Q", what)
        if length > self.size - self.at:
            self.fail(f"{what} claims {length} bytes, but the file has {self.size - self.at} left")
        start = self.at
        self.at += length
        return start

    def string(self, what: str) -> str:
        start = self.skip_string(what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def count(self, what: str) -> int:
        value: int = self.number("q", f"the number of {what}")
        least = _MIN_ENTRY_BYTES[what]
        if not 0 <= value <= self.size // least:
            self.fail(f"claims {value} {what}, a file of {self.size} bytes cannot hold them")
        return value

    def header(self) -> GgufHeader:
        if self.data[: len(MAGIC)] != MAGIC:
            self.fail(f"is not a GGUF file (it begins with {self.data[:4]!r}, not {MAGIC!r})")
        self.at = len(MAGIC)
        version = self.number("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                self.fail("is a big-endian GGUF file, only little-endian ones are read")
            self.fail(f"has GGUF version {version}, only 2 and 3 are read")
        n_tensors, n_values = self.count("tensors"), self.count("metadata entries")
        metadata = self.metadata(n_values)
        rows = [self.tensor_row(index) for index in range(n_tensors)]
        alignment = self.alignment(metadata)
        data_start = -(-self.at // alignment) * alignment
        tensors = self.layout(rows, alignment, data_start)
        return GgufHeader(self.path, self.size, version, metadata, tensors, data_start)

    def metadata(self, count: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for index in range(count):
            key = self.string(f"the key of metadata entry {index}")
            if key in metadata:
                self.fail(f"has the metadata key {key!r} twice")
            metadata[key] = self.value(key)
        return metadata

    def value(self, key: str) -> MetadataValue:
        what = f"the value of {key!r}"
        kind = self.number("I", what)
        if kind == _STRING:
            return MetadataValue("string", self.string(what))
        if kind == _ARRAY:
            return self.array(key, what)
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown type {kind}")
        name, code = _SCALARS[kind]
        return MetadataValue(name, self.number(code, what))

    def array(self, key: str, what: str) -> MetadataValue:
        kind = self.number("I", what)
        count = self.number("Q", what)
        left = self.size - self.at
        if kind == _STRING:
            least = 8
        elif kind in _SCALARS:
            least = struct.calcsize("<" + _SCALARS[kind][1])
        else:
            self.fail(f"{what} is an array of the unknown type {kind}")
        if count > left // least:
            self.fail(f"{what} claims {count} elements, but the file has {left} bytes left")
        if kind == _STRING:
            return MetadataValue("string", ArrayValue(count, self.strings(key, count)))
        name, code = _SCALARS[kind]
        head = struct.unpack_from(f"<{min(count, ARRAY_HEAD)}{code}", self.data, self.at)
        self.at += count * least
        return MetadataValue(name, ArrayValue(count, head))

    def strings(self, key: str, count: int) -> tuple[str, ...]:
        head = tuple(self.string(f"element {i} of {key!r}") for i in range(min(count, ARRAY_HEAD)))
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        try:
            # Skips strings without a call for each, as vocabularies have up to 250,000.
            for _ in range(ARRAY_HEAD, count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            at = self.size + 1
        if at > self.size:
            self.fail(f"one of the {count} strings of {key!r} reaches beyond the end of the file")
        self.at = at
        return head

    def alignment(self, metadata: dict[str, MetadataValue]) -> int:
        found = metadata.get("general.alignment")
        if found is None:
            return DEFAULT_ALIGNMENT
        value = found.value
        if isinstance(value, ArrayValue):
            self.fail("general.alignment is an array, a power of two is needed")
        if found.type != "uint32" or value == 0 or value & (value - 1):
            self.fail(f"general.alignment is {found.type} {value}, a uint32 power of two is needed")
        return int(value)

    def tensor_row(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string(f"the name of tensor {index}")
        if len(name.encode()) > MAX_NAME_BYTES:
            self.fail(f"the name of tensor {index} has {len(name.encode())} bytes, at most 63 fit")
        what = f"the table entry of {name!r}"
        n_dims = self.number("I", what)
        if n_dims > MAX_DIMS:
            self.fail(f"{name!r} has {n_dims} dimensions, at most {MAX_DIMS} are possible")
        shape = tuple(self.number("q", what) for _ in range(n_dims))[::-1]
        if any(size <= 0 for size in shape) or math.prod(shape) >= 1 << 63:
            self.fail(f"{name!r} has the impossible shape {list(shape)}")
        type_id = self.number("I", what)
        if type_id not in GGMLQuantizationType.__members__.values():
            self.fail(f"{name!r} has the unknown type {type_id}")
        return name, shape, GGMLQuantizationType(type_id), self.number("Q", what)

    def layout(
        self,
        rows: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
        alignment: int,
        data_start: int,
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        expected, before = 0, "the header"
        for name, shape, kind, offset in rows:
            if name in tensors:
                self.fail(f"has the tensor {name!r} twice")
            elements, block_bytes = GGML_QUANT_SIZES[kind]
            columns = shape[-1] if shape else 1
            if columns % elements:
                self.fail(
                    f"{name!r} has rows of {columns}, {kind.name} needs multiples of {elements}"
                )
            if offset % alignment:
                self.fail(f"{name!r} is at offset {offset}, not a multiple of {alignment}")
            if offset != expected:
                problem = "overlaps" if offset < expected else "leaves a gap after"
                self.fail(
                    f"{name!r} is at offset {offset} and {problem} {before}, which asks for "
                    f"{expected}"
                )
            n_bytes = math.prod(shape) // elements * block_bytes
            tensors[name] = TensorInfo(name, shape, kind, data_start + offset, n_bytes)
            expected, before = -(-(offset + n_bytes) // alignment) * alignment, repr(name)
        return tensors
