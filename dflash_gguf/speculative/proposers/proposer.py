"""Interface of proposers: sources of candidate trees with a log-probability for each node.

A proposer is a draft model, a prediction head of the target, or an index of earlier text. The
target verifies all candidates, so a bad proposer costs time but never changes the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...native import NO_THRESHOLD, BreakEven, CoreSampler, Draft, DraftRequest
from ...sampling.noise import DraftScorer
from ..tree import Tree, merged

TOP1, CHAIN, TREE, MAIN_CHAIN = "top1", "chain", "tree", "main chain"
"""Shapes of a draft: best candidates without ranking (fast); the best ranked chain; the most
probable nodes; the whole main chain and the most probable other nodes."""


class DraftSource(Protocol):
    """The members of a KV sequence that proposers use."""

    @property
    def n_ctx(self) -> int:
        """Number of tokens that the sequence's context holds."""

    def draft(self, last_token: int, n_draft: int, k: int = 1, drafter: int = 0) -> Draft:
        """Returns a drafter's k best candidates for n_draft positions after last_token."""


class TreeConstraint(Protocol):
    """The members of an answer's constraint that drafting uses."""

    def forced(self, tree: Tree, depth: int) -> Tree:
        """Returns a tree with the tokens that have no alternative behind any of its nodes."""

    def allowed(self, tree: Tree) -> Tree:
        """Returns a tree without the nodes that the constraint forbids, else in the same order."""


@dataclass(slots=True, eq=False)
class SpeculativeState:
    """The state of a request that proposers and controllers read and write.

    sequence: KV sequence of the request. history: prompt and generated tokens; the last one is not
    in the caches yet. scorer: predicts the sampler's effect on candidates. n_left: tokens that may
    still be generated. n_room: maximum rows of the request in the pass. n_positions, n_nodes,
    shape: maximum depth, maximum nodes below the root and shape of this round's draft. break_even:
    tokens that the nodes of all requests must gain. notes: data that proposers keep between calls,
    by proposer. failed: names of proposers that failed for this request. proposed: trees of this
    round by proposer. tree: the tree to verify, None for plain decoding. drafted_by: name of
    the proposer that drafted last, whose K/V are up to date. scope: requests of the same scope may
    be proposed each other's texts. constraint: forbids candidates; None if the answer is free.
    core_sampler: the request's sampler, which a draft that depends on the path follows.
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
    drafted_by: str = ""
    scope: Hashable = ""
    constraint: TreeConstraint | None = None
    core_sampler: CoreSampler | None = None

    @property
    def limit(self) -> int:
        """Maximum drafted tokens on a path; the target itself adds the last token of the answer."""
        return min(self.n_left, self.n_room) - 1

    def merged(self) -> Tree:
        """Merges the trees of all proposers into one; at least one proposer must have proposed."""
        return merged(list(self.proposed.values()))

    def credits(self, tokens: Sequence[int], n_accepted: int) -> Iterator[tuple[str, int, int]]:
        """Yields (proposer, number verified, number accepted), given the target's tokens.

        n_accepted: number of accepted candidates.
        """
        if self.tree is None:
            return
        if len(self.proposed) == 1:
            yield next(iter(self.proposed)), self.tree.n_drafted, n_accepted
            return
        path = self.tree.accepted(tokens)[1:]
        for name, proposed in self.proposed.items():
            place: list[int | None] = [0]
            for parent, token in zip(self.tree.parents[1:], self.tree.tokens[1:], strict=True):
                above = place[parent]
                place.append(None if above is None else proposed.child(above, token))
            n_drafted = sum(at is not None for at in place) - 1
            yield name, n_drafted, sum(place[node] is not None for node in path)


class Proposer:
    """A source of candidates for the next tokens.

    name: used in `draft_type` and in reports. needs_forward: True if a proposal runs a model's
    forward pass; the other proposers are called before, in every round. max_draft: maximum
    positions of a draft. lengths: draft lengths that `auto` tries beside max_draft: with the root
    they should fill 4, 8 or 16 kernel rows, unless each position takes a pass of its own.
    """

    name: str
    needs_forward = True
    max_draft = 0
    lengths: Sequence[int] = (3, 7, 15)

    def start(self, request: SpeculativeState) -> None:
        """Begins a request; keeps the remembered text as far as `history` begins alike."""

    def draft_rows(self, lengths: Sequence[int]) -> int:
        """Returns the rows by which the time of a draft of these lengths is filed."""
        return sum(lengths) + len(lengths)

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        """Returns a tree for each request: a bare root without candidates, None after a failure."""
        raise NotImplementedError

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Learns from the target's tokens of a round, drafted or plain."""

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:  # noqa: ARG002
        """Returns, by depth, the expected probability that a top-1 chain is accepted that far."""
        return ()

    def forget(self, sequence: Any) -> None:
        """Forgets the remembered text of a sequence."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the proposer's learned values, to be restored in a later process."""
        return {}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Restores learned values. KeyError, TypeError or ValueError, without change, if bad."""


def draft_for_all(
    requests: Sequence[SpeculativeState],
    widths: Sequence[int],
    drafter: int = 0,
    *,
    samples: bool = False,
) -> list[Draft]:
    """Drafts in as few passes as possible, for request i widths[i] candidates a position.

    drafter: index of the engine's drafter. samples: True to follow the tokens that the requests'
    samplers are predicted to sample.
    """
    if len(requests) == 1:
        (request,), (width,) = requests, widths
        sequence, last, n = request.sequence, request.history[-1], request.n_positions
        if not samples or request.core_sampler is None:
            return [sequence.draft(last, n, width, drafter)]
        one: list[Draft] = sequence.engine.draft(
            [DraftRequest(sequence, last, n, request.core_sampler)], width, drafter
        )
        return one
    engine = requests[0].sequence.engine
    drafts: list[Draft] = []
    waiting = list(requests)
    while waiting:
        n_rows = list(itertools.accumulate(request.n_positions + 1 for request in waiting))
        n = max(1, sum(rows <= engine.max_verify for rows in n_rows))
        asked = [
            DraftRequest(
                x.sequence, x.history[-1], x.n_positions, x.core_sampler if samples else None
            )
            for x in waiting[:n]
        ]
        drafts += engine.draft(asked, max(widths[len(drafts) : len(drafts) + n]), drafter)
        del waiting[:n]
    return [
        draft
        if draft.tokens.shape[1] == width
        else Draft(draft.tokens[:, :width], draft.logits[:, :width], draft.log_sum_exp)
        for draft, width in zip(drafts, widths, strict=True)
    ]
