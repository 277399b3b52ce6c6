"""Copies of a text so far: what came after its end where that stood before."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, create, ffi, lib, new
from .limits import MAX_VERIFY
from .node_selection import NO_THRESHOLD, BreakEven

Proposal = tuple[list[int], list[int], list[int], list[float]]
"""A tree from the last token on: tokens, parents, depths and log-chances of paths."""


class SuffixIndex:
    """Remembers texts, token by token, and proposes how they go on. Not for two threads at once."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: tokens remembered; beyond, the older half is forgotten."""
        self.handle = create("suffix_index", "suffix_index_create", max_tokens)

    def __len__(self) -> int:
        return int(lib().dfl_suffix_index_size(self.handle))

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return int(lib().dfl_suffix_index_bytes(self.handle))

    def append(self, tokens: abc.Sequence[int], *, is_chosen: bool = False) -> int:
        """The text goes on; how long an end of it stands in it before.

        is_chosen: by the target, so that they tell how often copies come true.
        Errors: Error for a token id below 0.
        """
        ids, length = ffi.new("int32_t[]", tokens), new("int64_t *")
        call("suffix_index_append", self.handle, ids, len(tokens), is_chosen, length)
        return int(length[0])

    def separate(self) -> None:
        """What comes next is another text: no copy goes across."""
        call("suffix_index_separate", self.handle)

    def propose(self, n_positions: int, n_nodes: int) -> Proposal:
        """The likeliest copies as a tree, no deeper than n_positions, the likeliest first.

        Empty lists if there are none.
        """
        proposals = Proposals().propose([self], [()], [n_positions], [n_nodes])
        return (proposals[0] if proposals else None) or ([], [], [], [])

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """How often copies were looked at and came true, by class: [n, 2]."""
        outcomes = np.empty((lib().DFL_SUFFIX_OUTCOMES, 2))
        call("suffix_index_get_outcomes", self.handle, ffi.from_buffer("double[]", outcomes))
        return outcomes

    @outcomes.setter
    def outcomes(self, values: NDArray[np.float64]) -> None:
        """Error unless 0 < taken <= tried everywhere; ValueError for another shape."""
        values = np.ascontiguousarray(values, dtype=np.float64)
        if values.shape != (lib().DFL_SUFFIX_OUTCOMES, 2):
            raise ValueError(f"outcomes are {list(values.shape)}, need one pair a class")
        call("suffix_index_set_outcomes", self.handle, ffi.from_buffer("double[]", values))


class Proposals:
    """Rounds of several texts, in one call each. Not for two threads at once.

    What the call needs is kept: to make it anew takes longer than to look for copies.
    """

    def __init__(self) -> None:
        self._n_texts = self._n_tokens = 0

    def propose(
        self,
        texts: abc.Sequence[SuffixIndex],
        chosen: abc.Sequence[abc.Sequence[int]],
        n_positions: abc.Sequence[int],
        n_nodes: abc.Sequence[int],
        break_even: BreakEven = NO_THRESHOLD,
    ) -> list[Proposal | None] | None:
        """Each text goes on by what the target chose, and gives its likeliest copies as a tree.

        No more nodes than its n_nodes, MAX_VERIFY at most, none deeper than its n_positions, and of
        all texts together as many as are worth a pass; None for a text without any, and for all.
        Errors: Error for a token id or a count below 0, which leaves all as it was.
        """
        n = len(texts)
        if n > self._n_texts:
            self._n_texts, room = n, n * (MAX_VERIFY + 1)
            self._handles = ffi.new("dfl_suffix_index *[]", n)
            self._counts, self._out_counts = ffi.new("int32_t[]", 3 * n), ffi.new("int32_t[]", n)
            self._out = (*(ffi.new("int32_t[]", room) for _ in range(3)), ffi.new("double[]", room))
        self._handles[0:n] = [text.handle for text in texts]
        tokens = chosen[0] if n == 1 else [token for tokens in chosen for token in tokens]
        if len(tokens) >= self._n_tokens:
            self._n_tokens = 2 * len(tokens) + 1
            self._tokens = ffi.new("int32_t[]", self._n_tokens)
        self._tokens[0 : len(tokens)] = tokens
        sizes = n_nodes if max(n_nodes) <= MAX_VERIFY else [min(k, MAX_VERIFY) for k in n_nodes]
        self._counts[0 : 3 * n] = [*map(len, chosen), *n_positions, *sizes]
        out_counts = self._out_counts
        call(
            "suffix_index_propose",
            self._handles,
            n,
            self._tokens,
            self._counts,
            break_even.handle,
            *self._out,
            out_counts,
        )
        counts = ffi.unpack(out_counts, n)
        n_found = sum(counts)
        if not n_found:
            return None
        tokens, parents, depths, logs = (ffi.unpack(values, n_found) for values in self._out)
        if n == 1:
            return [(tokens, parents, depths, logs)]
        trees: list[Proposal | None] = []
        a = 0
        for count in counts:
            b = a + count
            one = (tokens[a:b], parents[a:b], depths[a:b], logs[a:b]) if count else None
            trees.append(one)
            a = b
        return trees
