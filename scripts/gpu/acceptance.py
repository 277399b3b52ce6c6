"""Simulates drafts that gain as many tokens a round as those of published drafters.

At a share UNSURE of the positions, each candidate is RIVAL times as probable as the next better
one, so trees branch there; elsewhere the best candidate is all but certain. UNSURE and RIVAL are
fitted to both figures of PUBLISHED. Source of PUBLISHED: Lucebox, Qwen3.5-27B on HumanEval, tokens
a round with chains of 15 and trees of 22.
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
"""Ratio of a candidate's probability to the next better candidate's where a drafter is sure."""
FIRST_ID = 300
"""Smallest id of a random token, as lower ids may be special tokens."""
N_DRAWS = 600


def draw(random: np.random.Generator, n_vocab: int) -> PositionCandidates:
    """Draws a draft: N_RANKS candidates and log-probabilities for each of N_POSITIONS."""
    unsure = random.random(N_POSITIONS) < UNSURE
    ratio = np.where(unsure, RIVAL, CERTAIN)[:, None]
    first = random.integers(FIRST_ID, n_vocab - N_RANKS, N_POSITIONS)[:, None]
    steps = np.log1p(-ratio) + np.arange(N_RANKS) * np.log(ratio)
    return PositionCandidates(first + np.arange(N_RANKS), steps)


def shape(candidates: PositionCandidates, kind: str, size: int, root: int = FIRST_ID) -> Tree:
    """Returns a chain or a best-first tree of the `size` most probable candidates."""
    build = chain if kind == "chain" else best_first_tree
    return build(root, candidates, size)


@lru_cache
def tokens_a_round(kind: str, size: int) -> float:
    """Returns the expected tokens of a round: 1, plus the accepted ones of a mean draft."""
    random = np.random.default_rng(1)
    drafts = (draw(random, 1 << 16) for _ in range(N_DRAWS))
    return float(np.mean([np.exp(shape(draft, kind, size).log_probs).sum() for draft in drafts]))


def chosen(candidates: PositionCandidates, random: np.random.Generator) -> Iterator[int]:
    """Yields a target's token for each position, sampled by the candidates' probabilities."""
    for tokens, steps in zip(candidates.tokens, candidates.log_probs, strict=True):
        chances = np.exp(steps)
        rank = random.choice(N_RANKS, p=chances / chances.sum())
        yield int(tokens[rank])
