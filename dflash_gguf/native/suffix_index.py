"""SuffixIndex: proposes tokens that followed earlier occurrences of the end of a text."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, create, ffi, lib, new
from .limits import MAX_VERIFY
from .models import Drafter
from .node_selection import NO_THRESHOLD, BreakEven

Proposal = tuple[list[int], list[int], list[int], list[float]]
"""A candidate tree: tokens, parents, depths and path log-probabilities of its nodes, root first."""


class SuffixIndex:
    """Suffix automaton over texts, the prompt-lookup family of proposers. Not thread-safe."""

    def __init__(self, max_tokens: int, ngrams: Drafter | None = None) -> None:
        """Creates an empty index.

        max_tokens: most tokens to keep; the older half is dropped when they are full. ngrams: an
        n-gram table, whose tokens are proposed too.
        """
        table = ffi.NULL if ngrams is None else ngrams.handle
        self.handle = create("suffix_index", "suffix_index_create", max_tokens, table)

    def __len__(self) -> int:
        return int(lib().dfl_suffix_index_size(self.handle))

    @property
    def bytes(self) -> int:
        """Bytes of main memory that the index takes."""
        return int(lib().dfl_suffix_index_bytes(self.handle))

    def append(self, tokens: abc.Sequence[int], *, is_chosen: bool = False) -> int:
        """Appends tokens. Returns the length of the longest suffix that also occurs earlier.

        is_chosen: True for the target's tokens, by which candidates are scored. Error for a bad id.
        """
        ids, length = ffi.new("int32_t[]", tokens), new("int64_t *")
        call("suffix_index_append", self.handle, ids, len(tokens), is_chosen, length)
        return int(length[0])

    def separate(self) -> None:
        """Ends the current text: candidates are not matched across its end."""
        call("suffix_index_separate", self.handle)

    def propose(self, n_positions: int, n_nodes: int) -> Proposal:
        """Returns a tree of at most n_nodes candidates and depth n_positions; empty if no match."""
        proposals = Proposals().propose([self], [()], [n_positions], [n_nodes])
        return (proposals[0] if proposals else None) or ([], [], [], [])

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """Counts of tried and accepted candidates by kind and length of match, float64 [n, 2]."""
        outcomes = np.empty((lib().DFL_SUFFIX_OUTCOMES, 2))
        call("suffix_index_get_outcomes", self.handle, ffi.from_buffer("double[]", outcomes))
        return outcomes

    @outcomes.setter
    def outcomes(self, values: NDArray[np.float64]) -> None:
        """Sets counts of tried and accepted candidates; Error unless 0 < accepted <= tried."""
        values = np.ascontiguousarray(values, dtype=np.float64)
        if values.shape != (lib().DFL_SUFFIX_OUTCOMES, 2):
            raise ValueError(f"outcomes have the shape {list(values.shape)}, must be [classes, 2]")
        call("suffix_index_set_outcomes", self.handle, ffi.from_buffer("double[]", values))


class Proposals:
    """Proposes for several texts in one call; keeps its argument arrays for speed."""

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
        """Appends the target's new tokens to each text and returns a candidate tree for each.

        chosen: new tokens of each text. n_positions, n_nodes: limits of each tree. break_even:
        limit of the nodes of all trees together. None stands for a text without candidates, and for
        the list if no text has any. Error for a negative number; nothing has changed then.
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
