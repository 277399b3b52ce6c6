"""Prefix: snapshot of a sequence's K/V and states, which other sequences can attach."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, lib, new, text


class PrefixTensor(NamedTuple):
    """A tensor of a prefix's file. type: ggml's name. ne: row length and rows."""

    name: str
    type: str
    ne: tuple[int, int]
    n_bytes: int


class Prefix:
    """K/V, recurrent state and drafter K/V of the first n_tokens of a text, until `close`."""

    def __init__(self, handle: Any, n_tokens: int) -> None:
        """Use `Sequence.snapshot` or `Engine.create_prefix`."""
        self._handle = handle
        self.n_tokens = n_tokens

    @property
    def handle(self) -> Any:
        """The prefix's C handle; raises Error after `close`."""
        if self._handle is None:
            raise Error("the prefix is closed")
        return self._handle

    def close(self) -> None:
        """Frees the K/V blocks that no other prefix and no sequence holds."""
        if self._handle is not None:
            # If a signal interrupts here, the garbage collector still frees the handle.
            handle, self._handle = self._handle, None
            ffi.release(handle)

    def info(self) -> Any:
        """Returns sizes and counts, a `dfl_prefix_info` of dflash.h."""
        info = new("dfl_prefix_info *")
        call("prefix_get_info", self.handle, info)
        return info

    @property
    def n_draft(self) -> int:
        """Number of last positions that have drafter K/V."""
        return int(self.info().n_draft)

    def keep_in_cells(self, keeps: bool) -> None:
        """Protects the prefix's cells from `Engine.offload` if `keeps`, else ends protection."""
        call("prefix_keep_in_cells", self.handle, keeps)

    def cells_needed(self, n: int) -> int:
        """Returns the number of free cells that an empty sequence takes to attach n tokens."""
        return int(lib().dfl_prefix_cells_needed(self.handle, n))

    def n_rows(self) -> list[int]:
        """Returns the number of rows in each cache: the K/V groups', then the drafter's."""
        rows = new("int64_t[]", int(self.info().n_caches))
        call("prefix_get_rows", self.handle, rows)
        return list(rows)

    def parts(self) -> list[PrefixTensor]:
        """Lists the tensors of the prefix's file, in the order of `read` and `write`."""
        parts = []
        part = new("dfl_prefix_part *")
        for index in range(self.info().n_parts):
            call("prefix_get_part", self.handle, index, part)
            ne = int(part.ne[0]), int(part.ne[1])
            parts.append(PrefixTensor(text(part.name), text(part.type), ne, int(part.bytes)))
        return parts

    def without(self, base: Prefix) -> Prefix:
        """Returns a copy whose tensors leave out K/V blocks that base, a longer prefix, holds."""
        return Prefix(create("prefix", "prefix_without", self.handle, base.handle), self.n_tokens)

    def read(self, part: int, out: NDArray[np.uint8]) -> None:
        """Copies a tensor of the prefix to `out`, uint8 [n_bytes]. part: index in `parts()`."""
        call("prefix_read", self.handle, part, ffi.from_buffer("uint8_t[]", out, True))

    def write(self, part: int, data: NDArray[np.uint8]) -> None:
        """Sets tensor `part` of a prefix of `Engine.create_prefix`. data: uint8 [n_bytes]."""
        call("prefix_write", self.handle, part, ffi.from_buffer("uint8_t[]", data))
