"""What a decoder drafts with: its drafter, what was learned about it, and the rule of an answer."""

from __future__ import annotations

from ..config import AUTO_TREE_BUDGET, TREE_BUDGET, DecodeConfig
from ..core import MAX_VERIFY, Error, Sequence
from ..draft.kinds import proposer_of
from .brief import AutoRule, BriefRule, Taken
from .budget import Budget
from .cost_file import CostFile
from .costs import Costs
from .rules import FixedChain, FixedTree, Rule

N_ROUNDS_KEPT = 16
"""New rounds for which it is worth to write down what rounds cost."""


class Drafting:
    """The drafter of one sequence; what is learned outlives answers, and its costs the process."""

    def __init__(
        self,
        sequence: Sequence,
        cost_file: CostFile | None = None,
        most_rows: int = MAX_VERIFY,
        proposer: str | None = None,
    ) -> None:
        """cost_file: where this pair's costs are kept. most_rows: of a verify nobody asked for.

        proposer: its name; None is whichever serves the sequence.
        """
        # ggml's CUDA backend captures a graph as it runs for the second time.
        engine = sequence.engine
        n_first = 2 if engine.model.backend.startswith("CUDA") else 1
        self.budget = Budget(cost_file.load(n_first) if cost_file else Costs(n_first))
        self.proposer = proposer_of(sequence, self.budget.calibrations, proposer)
        self._taken = Taken(self.proposer.max_draft if self.proposer else 0, n_first)
        self._engine = engine
        self._cost_file = cost_file
        self._most_rows = most_rows
        self._n_kept = 0

    def rule(self, config: DecodeConfig) -> Rule | None:
        """What rounds draft; None for plain decoding. ValueError if it cannot be."""
        if config.draft == "none" or (config.draft == "auto" and self.proposer is None):
            return None
        if self.proposer is None:
            raise ValueError(f"draft is {config.draft!r}, which needs a drafter")
        longest = self.proposer.max_draft
        for name, value in (("draft_max", config.draft_max), ("draft_min", config.draft_min)):
            if value is not None and value > longest:
                raise ValueError(f"{name} is {value}, this drafter drafts at most {longest}")
        longest = config.draft_max or longest
        if config.draft == "chain":
            return FixedChain(longest, config.draft_min)
        if config.draft == "tree":
            most = config.tree_budget or TREE_BUDGET
            return FixedTree(most, longest, config.draft_min, spine=config.tree_spine)
        most = config.tree_budget or AUTO_TREE_BUDGET
        budgeted = self.budget.rule(longest, most, config.draft_min)
        if config.temperature > 0.0 or config.has_penalties or config.tree_budget:
            return budgeted
        brief = BriefRule(self.budget, self._taken, longest, config.draft_min)
        return AutoRule(self.budget.costs, budgeted, brief)

    def make_room(self, n_rows: int, *, is_needed: bool) -> None:
        """Lets a round verify so many rows; where it can do with fewer, as many as there may be."""
        if not is_needed:
            n_rows = min(n_rows, self._most_rows)
        if n_rows > self._engine.max_verify:
            try:
                self._engine.reserve_verify(n_rows)
            except Error:
                if is_needed:
                    raise
                self._most_rows = self._engine.max_verify  # others took what was free

    def keep_costs(self) -> None:
        """Lets the next process begin with what this one measured."""
        n_observed = self.budget.costs.n_observed
        if self._cost_file is not None and n_observed >= self._n_kept + N_ROUNDS_KEPT:
            self._cost_file.store(self.budget.costs)
            self._n_kept = n_observed
