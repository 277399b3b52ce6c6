"""One round of speculative decoding: what is verified, and what is learned of it.

    propose   proposers give trees of candidates, a controller selects the nodes to verify
    verify    the target runs once over their tree (a chain is a tree of width 1)
    follow    from the root down, while the target's own token is a child of the node
    commit    the path stays in every cache; the rest leaves no trace

The scheduler runs such rounds of many answers; simulations run those of none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..native import BreakEven
from .controller import Controller
from .cost_model import Round
from .proposers.proposer import TOP1, TREE, Proposer, SpeculativeState

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) between micro-batches. It may raise, to cancel."""

Clock = Callable[[str], AbstractContextManager[object]]
"""Gives what times a with block, by the name of a phase."""


class RowsLike(Protocol):
    """The target's scores of one pass, one row per token asked for; valid until the next pass."""

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, lowest id on ties; no row is copied."""

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """One row, float32 [n_vocab], fetched when asked for."""


NEW = 6
"""Rounds before the one in which a new answer is asked, even where the others rest for as long
after it: by then one that copies has begun to. It costs a thirtieth of a round of eight small
answers."""


def untimed(_phase: str) -> AbstractContextManager[object]:
    """A clock that measures nothing."""
    return nullcontext()


class Speculator:
    """Proposes candidates for rounds, and selects those that are verified.

    All is for lists of requests, one for each sequence that the next pass serves.
    """

    def __init__(
        self, proposers: Sequence[Proposer], controller: Controller, clock: Clock = untimed
    ) -> None:
        """clock: of "choose", "draft" and "select"."""
        self._proposers, self._controller, self._clock = proposers, controller, clock
        self._free = [proposer for proposer in proposers if not proposer.needs_forward]
        self._paid = [proposer for proposer in proposers if proposer.needs_forward]
        self.n_pause = 0
        """Plain rounds that are due before all need be asked again: `pass_over` counts them."""
        self._new: dict[SpeculativeState, int] = {}  # that decode since, and for how many rounds
        # Rounds that the controller has not observed, as one for each kind; the newest is the last.
        self._plain: dict[tuple[int, int, bool], Round] = {}
        self._is_quiet, self._host_s = False, 0.0

    def start(self, request: SpeculativeState) -> None:
        """An answer begins, with its prompt in `seen`."""
        for proposer in self._proposers:
            proposer.start(request)

    def start_decoding(self, request: SpeculativeState) -> None:
        """An answer decodes from the next round on: it is asked, even where the others rest."""
        self._new[request] = 0

    @property
    def n_quiet(self) -> int:
        """Rounds in which nobody is to be asked."""
        n_new = NEW - max(self._new.values()) if self._new else self.n_pause
        return n_new if self.n_pause - n_new > NEW else self.n_pause

    @property
    def asks(self) -> bool:
        """Whether anybody is to be asked before the next round."""
        return self.n_quiet == 0

    def propose(self, done: Round, requests: Sequence[SpeculativeState]) -> None:
        """Gives each request its tree, None for a plain row. Fills in what was drafted."""
        started = time.perf_counter()
        controller, clock = self._controller, self._clock
        rests = self.n_pause > 0 and any(request not in self._new for request in requests)
        if rests and self._paid and controller.is_due(done):
            rests = False  # drafts may pay for so many
        self._host_s = 0.0
        asked = requests
        if rests:
            new = self._new
            asked = [request for request in requests if new.get(request) == NEW]
        for request in requests:
            request.tree = None
            if request.proposed:
                request.proposed.clear()
        with clock("select"):
            break_even = controller.break_even(done)
            drafting = self._limit(asked, break_even)
            has_free = self._ask(self._free, drafting)
        if rests:
            if not has_free:
                return
            drafting = self._limit(requests, break_even)
        if not drafting:
            return
        self._new.clear()
        self._is_quiet = not has_free and controller.keeps_plain(done, self._n_plain(done))
        if self._is_quiet:
            self._host_s = time.perf_counter() - started
            return
        self._end_rest()
        paid = self._paid[0] if self._paid else None
        is_due = controller.is_due(done)
        if is_due:
            with clock("choose"):
                way = controller.choose(done, drafting, paid)
        else:
            way = controller.choose(done, drafting, paid)
        if way is not None and paid is not None:
            n = min(way.n_positions, paid.max_draft)
            done.n_positions, done.is_top1, done.has_both_kinds = n, way.shape == TOP1, has_free
            for request in drafting:
                request.n_positions = min(request.limit, n)
                request.shape = way.shape
            n_rows = sum([request.n_positions + 1 for request in drafting])
            done.n_draft_rows_saved = done.n_asked * (n + 1) - n_rows
            with clock("draft"):
                has_free |= self._ask(self._paid, drafting)
        if has_free:
            with clock("select"):
                self._select_nodes(done, drafting)
        self._host_s = 0.0 if is_due or rests else time.perf_counter() - started

    def observe(
        self,
        done: Round,
        requests: Sequence[SpeculativeState],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Learns from a round and the tokens that the target chose in it for each request."""
        if self._is_quiet:
            self.pass_over(done)
            return
        for proposer in self._proposers:
            for request, chosen in zip(requests, tokens, strict=True):
                if proposer.name not in request.failed:
                    proposer.observe(request, chosen)
        if done.is_plain:
            self._compare(done, requests, tokens)
        if done.has_both_kinds:
            free = {proposer.name for proposer in self._free}
            done.n_lookup_accepted = sum(
                n_taken
                for request, chosen in zip(requests, tokens, strict=True)
                for name, _, n_taken in request.credits(chosen)
                if name in free
            )
        self._controller.observe(done)
        if not done.n_positions and self._controller.keeps_plain(done, 0):
            self.n_pause = self._controller.pause(done, self._host_s)

    def _compare(
        self, done: Round, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        """What would have come of candidates that were not verified."""
        for request, chosen in zip(requests, tokens, strict=True):
            if request.proposed:
                tree = request.merged()
                firsts = [at for at, parent in enumerate(tree.parents) if parent == 0]
                done.n_expected += sum(math.exp(tree.log_probs[at]) for at in firsts)
                done.n_accepted += any(tree.tokens[at] == chosen[0] for at in firsts)

    @property
    def is_quiet(self) -> bool:
        """Whether the round is plain and there is nothing to learn but how long it takes."""
        return self._is_quiet or self.n_pause > 0

    def pass_over(self, done: Round) -> None:
        """Counts a quiet round."""
        n, n_pause = done.n_rounds, self.n_pause - done.n_rounds
        if self._new:
            self._new = {new: at + n for new, at in self._new.items() if at + n <= NEW}
        kind = done.n_sequences, done.n_undrafted, done.is_timing_shared
        plain = self._plain.pop(kind, None)
        if plain is None:
            plain = replace(done, draft_s=0.0)  # of those that were asked in vain
        else:
            plain.add_plain(done)
        self._plain[kind] = plain
        if self._is_quiet:
            self._is_quiet = False
            # Where rounds are brief, even asking for copies is too much to be done in each.
            n_pause = self._controller.pause(done, self._host_s)
        self.n_pause = n_pause

    def end(self) -> None:
        """No answer is left: the controller observes what it was not told yet."""
        self._new.clear()
        self._end_rest()

    def _end_rest(self) -> None:
        self.n_pause = 0
        self._tell()

    def _tell(self) -> None:
        untold, self._plain = self._plain, {}
        for plain in untold.values():
            self._controller.observe(plain)

    def _n_plain(self, done: Round) -> int:
        """Rounds of as many sequences that the controller has not observed."""
        n, n_undrafted = done.n_sequences, done.n_undrafted
        found = (
            self._plain.get((n, n_undrafted, is_timing_shared))
            for is_timing_shared in (False, True)
        )
        return sum(plain.n_rounds for plain in found if plain is not None)

    def _limit(
        self, requests: Sequence[SpeculativeState], break_even: BreakEven
    ) -> list[SpeculativeState]:
        """Those of whom anything may be verified, with how much that is at most."""
        n_nodes, longest, found = self._controller.n_nodes, self._controller.longest, []
        for request in requests:
            if (limit := request.limit) > 0:
                request.n_nodes = min(request.n_room - 1, n_nodes)
                request.n_positions, request.shape = min(limit, longest), TREE
                request.break_even = break_even
                found.append(request)
        return found

    def _ask(self, proposers: Sequence[Proposer], requests: Sequence[SpeculativeState]) -> bool:
        """Whether anything is proposed."""
        is_any = False
        for proposer in proposers:
            name = proposer.name
            asked = [request for request in requests if name not in request.failed]
            if not asked:
                continue
            for request, tree in zip(asked, proposer.propose(asked), strict=True):
                if tree is None:
                    request.failed.add(name)
                elif tree.n_drafted:
                    request.proposed[name] = tree
                    is_any = True
        return is_any

    def _select_nodes(self, done: Round, requests: Sequence[SpeculativeState]) -> None:
        proposed = [request for request in requests if request.proposed]
        trees = [request.merged() for request in proposed]
        limits = [request.n_room - 1 for request in proposed]
        for request, tree in zip(
            proposed, self._controller.select_nodes(done, trees, limits), strict=True
        ):
            if tree.n_drafted:
                request.tree = tree
                done.add_tree(tree)
