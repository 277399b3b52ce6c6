"""Selects the candidates to verify: as many as gain more tokens than verifying them costs."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ._ffi import call, ffi, new


@dataclass(frozen=True, eq=False)
class BreakEven:
    """Minimum expected accepted tokens for a pass to pay, by its number of candidates.

    sizes: numbers of candidates, rising from 1 on; empty: no minimum. chains, trees: the minimum of
    each size, where the candidates of all sequences are chains, and where some are trees.
    """

    sizes: abc.Sequence[int] = ()
    chains: abc.Sequence[float] = ()
    trees: abc.Sequence[float] = ()

    def limited(self, max_tokens: float) -> BreakEven:
        """Returns the break-even, infinite above max_tokens, to rule out passes of these sizes."""
        if not self.sizes or max(self.chains[-1], self.trees[-1]) <= max_tokens:
            return self
        chains, trees = (
            [x if x <= max_tokens else math.inf for x in tokens]
            for tokens in (self.chains, self.trees)
        )
        return BreakEven(self.sizes, chains, trees)

    @cached_property
    def handle(self) -> Any:
        """The minimums as a C struct `dfl_break_even`, valid while this BreakEven exists."""
        return new("dfl_break_even *", (*self._arrays, len(self.sizes)))

    @cached_property
    def _arrays(self) -> tuple[Any, Any, Any]:
        sizes = ffi.new("int32_t[]", self.sizes)
        return sizes, ffi.new("double[]", self.chains), ffi.new("double[]", self.trees)


NO_THRESHOLD = BreakEven()


class Selection(NamedTuple):
    """Numbers of nodes to verify of candidate trees, below their roots.

    is_tree: True for the first nodes of each tree, False for the first of its main chain. value:
    expected tokens beyond the break-even minimum, or `min_value` if no nodes are selected.
    """

    counts: abc.Sequence[int]
    is_tree: bool
    value: float


def select_nodes(
    parents: abc.Sequence[abc.Sequence[int]],
    log_probs: abc.Sequence[abc.Sequence[float]],
    limits: abc.Sequence[int],
    break_even: BreakEven,
    *,
    min_value: float = 0.0,
) -> Selection:
    """Selects the nodes of all trees together that gain the most expected tokens.

    parents, log_probs: parents and path log-probabilities of each tree's nodes, as in `Tree`.
    limits: most nodes below each root. min_value: tokens that the gain must exceed.
    """
    n = len(parents)
    if n == 1:
        (all_parents,), (all_logs,) = parents, log_probs
    else:
        all_parents = [parent for of in parents for parent in of]
        all_logs = [log for of in log_probs for log in of]
    counts, out = ffi.new("int32_t[]", [*map(len, parents), *limits]), ffi.new("int32_t[]", n + 1)
    value = ffi.new("double *")
    ids, logs = ffi.new("int32_t[]", all_parents), ffi.new("double[]", all_logs)
    call(
        "select_nodes",
        n,
        counts,
        ids,
        logs,
        break_even.handle,
        min_value,
        out,
        out + n,
        value,
    )
    *found, is_tree = ffi.unpack(out, n + 1)
    return Selection(found, bool(is_tree), value[0])
