"""Interface of proposers: a tree of candidates for each sequence, with a log-probability a node.

A proposer may be a drafter, a head of the target that runs step by step, or a copier of earlier
text. All candidates are verified, so a bad proposer costs time and changes no text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...native import NO_THRESHOLD, BreakEven, Draft, DraftRequest
from ...sampling.noise import DraftScorer
from ..tree import Tree, merged

TOP1, CHAIN, TREE, MAIN_CHAIN = "top1", "chain", "tree", "main chain"
"""Shapes of a proposal: the best continuation as quickly as it is had; the best one by all that is
known; the likeliest nodes; all of the chain of best candidates, and the likeliest nodes beside."""


class DraftSource(Protocol):
    """Sequence, as proposers use it."""

    @property
    def n_ctx(self) -> int:
        """Tokens that its context holds."""

    @property
    def max_draft(self) -> int:
        """Tokens of one draft of its drafter at most; 0 without one."""

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """Returns the drafter's k best candidates for each of n_draft positions after a token."""


@dataclass(slots=True, eq=False)
class SpeculativeState:
    """State of an answer that proposers read and write.

    sequence: whose it is, `DraftSource` where there is a drafter. history: prompt and answer; its
    last token is chosen, but not in the caches yet. scorer: knows what the target's sampler does.
    n_left: tokens the answer may still take. n_room: rows of the pass at most.
    n_positions, n_nodes, shape: what is asked for in this round: positions, and nodes below the
    root, at most. break_even: the expected tokens that nodes of all requests must exceed.
    notes: what proposers keep until they are asked again, by their names.
    failed: names of proposers that have failed for this answer.
    proposed: candidates of this round by proposer. tree: what is verified, if anything is.
    has_drafted: False until a draft has taken the prompt into the drafter's K/V.
    """

    sequence: Any
    history: Sequence[int]
    scorer: DraftScorer
    n_left: int = 0
    n_room: int = 0
    n_positions: int = 0
    n_nodes: int = 0
    shape: str = TREE
    break_even: BreakEven = NO_THRESHOLD
    notes: dict[str, Any] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    proposed: dict[str, Tree] = field(default_factory=dict)
    tree: Tree | None = None
    has_drafted: bool = False

    @property
    def limit(self) -> int:
        """Candidates of a chain that may be verified: what ends the answer need not be drafted."""
        return min(self.n_left, self.n_room) - 1

    def merged(self) -> Tree:
        """All that was proposed, as one tree; something was."""
        return merged(list(self.proposed.values()))

    def credits(self, tokens: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Yields each proposer's name, its verified candidates and its accepted ones.

        A candidate of several proposers counts for each. tokens: chosen by the target.
        """
        if self.tree is None:
            return
        path = self.tree.accepted(tokens)[1:]
        for name, proposed in self.proposed.items():
            if len(self.proposed) == 1:
                yield name, self.tree.n_drafted, len(path)
                return
            place: list[int | None] = [0]
            for parent, token in zip(self.tree.parents[1:], self.tree.tokens[1:], strict=True):
                above = place[parent]
                place.append(None if above is None else proposed.child(above, token))
            n_drafted = sum(at is not None for at in place) - 1
            yield name, n_drafted, sum(place[node] is not None for node in path)


class Proposer:
    """Source of candidates for the next tokens.

    name: in `draft_type` and in reports. needs_forward: True if a proposal takes a pass of a model;
    other proposers are asked first, in every round. max_draft: most positions of a proposal.
    """

    name: str
    needs_forward = True
    max_draft = 0

    def start(self, request: SpeculativeState) -> None:
        """Begins an answer, whose prompt is in `history`.

        Whatever the proposer remembers of the sequence is valid as far as both texts agree.
        """

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        """Returns a tree for each request: a bare root without candidates, None for a failure.

        After a failure the proposer is not asked again for the answer.
        """
        raise NotImplementedError

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Learns from the tokens that the target chose for each request in a round of any kind."""

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        """Returns the expected probabilities of the paths of the likeliest chain, by depth."""
        return ()

    def forget(self, sequence: Any) -> None:
        """Forgets the texts of a sequence."""

    def to_dict(self) -> dict[str, Any]:
        """Returns learned values, for `learn` of a later process."""
        return {}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Restores `to_dict` of an earlier process.

        Errors: KeyError, TypeError or ValueError for anything else; nothing is changed then.
        """


def draft_for_all(requests: Sequence[SpeculativeState], widths: Sequence[int]) -> list[Draft]:
    """The drafter's candidates for all requests, so many a position for each.

    In as few passes as there may be.
    """
    if len(requests) == 1:
        (request,), (width,) = requests, widths
        return [request.sequence.draft(request.history[-1], request.n_positions, width)]
    engine = requests[0].sequence.engine
    drafts: list[Draft] = []
    waiting = list(requests)
    while waiting:
        n_rows = list(itertools.accumulate(request.n_positions + 1 for request in waiting))
        n = max(1, sum(rows <= engine.max_verify for rows in n_rows))
        asked = [DraftRequest(x.sequence, x.history[-1], x.n_positions) for x in waiting[:n]]
        drafts += engine.draft(asked, max(widths[len(drafts) : len(drafts) + n]))
        del waiting[:n]
    return [
        draft
        if draft.tokens.shape[1] == width
        else Draft(draft.tokens[:, :width], draft.logits[:, :width], draft.log_sum_exp)
        for draft, width in zip(drafts, widths, strict=True)
    ]
