"""Costs of passes: seconds, and the tokens that candidates must bring to be worth them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..native import BreakEven
from .cost_model import CostModel, Round

N_USES = 16
"""Passes over which a size that was never run pays for its first one, which builds a graph."""
MARGIN = 0.05
"""Of a plain round's tokens, what is verified beside it must promise beyond what it costs: that is
known within a few hundredths only, and the best of many sizes is the one that was told too cheap.
"""


class Prices:
    """Costs of passes with as many candidates as steps of a ladder."""

    def __init__(self, costs: CostModel, sizes: Sequence[int], least: int) -> None:
        """sizes: the ladder. least: candidates; fewer are dropped."""
        self._costs, self._sizes, self._least = costs, sizes, least
        self._first = bisect_left(sizes, least)  # size that is not dropped
        self._tables: dict[tuple[int, bool, float], BreakEven] = {}  # by `break_even`'s arguments
        self._version = 0  # costs when they were counted
        self.most_nodes = 0
        """A step of the ladder beyond the largest pass that was run: what is far is guessed."""
        self.forget()

    def forget(self) -> None:
        """Tokens are counted anew when they are asked for."""
        self._tables.clear()
        self._version, most_rows = self._costs.version, self._costs.most_rows
        beyond = (size for size in self._sizes[self._first :] if size >= most_rows)
        self.most_nodes = next(beyond, self._sizes[-1])

    def break_even(self, done: Round, rate: float) -> BreakEven:
        """Tokens that candidates must bring, by their number, where `rate` of them a second can be.

        A plain round takes no candidates up; and more rows take no less, whatever was measured.
        """
        if self._version != self._costs.version:
            self.forget()  # a size that was told too little would be taken for long
        has_draft, n = done.n_positions > 0, done.n_sequences
        key = n, has_draft, rate
        if key not in self._tables:
            costs = self._costs
            plain_s = costs.pass_s(done.position, n, n_sequences=n)
            extra = 0.0 if has_draft else rate * costs.ask.value + MARGIN * n
            prices = [
                [
                    rate * max(pass_s - plain_s, 0.0) + extra if size >= self._least else math.inf
                    for size, pass_s in zip(self._sizes, passes, strict=True)
                ]
                for passes in self.seconds(done, 1)
            ]
            self._tables[key] = BreakEven(self._sizes, *prices)
        return self._tables[key]

    def seconds(self, done: Round, n_nodes: int) -> list[list[float]]:
        """Of chains and of trees of each size of the ladder, that many times n_nodes.

        inf: more than a step of the ladder beyond the largest pass that was run, and not the first.
        """
        costs, n = self._costs, done.n_sequences
        counts = [n + n_nodes * size for size in self._sizes]
        n_known = max(bisect_right(counts, costs.most_rows), self._first)
        n_open = min(n_known + 1, len(counts))
        found = []
        for is_tree in (False, True) if costs.knows_trees else (False,):
            passes = costs.passes_s(done.position, counts[:n_open], is_tree, n)
            for at, rows in enumerate(counts[:n_open]):
                if not costs.knows_pass(rows, is_tree, n):
                    passes[at] += costs.first_s / N_USES
            found.append(passes + [math.inf] * (len(counts) - n_open))
        return found if costs.knows_trees else 2 * found
