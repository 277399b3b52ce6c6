"""The MTP layer as a proposer: it drafts step by step, along the tokens that are likely sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...native import Draft
from ...text.stream import n_common
from ..ddtree import PositionCandidates
from ..tree import Tree
from .dflash import N_RANKED, DFlash
from .proposer import CHAIN, MAIN_CHAIN, SpeculativeState

_FOLLOWED = "mtp path"
"""Key of `SpeculativeState.notes`: the drafted token of each step, which the next step followed."""


class Mtp(DFlash):
    """Proposes the path that the steps followed, and beside each of its tokens other candidates."""

    name = "mtp"
    samples = True
    lengths = (1, 2, 3, 5)

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Learns from tokens up to the first one that left the path, as the rest has no candidates.

        The candidates of a position are those after the followed tokens only.
        """
        judged = []
        for request, chosen in zip(requests, tokens, strict=True):
            followed = request.notes.pop(_FOLLOWED, None)
            n = len(chosen) if followed is None else n_common(followed, list(chosen)) + 1
            judged.append(chosen[:n])
        super().observe(requests, judged)

    def draft_rows(self, lengths: Sequence[int]) -> int:
        """Returns the rows of the longest draft: each takes a pass, for all sequences together."""
        return max(lengths) + 1

    def _width(self, request: SpeculativeState) -> int:
        width = super()._width(request)
        return width if request.scorer.config.temperature == 0.0 else N_RANKED

    def _brief(self, request: SpeculativeState, draft: Draft) -> Tree:
        tree = super()._brief(request, draft)
        drafted = request.notes[self.name]
        request.notes[_FOLLOWED] = followed = draft.tokens[:, 0].tolist()
        if drafted == followed:
            return tree
        request.notes[self.name] = drafted = drafted[: n_common(followed, drafted) + 1]
        return tree.first(len(drafted))

    def _tree(
        self, request: SpeculativeState, draft: Draft, candidates: PositionCandidates
    ) -> Tree:
        request.notes[_FOLLOWED] = followed = draft.tokens[:, 0].tolist()
        return tree_beside(
            request.history[-1], candidates, followed, request.n_nodes, request.shape
        )


def tree_beside(
    root: int, candidates: PositionCandidates, followed: Sequence[int], budget: int, shape: str
) -> Tree:
    """Returns the `budget` most probable nodes of a path and the other candidates of its positions.

    shape: CHAIN: only the best candidate of each position, up to the first that is not on the path.
    MAIN_CHAIN: the path comes before all other nodes.
    """
    # Nodes as (is not on a main chain, -log-probability, depth, token); parents sort before their
    # children, as no candidate raises a path's probability.
    nodes, path = [], 0.0
    for depth, on_path in enumerate(followed):
        ids, steps = candidates.tokens[depth].tolist(), candidates.log_probs[depth].tolist()
        step = dict(zip(ids, steps, strict=True)).get(on_path, -math.inf)
        for token, log_prob in list(zip(ids, steps, strict=True))[: 1 if shape == CHAIN else None]:
            if log_prob > -math.inf:
                is_behind = shape == MAIN_CHAIN and token != on_path
                nodes.append((is_behind, -path - log_prob, depth, token))
        path += step
        if step == -math.inf or (shape == CHAIN and ids[0] != on_path):
            break
    tokens, parents, depths, log_probs = [root], [-1], [0], [0.0]
    at = {-1: 0}  # node of the followed token, by depth
    for _, cost, depth, token in sorted(nodes, key=lambda node: node[:3])[:budget]:
        if token == followed[depth]:
            at[depth] = len(tokens)
        tokens.append(token)
        parents.append(at[depth - 1])
        depths.append(depth + 1)
        log_probs.append(-cost)
    return Tree(tokens, parents, depths, log_probs)
