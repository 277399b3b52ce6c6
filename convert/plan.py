"""What a conversion will write: metadata values, and tensors as rows read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Elementwise = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class Metadata:
    """Metadata in writing order. `{arch}` in keys is filled in; a key set twice keeps the last."""

    def __init__(self, arch: str) -> None:
        """Metadata of a file whose `general.architecture` is `arch`."""
        self.arch = arch
        self.values: dict[str, tuple[str, Any]] = {}

    def _set(self, key: str, kind: str, value: Any) -> None:
        self.values[key.replace("{arch}", self.arch)] = (kind, value)

    def uint32(self, key: str, value: int) -> None:
        """An unsigned 32-bit integer."""
        self._set(key, "uint32", value)

    def float32(self, key: str, value: float) -> None:
        """A 32-bit float."""
        self._set(key, "float32", value)

    def boolean(self, key: str, value: bool) -> None:
        """A boolean."""
        self._set(key, "bool", value)

    def string(self, key: str, value: str) -> None:
        """A UTF-8 string."""
        self._set(key, "string", value)

    def array(self, key: str, values: list[Any]) -> None:
        """Values of one type: int (stored as int32), float, bool or str. Empty: not written."""
        if values:
            self._set(key, "array", values)


def to_float32(values: Array) -> NDArray[np.float32]:
    """Float32 of float32, float16, or uint16 standing for bfloat16; float32 is not copied."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that the checkpoint holds in blocks already, so that they are written without loss."""

    type: str
    """ggml's name of their type."""
    rows: Callable[[int, int], NDArray[np.uint8]]
    """Rows from the first up to the second as ggml lays them out, [rows, bytes of a row]."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """One GGUF tensor, computed row by row from views of the checkpoint.

    `parts` are 2-D [rows, cols] views that follow each other; `rows` and `columns` reorder them
    (new index -> old index), `apply` maps the float32 values. `shape` is row-major and has the
    same number of elements; its last dimension is the length of a row. With `packed` that alone
    gives the rows, and `parts` only say how many there are.
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
        """Number of rows over all parts."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def n_columns(self) -> int:
        """Length of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def is_plain(self) -> bool:
        """True if the values are those of the checkpoint, bit for bit."""
        return self.apply is None

    def raw(self, start: int, stop: int) -> Array:
        """Rows start..stop in the checkpoint's type, reordered, not yet mapped."""
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
        """Rows start..stop as float32 [stop - start, n_columns]."""
        values = to_float32(self.raw(start, stop))
        return values if self.apply is None else self.apply(values)
