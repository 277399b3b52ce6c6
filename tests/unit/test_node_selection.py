"""Node selection compared with brute force; suffix drafts cut where they stop paying."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dflash_gguf.native import NO_THRESHOLD, BreakEven, Error, Proposals, SuffixIndex, select_nodes
from dflash_gguf.speculative.tree import Tree


def random_tree(rng: np.random.Generator, n: int) -> Tree:
    """Returns a tree with random probabilities, nodes in falling order of probability."""
    nodes = [(0.0, -1)]
    for _ in range(n):
        parent = int(rng.integers(len(nodes))) if rng.random() < 0.5 else len(nodes) - 1
        nodes.append((nodes[parent][0] + math.log(rng.uniform(0.05, 1.0)), parent))
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    number = {node: at for at, node in enumerate(order)} | {-1: -1}
    parents = [number[nodes[node][1]] for node in order]
    tree = Tree.of(list(range(len(nodes))), parents)
    return Tree(tree.tokens, parents, tree.depths, [nodes[node][0] for node in order])


def random_worth(rng: np.random.Generator, most: int) -> BreakEven:
    """Returns random break-even steps above 0, some of them infinite."""
    sizes = sorted(rng.choice(np.arange(1, most + 1), size=min(6, most), replace=False).tolist())
    chains = np.cumsum(rng.uniform(0.0, 0.6, len(sizes)))
    trees = chains * rng.uniform(0.9, 1.5)
    chains[len(sizes) // 2 :] += rng.choice([0.0, math.inf])
    return BreakEven(sizes, chains.tolist(), trees.tolist())


def best_by_hand(
    trees: Sequence[Tree], limits: Sequence[int], break_even: BreakEven, least: float
) -> tuple[float, list[int], bool]:
    """Returns value, nodes per tree and is_tree of the best choice among all sizes."""
    best, found, is_best_tree = least, [0] * len(trees), False
    for is_tree, prices in ((False, break_even.chains), (True, break_even.trees)):
        parts = trees if is_tree else [tree.main_chain() for tree in trees]
        nodes = [
            (log, at)
            for at, (part, limit) in enumerate(zip(parts, limits, strict=True))
            for log in part.log_probs[1 : limit + 1]
        ]
        nodes.sort(key=lambda node: -node[0])
        for size, price in zip(break_even.sizes, prices, strict=True):
            counts = [sum(at == tree for _, tree in nodes[:size]) for at in range(len(trees))]
            taken = [part.first(n) for part, n in zip(parts, counts, strict=True)]
            if size > len(nodes) or (is_tree and all(tree.is_chain for tree in taken)):
                continue
            value = sum(math.exp(log) for log, _ in nodes[:size]) - price
            if value > best:
                best, found, is_best_tree = value, counts, is_tree
    return best, found, is_best_tree


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("least", [0.0, -math.inf])
def test_the_best_number_of_nodes_is_taken(seed: int, least: float) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(0, 25))) for _ in range(rng.integers(1, 5))]
    limits = [int(rng.integers(0, 30)) for _ in trees]
    break_even = random_worth(rng, 30)
    value, counts, is_tree = best_by_hand(trees, limits, break_even, least)
    got = select_nodes(
        [x.parents for x in trees],
        [x.log_probs for x in trees],
        limits,
        break_even,
        min_value=least,
    )
    assert list(got.counts) == counts
    assert got.value == pytest.approx(value)
    assert got.is_tree == is_tree


def test_without_prices_all_is_taken() -> None:
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 12), random_tree(rng, 5)]
    found = select_nodes(
        [x.parents for x in trees], [x.log_probs for x in trees], [9, 9], NO_THRESHOLD
    )
    assert found.is_tree
    assert list(found.counts) == [9, 5]


def texts_of(rng: np.random.Generator, n: int) -> tuple[list[SuffixIndex], list[list[int]]]:
    """Returns texts that repeat themselves with changes, and continuations."""
    texts, ends = [], []
    for _ in range(n):
        passage = rng.integers(0, 50, 40)
        text: list[int] = []
        for _ in range(int(rng.integers(1, 5))):
            again = np.where(rng.random(40) < 0.1, rng.integers(0, 50, 40), passage)
            text += again[: rng.integers(5, 41)].tolist()
        at = int(rng.integers(1, 30))
        index = SuffixIndex(1000)
        index.append(text)
        texts.append(index)
        ends.append(passage[at - 1 : at + int(rng.integers(0, 3))].tolist())
    return texts, ends


@pytest.mark.parametrize("seed", range(40))
def test_copies_are_those_that_would_be_verified(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    break_even = random_worth(rng, 40)
    positions = rng.integers(0, 20, n).tolist()
    most = rng.integers(0, 30, n).tolist()
    found = []
    for with_worth in (NO_THRESHOLD, break_even):
        texts, ends = texts_of(np.random.default_rng((seed, 1)), n)
        proposed = Proposals().propose(texts, ends, positions, most, with_worth)
        found.append([Tree(*x) if x else Tree.of([-1]) for x in proposed or [None] * n])
    trees, cut = found
    # Selection stops at each text's own limit of candidates.
    value, counts, is_tree = best_by_hand(trees, most, break_even, 0.0)
    parts = [
        (tree if is_tree else tree.main_chain()).first(k)
        for tree, k in zip(trees, counts, strict=True)
    ]
    assert value >= 0.0
    assert [tree.n_drafted for tree in cut] == counts
    for part, got in zip(parts, cut, strict=True):
        assert part.tokens[1:] == got.tokens[1:]
        assert (part.parents, part.depths) == (got.parents, got.depths)
        assert part.log_probs == pytest.approx(got.log_probs)


def test_most_seeds_find_something_to_cut() -> None:
    n_cut = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 6))
        break_even = random_worth(rng, 40)
        positions, most = rng.integers(0, 20, n).tolist(), rng.integers(0, 30, n).tolist()
        sizes = []
        for with_worth in (NO_THRESHOLD, break_even):
            texts, ends = texts_of(np.random.default_rng((seed, 1)), n)
            proposed = Proposals().propose(texts, ends, positions, most, with_worth) or []
            sizes.append(sum(len(tree[0]) for tree in proposed if tree))
        n_cut += 0 < sizes[1] < sizes[0]
    assert n_cut >= 20


def test_bad_prices_are_one_sentence() -> None:
    tree = Tree.chain([1, 2], [0.0, -0.1])
    for sizes in ([2, 1], [0], [3, 3]):
        break_even = BreakEven(sizes, [0.0] * len(sizes), [0.0] * len(sizes))
        with pytest.raises(Error, match="sizes must rise from 1 on"):
            select_nodes([tree.parents], [tree.log_probs], [1], break_even)
    with pytest.raises(Error, match="expected at least 1 and 0"):
        select_nodes([tree.parents], [tree.log_probs], [-1], NO_THRESHOLD)
