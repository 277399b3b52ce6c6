"""Best-first trees equal brute force over all paths; parents come first, depth is limited."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_gguf.speculative.ddtree import PositionCandidates, best_first_tree, chain
from dflash_gguf.speculative.tree import Tree, merged

ROOT = 1000


def candidates(n: int, k: int, seed: int = 0, flat: float = 1.0) -> PositionCandidates:
    """Returns random candidates, with other tokens at each position."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(k + 1, flat), size=n)[:, :k]
    tokens = np.array([rng.permutation(k) + 100 * depth for depth in range(n)])
    return PositionCandidates(tokens.reshape(n, k), np.log(-np.sort(-probs, axis=1)))


def path_of(tree: Tree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def all_paths(given: PositionCandidates) -> dict[tuple[int, ...], float]:
    """Returns every path of candidates with its log-probability."""
    found = {}
    for depth in range(1, len(given) + 1):
        for ranks in itertools.product(range(given.tokens.shape[1]), repeat=depth):
            places = (np.arange(depth), np.array(ranks))
            path = tuple(given.tokens[places].tolist())
            found[path] = float(given.log_probs[places].sum())
    return found


def check(tree: Tree, given: PositionCandidates, budget: int) -> None:
    n, k = given.tokens.shape
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.log_probs[0]) == (
        ROOT,
        -1,
        0,
        0.0,
    )
    assert len(tree.tokens) == len(tree.parents) == len(tree.depths) == len(tree.log_probs)
    assert tree.n_drafted == min(budget, sum(k**depth for depth in range(1, n + 1)))
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 <= n
        assert tree.child(parent, tree.tokens[node]) == node
        rank = given.tokens[tree.depths[parent]].tolist().index(tree.tokens[node])
        step = given.log_probs[tree.depths[parent], rank]
        assert tree.log_probs[node] == pytest.approx(tree.log_probs[parent] + step)
    keys = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (2, 3), (3, 4), (4, 3)])
@pytest.mark.parametrize("flat", [0.1, 1.0, 20.0])
def test_the_tree_holds_the_likeliest_sequences(shape: tuple[int, int], flat: float) -> None:
    for seed in range(5):
        given = candidates(*shape, seed, flat)
        ranked = sorted(all_paths(given).values(), reverse=True)
        for budget in (0, 1, 2, 3, 7, 8, 20, 256):
            tree = best_first_tree(ROOT, given, budget)
            check(tree, given, budget)
            found = [tree.log_probs[node] for node in range(1, len(tree))]
            assert found == pytest.approx(ranked[: len(found)])


def test_with_the_spine_first_the_rest_is_the_likeliest() -> None:
    for seed, budget in itertools.product(range(5), (1, 2, 4, 5, 9, 30, 200)):
        given = candidates(4, 3, seed, flat=5.0)
        tree = best_first_tree(ROOT, given, budget, main_chain=True)
        check(tree, given, budget)
        depth = min(budget, 4)
        main_chain = {tuple(given.tokens[:d, 0].tolist()) for d in range(1, depth + 1)}
        assert {path_of(tree, node) for node in range(1, depth + 1)} == main_chain
        others = [prob for path, prob in all_paths(given).items() if path not in main_chain]
        rest = sorted(others, reverse=True)[: max(0, budget - 4)]
        assert tree.log_probs[depth + 1 :] == pytest.approx(rest)


def test_big_trees_of_real_shapes() -> None:
    for n, k, budget in itertools.product((1, 7, 15), (1, 4, 32), (1, 9, 64, 255, 256)):
        given = candidates(n, k, flat=0.3)
        check(best_first_tree(ROOT, given, budget), given, budget)


def test_the_first_nodes_of_a_tree_are_the_tree_of_that_budget() -> None:
    given = candidates(6, 8)
    whole = best_first_tree(ROOT, given, 60)
    for budget in (0, 1, 5, 60, 90):
        part, alone = whole.first(budget), best_first_tree(ROOT, given, min(budget, 60))
        assert (part.tokens, part.parents) == (alone.tokens, alone.parents)
        assert (part.depths, part.log_probs) == (alone.depths, alone.log_probs)


def test_a_chain_is_the_best_of_every_position() -> None:
    given = candidates(5, 4)
    for length in range(7):
        line = chain(ROOT, given, length)
        assert line.tokens == [ROOT, *given.tokens[:length, 0]]
        assert line.is_chain
        assert line.child(0, -1) is None
    narrow = PositionCandidates(given.tokens[:, :1], given.log_probs[:, :1])
    assert best_first_tree(ROOT, narrow, 9).tokens == chain(ROOT, given, 9).tokens
    assert best_first_tree(ROOT, given, 3, main_chain=True).tokens == chain(ROOT, given, 3).tokens


