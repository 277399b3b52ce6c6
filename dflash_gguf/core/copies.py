"""Copies of a text so far: what came after its end where that stood before."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, create, ffi, lib, new
from .limits import MAX_VERIFY


class Copies:
    """Remembers texts, token by token, and proposes how they go on. Not for two threads at once."""

    def __init__(self, n_most: int) -> None:
        """n_most: tokens remembered; beyond, the older half is forgotten."""
        self._handle = create("copies", "copies_create", n_most)
        self._length, self._n = new("int64_t *"), new("int64_t *")
        self._tokens = new(f"int32_t[{MAX_VERIFY}]")
        self._parents = new(f"int32_t[{MAX_VERIFY}]")
        self._log_chances = new(f"float[{MAX_VERIFY}]")

    def __len__(self) -> int:
        return int(lib().dfl_copies_size(self._handle))

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return int(lib().dfl_copies_bytes(self._handle))

    def append(self, tokens: abc.Sequence[int], *, is_chosen: bool = False) -> int:
        """The text goes on; how long an end of it stands in it before.

        is_chosen: by the target, so that they tell how often copies come true.
        Errors: Error for a token id below 0.
        """
        ids = ffi.new("int32_t[]", tokens)
        call("copies_append", self._handle, ids, len(tokens), is_chosen, self._length)
        return int(self._length[0])

    def separate(self) -> None:
        """What comes next is another text: no copy goes across."""
        call("copies_separate", self._handle)

    def propose(self, n_positions: int, n_nodes: int) -> tuple[list[int], list[int], list[float]]:
        """The likeliest copies as a tree: tokens, parents (-1: the text's last) and log-chances.

        The likeliest come first, no deeper than n_positions, MAX_VERIFY at most.
        """
        out = self._tokens, self._parents, self._log_chances
        call("copies_propose", self._handle, n_positions, min(n_nodes, MAX_VERIFY), *out, self._n)
        n = self._n[0]
        tokens, parents, log_chances = (ffi.unpack(values, n) for values in out)
        return tokens, parents, log_chances

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """How often copies were looked at and came true, by class: [n, 2]."""
        found = np.empty((lib().DFL_COPY_OUTCOMES, 2))
        call("copies_get_outcomes", self._handle, ffi.from_buffer("double[]", found))
        return found

    @outcomes.setter
    def outcomes(self, values: NDArray[np.float64]) -> None:
        """Error unless 0 < taken <= tried everywhere; ValueError for another shape."""
        values = np.ascontiguousarray(values, dtype=np.float64)
        if values.shape != (lib().DFL_COPY_OUTCOMES, 2):
            raise ValueError(f"outcomes are {list(values.shape)}, need one pair a class")
        call("copies_set_outcomes", self._handle, ffi.from_buffer("double[]", values))
