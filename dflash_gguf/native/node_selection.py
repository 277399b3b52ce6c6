"""What of candidates is verified: as many as bring more than the pass that they are in costs."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ._ffi import call, ffi, new


@dataclass(frozen=True, eq=False)
class BreakEven:
    """Tokens that a pass must bring, by the number of its candidates; none: all are wanted.

    sizes: rising from 1 on. chains, trees: of passes with so many, where they are chains, and where
    they are more.
    """

    sizes: abc.Sequence[int] = ()
    chains: abc.Sequence[float] = ()
    trees: abc.Sequence[float] = ()

    def limited(self, max_tokens: float) -> BreakEven:
        """Returns the sizes that need to bring no more tokens than so many; the others never do."""
        if not self.sizes or max(self.chains[-1], self.trees[-1]) <= max_tokens:
            return self
        chains, trees = (
            [x if x <= max_tokens else math.inf for x in tokens]
            for tokens in (self.chains, self.trees)
        )
        return BreakEven(self.sizes, chains, trees)

    @cached_property
    def handle(self) -> Any:
        """For the core, as long as this lives."""
        return new("dfl_break_even *", (*self._arrays, len(self.sizes)))

    @cached_property
    def _arrays(self) -> tuple[Any, Any, Any]:
        sizes = ffi.new("int32_t[]", self.sizes)
        return sizes, ffi.new("double[]", self.chains), ffi.new("double[]", self.trees)


NO_THRESHOLD = BreakEven()


class Selection(NamedTuple):
    """The nodes to verify: the first of each tree, or the first of its main chain.

    value: tokens that all bring beyond what they must; what they had to exceed if none does.
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
    """The best number of nodes of all trees together, the likeliest first; of chains or of trees.

    parents, log_probs: of each tree, as in `Tree`. limits: nodes below each root at most.
    min_value: tokens that all must bring more than, beyond what their number must.
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
