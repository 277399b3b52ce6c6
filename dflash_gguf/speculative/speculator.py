"""Rounds of speculative decoding: proposes candidates, selects nodes, learns from the outcome.

    propose   proposers give trees of candidates, the controller selects the nodes to verify
    verify    the target runs once over each tree (a chain is a tree of width 1)
    follow    the path goes down from the root while the target's token is a child of the node
    commit    the accepted path is appended to every cache, the rest is dropped

The scheduler runs such rounds for requests; simulations run them without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .controller import Controller
from .cost_model import Round
from .proposers.proposer import TOP1, TREE, Proposer, SpeculativeState
from .tree import Tree, merged

Clock = Callable[[str], AbstractContextManager[object]]
"""A function that returns a context manager, which times the phase of the given name."""

FORCED = "forced"
"""Name under which tokens that a constraint leaves no choice about are proposed, with the drafted
paths to them."""


def untimed(_phase: str) -> AbstractContextManager[object]:
    """Returns a context manager that measures nothing."""
    return nullcontext()


class Speculator:
    """Proposes candidates and selects the nodes to verify, for all requests of a round."""

    def __init__(
        self, proposers: Sequence[Proposer], controller: Controller, clock: Clock = untimed
    ) -> None:
        """Creates a speculator; the clock times the phases choose, draft, select and mask."""
        self._proposers, self._controller, self._clock = proposers, controller, clock
        self._free = [proposer for proposer in proposers if not proposer.needs_forward]
        self._drafters = [proposer for proposer in proposers if proposer.needs_forward]
        self._names = tuple(proposer.name for proposer in proposers)
        self.asks = True
        """True if proposers are called in the next round."""

    def forget(self, sequence: Any) -> None:
        """Makes the proposers forget the remembered text of a sequence."""
        for proposer in self._proposers:
            proposer.forget(sequence)

    def start(self, request: SpeculativeState) -> None:
        """Starts all proposers for a request, whose `history` holds the prompt."""
        for proposer in self._proposers:
            proposer.start(request)
        if request.constraint is not None and FORCED not in self._names:
            self._names += (FORCED,)
        self.asks = True

    def propose(self, done: Round, requests: Sequence[SpeculativeState]) -> None:
        """Sets each request's tree (None: plain decoding); notes the drafts in the Round `done`."""
        controller, clock = self._controller, self._clock
        break_even, asked = controller.break_even(done), []
        for request in requests:
            request.tree = None
            request.proposed.clear()
            if (limit := request.limit) > 0:
                request.n_nodes = min(request.n_room - 1, controller.n_nodes)
                request.n_positions = min(limit, controller.longest)
                request.shape, request.break_even = TREE, break_even
                asked.append(request)
        done.asked = self._names
        if not asked:
            return
        with clock("select"):
            for proposer in self._free:
                self._ask(proposer, asked)
        self._constrain(asked)
        done.free = tuple(x for x in done.asked if any(x in y.proposed for y in asked))
        with clock("choose"):
            plan = controller.plan(done, asked, self._drafters)
        if plan is not None:
            proposer = next(p for p in self._drafters if p.name == plan.proposer)
            done.proposer, done.is_top1 = plan.proposer, plan.shape == TOP1
            done.n_positions = n = min(plan.n_positions, proposer.max_draft)
            for request in asked:
                request.n_positions, request.shape = min(request.limit, n), plan.shape
                # The draft first computes the K/V of tokens since the drafter's last one.
                done.is_timing_shared |= request.drafted_by != plan.proposer
                request.drafted_by = plan.proposer
            done.n_draft_rows = proposer.draft_rows([x.n_positions for x in asked])
            with clock("draft"):
                self._ask(proposer, asked)
            self._constrain(asked)
        proposed = [request for request in asked if request.proposed]
        if proposed:
            with clock("select"):
                trees = [request.merged() for request in proposed]
                limits = [request.n_room - 1 for request in proposed]
                selected = controller.select(done, trees, limits)
            for request, tree in zip(proposed, selected, strict=True):
                if tree.n_drafted:
                    request.tree = tree
                    done.add_tree(tree)

    def observe(
        self,
        done: Round,
        requests: Sequence[SpeculativeState],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Learns from a round, given the target's tokens for each request."""
        if self.asks:
            for proposer in self._proposers:
                proposer.observe(requests, tokens)
            self._controller.observe(done)
        else:
            self._controller.rest(done)
        self.asks = self._controller.asks(self._names)

    def _constrain(self, requests: Sequence[SpeculativeState]) -> None:
        """Drops forbidden candidates, and proposes forced tokens, which nothing has to draft."""
        constrained = [request for request in requests if request.constraint is not None]
        if not constrained:
            return
        with self._clock("mask"):
            for request in constrained:
                constraint, proposed = request.constraint, request.proposed
                assert constraint is not None
                for name, tree in list(proposed.items()):
                    proposed[name] = constraint.allowed(tree)
                    if not proposed[name].n_drafted:
                        del proposed[name]
                roots = [Tree.of([request.history[-1]])]
                tree = merged([*roots, *proposed.values()])
                forced = constraint.forced(tree, min(request.limit, request.n_nodes))
                if forced.n_drafted > tree.n_drafted:
                    proposed[FORCED] = merged([*roots, forced])

    def _ask(self, proposer: Proposer, requests: Sequence[SpeculativeState]) -> None:
        name = proposer.name
        asked = [request for request in requests if name not in request.failed]
        if not asked:
            return
        for request, tree in zip(asked, proposer.propose(asked), strict=True):
            if tree is None:
                request.failed.add(name)
            elif tree.n_drafted:
                request.proposed[name] = tree
