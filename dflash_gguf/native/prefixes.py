"""Prefixes in an engine: rows and states of the first tokens of a sequence, for others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, ffi, lib, new, text


class PrefixTensor(NamedTuple):
    """A tensor of a prefix's file, of a ggml type; of attention rows one for each token."""

    name: str
    type: str
    ne: tuple[int, int]
    n_bytes: int


class Prefix:
    """All that the first tokens of a sequence left behind, until it is closed."""

    def __init__(self, handle: Any, n_tokens: int) -> None:
        """Use `Sequence.snapshot` or `Engine.create_prefix`."""
        self._handle = handle
        self.n_tokens = n_tokens

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the prefix is closed")
        return self._handle

    def close(self) -> None:
        """Frees rows that no other prefix and no sequence holds."""
        if self._handle is not None:
            # In this order an interruption in between leaves it to the garbage collector.
            handle, self._handle = self._handle, None
            ffi.release(handle)

    def info(self) -> Any:
        """The prefix's `dfl_prefix_info`."""
        info = new("dfl_prefix_info *")
        call("prefix_get_info", self.handle, info)
        return info

    @property
    def n_draft(self) -> int:
        """The last positions that the drafter remembers."""
        return int(self.info().n_draft)

    def keep_in_cells(self, keeps: bool) -> None:
        """Keeps its rows in cells, or lets `Engine.offload` move them."""
        call("prefix_keep_in_cells", self.handle, keeps)

    def cells_needed(self, n: int) -> int:
        """Returns how many of `Engine.n_free_cells` a sequence takes to attach n tokens."""
        return int(lib().dfl_prefix_cells_needed(self.handle, n))

    def n_rows(self) -> list[int]:
        """Rows of each cache."""
        rows = new("int64_t[]", int(self.info().n_caches))
        call("prefix_get_rows", self.handle, rows)
        return list(rows)

    def parts(self) -> list[PrefixTensor]:
        """Tensors of its file, beside the tokens."""
        parts = []
        part = new("dfl_prefix_part *")
        for index in range(self.info().n_parts):
            call("prefix_get_part", self.handle, index, part)
            ne = int(part.ne[0]), int(part.ne[1])
            parts.append(PrefixTensor(text(part.name), text(part.type), ne, int(part.bytes)))
        return parts

    def read(self, part: int, out: NDArray[np.uint8]) -> None:
        """Copies a part's bytes out."""
        call("prefix_read", self.handle, part, ffi.from_buffer("uint8_t[]", out, True))

    def write(self, part: int, data: NDArray[np.uint8]) -> None:
        """Fills in a part of one that `Engine.create_prefix` made."""
        call("prefix_write", self.handle, part, ffi.from_buffer("uint8_t[]", data))
