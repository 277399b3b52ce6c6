"""Contents of a GGUF file to write: metadata values, and tensors whose rows are read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Elementwise = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class Metadata:
    """Metadata in file order. `{arch}` in a key becomes the architecture."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.values: dict[str, tuple[str, Any]] = {}
        self.notes: list[str] = []
        """Sentences for the user about contents of the model folder that the file cannot have."""

    def _set(self, key: str, kind: str, value: Any) -> None:
        self.values[key.replace("{arch}", self.arch)] = (kind, value)

    def uint32(self, key: str, value: int) -> None:
        """Sets a key to an unsigned 32-bit integer."""
        self._set(key, "uint32", value)

    def float32(self, key: str, value: float) -> None:
        """Sets a key to a 32-bit float."""
        self._set(key, "float32", value)

    def boolean(self, key: str, value: bool) -> None:
        """Sets a key to a boolean."""
        self._set(key, "bool", value)

    def string(self, key: str, value: str) -> None:
        """Sets a key to a UTF-8 string."""
        self._set(key, "string", value)

    def array(self, key: str, values: list[Any]) -> None:
        """Sets a key to a list of int (as int32), float, bool or str; skips an empty list."""
        if values:
            self._set(key, "array", values)


def to_float32(values: Array) -> NDArray[np.float32]:
    """Converts float32 (not copied), float16, or bfloat16 given as uint16, to float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that the checkpoint stores in quantised blocks, written to the file without loss."""

    type: str
    """Name of the ggml type of the blocks."""
    rows: Callable[[int, int], NDArray[np.uint8]]
    """Function (start, stop) that returns rows as ggml's bytes, uint8 [rows, row bytes]."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """Plan of a GGUF tensor, computed row by row from views of the checkpoint.

    parts: consecutive 2-D views [rows, cols]. rows, columns: reorder or select them (new index ->
    old index).
    apply: maps the float32 values. shape: row-major; its last dimension is the length of a row.
    packed: supplies the rows in place of `parts`, which then only give the number of rows.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Array, ...]
    rows: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None
    apply: Elementwise | None = None
    sources: tuple[str, ...] = field(default=())
    packed: Packed | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows of the tensor, summed over the tensors that it is concatenated from."""
        if self.rows is not None:
            return len(self.rows)
        return sum(part.shape[0] for part in self.parts)

    @property
    def n_columns(self) -> int:
        """Number of values in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def is_plain(self) -> bool:
        """True if the values are those of the checkpoint, bit for bit."""
        return self.apply is None

    def raw(self, start: int, stop: int) -> Array:
        """Returns rows start..stop in the checkpoint's type, reordered; does not run `apply`."""
        if self.rows is not None:
            values = self.parts[0][self.rows[start:stop]]
        else:
            values = self._slice(start, stop)
        return values if self.columns is None else values[:, self.columns]

    def _slice(self, start: int, stop: int) -> Array:
        pieces, offset = [], 0
        for part in self.parts:
            begin, end = max(start - offset, 0), min(stop - offset, part.shape[0])
            if begin < end:
                pieces.append(part[begin:end])
            offset += part.shape[0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Returns rows start..stop as float32 [stop - start, n_columns]."""
        values = to_float32(self.raw(start, stop))
        return values if self.apply is None else self.apply(values)


def list_plan(name: str, values: Array, sources: tuple[str, ...] = ()) -> TensorPlan:
    """Returns the plan of a list of int64 values, which are computed already."""
    row = values.astype("<i8").reshape(1, -1)
    data = row.view(np.uint8)
    packed = Packed("i64", lambda start, stop: data[start:stop])
    return TensorPlan(name, (row.size,), (row,), sources=sources, packed=packed)