def test_a_fork_is_no_chain() -> None:
    given = PositionCandidates(np.array([[1, 2], [3, 4]]), np.log([[0.5, 0.4], [0.1, 0.1]]))
    assert best_first_tree(ROOT, given, 1).is_chain
    fork = best_first_tree(ROOT, given, 2)
    assert (fork.tokens, fork.parents) == ([ROOT, 1, 2], [-1, 0, 0])
    assert not fork.is_chain
    assert [fork.child(0, token) for token in (1, 2, 3)] == [1, 2, None]


@pytest.mark.parametrize(
    "make", [chain, best_first_tree, lambda *a: best_first_tree(*a, main_chain=True)]
)
def test_what_cannot_be_taken_is_in_no_tree(make: Any) -> None:
    steps = np.log([[0.5, 0.4], [0.5, 0.4], [0.5, 0.4]])
    steps[1] = -np.inf
    steps[0, 1] = -np.inf
    tree = make(ROOT, PositionCandidates(np.array([[1, 2], [3, 4], [5, 6]]), steps), 9)
    assert tree.tokens == [ROOT, 1]


def test_equal_chances_give_equal_trees() -> None:
    given = PositionCandidates(np.arange(20).reshape(5, 4), np.full((5, 4), math.log(0.25)))
    trees = [best_first_tree(ROOT, given, 40) for _ in range(2)]
    assert trees[0] == trees[1]
    check(trees[0], given, 40)


def test_the_accepted_path_takes_no_more_tokens_than_it_needs() -> None:
    given = PositionCandidates(
        np.array([[1, 2], [3, 4], [5, 6]]), np.log([[0.5, 0.4], [0.4, 0.1], [0.4, 0.1]])
    )
    tree = best_first_tree(ROOT, given, 12)
    for tokens, n_taken in (([2, 3, 5, 7], 4), ([2, 9, 5], 2), ([9, 1, 3], 1), ([1], 1)):
        left = iter(tokens)
        path = tree.accepted(left)
        expected = tokens[: n_taken - 1] if tokens != [1] else [1]
        assert [tree.tokens[node] for node in path] == [ROOT, *expected]
        assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
        assert list(left) == tokens[n_taken:]


def test_a_path_ends_before_the_token_that_ends_it() -> None:
    tree = Tree.of([ROOT, 1, 2, 3], [-1, 0, 0, 2])
    for chosen, end, path, n_taken in (
        ([2, 3, 9], 9, [0, 2, 3], 2),
        ([2, 3, 9], 3, [0, 2], 2),
        ([2, 8], 8, [0, 2], 1),
        ([1, 9], 1, [0], 1),
    ):
        tokens, asked = iter(chosen), []

        def choose(node: int, tokens: Iterator[int] = tokens, asked: list[int] = asked) -> int:
            asked.append(node)
            return next(tokens)

        assert tree.follow(choose, lambda token, end=end: token == end) == (path, n_taken)
        assert asked == path


def test_a_tree_of_given_nodes_knows_their_depths() -> None:
    assert Tree.of([ROOT, 1, 2, 3], [-1, 0, 0, 2]).depths == [0, 1, 1, 2]
    assert Tree.of([ROOT, 1, 2]).is_chain and not Tree.of([ROOT, 1, 2], [-1, 0, 0]).is_chain


def test_merged_trees_hold_all_paths_the_likeliest_first() -> None:
    for seed in range(20):
        trees = [best_first_tree(ROOT, candidates(4, 3, seed=seed + 100 * i), 15) for i in range(3)]
        whole = merged(trees)
        paths: dict[tuple[int, ...], float] = {}
        for tree in trees:
            for node in range(len(tree)):
                path = path_of(tree, node)
                paths[path] = max(tree.log_probs[node], paths.get(path, -math.inf))
        assert len(paths) < sum(map(len, trees))
        found = {path_of(whole, node): whole.log_probs[node] for node in range(len(whole))}
        assert found == paths
        assert whole.log_probs == sorted(whole.log_probs, reverse=True)
        assert all(parent < node for node, parent in enumerate(whole.parents))
        assert whole.depths == [len(path_of(whole, node)) for node in range(len(whole))]


def test_one_tree_is_merged_as_it_is() -> None:
    tree = best_first_tree(ROOT, candidates(3, 2), 5, main_chain=True)
    assert merged([tree]) is tree


def test_the_spine_follows_the_likeliest_children() -> None:
    given = candidates(5, 3)
    tree = best_first_tree(ROOT, given, 200)
    assert tree.main_chain().tokens == chain(ROOT, given, 5).tokens
    assert tree.main_chain().log_probs == pytest.approx(chain(ROOT, given, 5).log_probs)
    assert tree.main_chain().is_chain
    fork = Tree([ROOT, 1, 2, 3], [-1, 0, 0, 2], [0, 1, 1, 2], [0.0, -0.1, -0.2, -0.3])
    assert fork.main_chain().tokens == [ROOT, 1]
