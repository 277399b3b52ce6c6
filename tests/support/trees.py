"""Verify trees: shapes, tokens, and the expected rows of serial runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dflash_gguf.native import Prefix, Sequence

N_CHOICES = 5
"""Tokens to choose from: few, so that cousins often agree and only their ancestors differ."""


def star(n: int) -> list[int]:
    return [-1] + [0] * (n - 1)


def deep(n: int) -> list[int]:
    return list(range(-1, n - 1))


def comb(n: int) -> list[int]:
    """Returns parents of a main chain of odd nodes, each with a leaf as its sibling."""
    return [-1, *(max(0, i - 1 - (i + 1) % 2) for i in range(1, n))]


def bushy(n: int) -> list[int]:
    return [-1, *((i - 1) // 2 for i in range(1, n))]


def scattered(n: int, random: np.random.Generator) -> list[int]:
    """Returns random parents of n nodes, recent nodes more often."""
    return [-1, *(int(i * random.beta(2, 1)) for i in range(1, n))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def tokens_for(parents: list[int], random: np.random.Generator, n_vocab: int) -> list[int]:
    tokens = [int(random.integers(n_vocab))]
    for node in range(1, len(parents)):
        taken = {tokens[x] for x in range(1, node) if parents[x] == parents[node]}
        few = [x for x in range(10, 10 + N_CHOICES) if x not in taken]
        many = [x for x in range(20, n_vocab) if x not in taken]
        tokens.append(int(random.choice(few or many)))
    return tokens


def serial_logits(
    sequence: Sequence, start: Prefix, tokens: list[int], parents: list[int]
) -> NDArray[np.float32]:
    """Returns each node's row by a run of its path after `start`, float32 [n_nodes, n_vocab].

    The sequence never verifies.
    """
    rows = np.full((len(tokens), sequence.engine.model.n_vocab), np.nan, dtype=np.float32)
    leaves = set(range(len(tokens))) - set(parents)
    for leaf in leaves:
        path = path_to(parents, leaf)
        sequence.attach(start, start.n_tokens)
        rows[path] = sequence.logits([tokens[x] for x in path])
    return rows


def cousins(tokens: list[int], parents: list[int]) -> list[tuple[int, int]]:
    """Returns pairs of nodes with equal token and depth, but different ancestors."""
    depth = [len(path_to(parents, x)) for x in range(len(parents))]
    n = range(len(parents))
    return [(a, b) for a in n for b in range(a) if tokens[a] == tokens[b] and depth[a] == depth[b]]
