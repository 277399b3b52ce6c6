"""A drafter by chance that gains as many tokens a round as published ones did.

Most of its candidates are all but certain; a share UNSURE of positions has a rival for the best
one, which has RIVAL of its chance, and so on down the ranks. It knows which positions these are,
as a calibrated drafter does, so trees branch there. The two numbers are chosen so that both
published figures come out: Lucebox, Qwen3.5-27B on HumanEval, tokens a round with chains of 15
and with trees of 22.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from dflash_gguf.speculative.ddtree import PositionCandidates, best_first_tree, chain
from dflash_gguf.speculative.tree import Tree

PUBLISHED = {"chain 15": 7.67, "tree 22": 8.88}
UNSURE, RIVAL = 0.343, 0.33
N_POSITIONS, N_RANKS = 15, 8
CERTAIN = 1e-6
"""A rival's chance where the drafter is sure."""
FIRST_ID = 300
"""Lower ids may have a meaning of their own."""
N_DRAWS = 600


def draw(random: np.random.Generator, n_vocab: int) -> PositionCandidates:
    """Draws the proposal of one round."""
    unsure = random.random(N_POSITIONS) < UNSURE
    ratio = np.where(unsure, RIVAL, CERTAIN)[:, None]
    first = random.integers(FIRST_ID, n_vocab - N_RANKS, N_POSITIONS)[:, None]
    steps = np.log1p(-ratio) + np.arange(N_RANKS) * np.log(ratio)
    return PositionCandidates(first + np.arange(N_RANKS), steps)


def shape(candidates: PositionCandidates, kind: str, size: int, root: int = FIRST_ID) -> Tree:
    """The chain or the tree of so many candidates."""
    build = chain if kind == "chain" else best_first_tree
    return build(root, candidates, size)


@lru_cache
def tokens_a_round(kind: str, size: int) -> float:
    """Mean over many rounds; 1 for a round without candidates."""
    random = np.random.default_rng(1)
    drafts = (draw(random, 1 << 16) for _ in range(N_DRAWS))
    return float(np.mean([np.exp(shape(draft, kind, size).log_probs).sum() for draft in drafts]))


def chosen(candidates: PositionCandidates, random: np.random.Generator) -> Iterator[int]:
    """One draw of the target's choices, position by position."""
    for tokens, steps in zip(candidates.tokens, candidates.log_probs, strict=True):
        chances = np.exp(steps)
        rank = random.choice(N_RANKS, p=chances / chances.sum())
        yield int(tokens[rank])
