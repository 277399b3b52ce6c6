"""The suffix index compared with brute force: matches, proposals, learning, forgetting."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from proposers import request_of

from dflash_gguf.native import Error, SuffixIndex
from dflash_gguf.speculative.proposers.proposer import SpeculativeState
from dflash_gguf.speculative.proposers.suffix import SuffixProposer
from dflash_gguf.speculative.tree import Tree


def ends_of(text: list[int], part: list[int]) -> list[int]:
    """Returns the positions after earlier occurrences of `part`."""
    n = len(part)
    return [at for at in range(n, len(text)) if text[at - n : at] == part]


def longest_match(text: list[int]) -> int:
    """Returns the length of the longest suffix that occurs earlier in the text."""
    n = 0
    while n < len(text) and ends_of(text, text[len(text) - n - 1 :]):
        n += 1
    return n


def below(
    index: SuffixIndex, n_positions: int, n_nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Returns tokens, parents (-1: the last token) and log-probabilities of proposals."""
    tokens, parents, depths, log_probs = index.propose(n_positions, n_nodes)
    assert not tokens or (parents[0], log_probs[0]) == (-1, 0.0)
    assert depths == Tree.of(tokens, parents).depths
    return tokens[1:], [parent - 1 for parent in parents[1:]], log_probs[1:]


@pytest.mark.parametrize("n_kinds", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("seed", range(6))
def test_the_longest_end_that_stands_before_is_found(n_kinds: int, seed: int) -> None:
    rng = np.random.default_rng((n_kinds, seed))
    index, text = SuffixIndex(1000), []
    while len(text) < 120:
        if seed % 2 and len(text) > 20 and rng.random() < 0.2:
            start = int(rng.integers(len(text) - 10))
            more = text[start : start + int(rng.integers(1, 10))]
        else:
            more = rng.integers(0, n_kinds, int(rng.integers(1, 4))).tolist()
        text += more
        assert index.append(more) == longest_match(text), text


@pytest.mark.parametrize("n_kinds", [3, 5, 20])
@pytest.mark.parametrize("seed", range(6))
def test_what_came_after_it_last_is_proposed(n_kinds: int, seed: int) -> None:
    rng = np.random.default_rng((n_kinds, seed))
    index, text, n_found = SuffixIndex(1000), [], 0
    for _ in range(120):
        token = int(rng.integers(n_kinds))
        text.append(token)
        n = index.append([token])
        tokens, parents, log_probs = below(index, 6, 12)
        if not n:
            assert not tokens
            continue
        n_found += 1
        newest = ends_of(text, text[len(text) - n :])[-1]
        following = text[newest : newest + 6]
        tree = Tree.of([-1, *tokens], [-1, *(parent + 1 for parent in parents)])
        assert tree.child(0, following[0]) is not None
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[parent + 1], token])
            before = [*text, *paths[parent + 1]]
            assert any(ends_of([*text, -1], [*before[-k:], token]) for k in range(1, n + 6))
        assert tokens[0] == following[0] or log_probs[0] < np.log(0.5)
        assert log_probs == sorted(log_probs, reverse=True)
        assert all(parent < node for node, parent in enumerate(parents))
        assert max(map(len, paths)) <= 6
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens) <= 12
    assert n_found > 60


def test_no_copy_goes_across_texts() -> None:
    index = SuffixIndex(1000)
    index.append([1, 2, 3])
    index.separate()
    assert index.append([4, 5, 3]) == 1
    assert below(index, 4, 4)[0] == []
    index.separate()
    assert index.append([1, 2]) == 2
    assert below(index, 4, 4)[0] == [3]
    assert index.append([3]) == 3
    assert index.append([4]) == 1


@pytest.mark.parametrize("n_most", [2, 7, 50])
def test_old_texts_are_forgotten(n_most: int) -> None:
    rng = np.random.default_rng(n_most)
    index, text = SuffixIndex(n_most), []
    bytes_then = 0
    for number in range(40 * n_most):
        text.append(int(rng.integers(6)))
        n = index.append(text[-1:])
        assert n_most // 2 <= len(index) <= n_most or number < n_most
        assert n == longest_match(text[len(text) - len(index) :])
        if number == 2 * n_most:
            bytes_then = index.bytes
    assert index.bytes <= 4 * bytes_then


def test_chances_follow_what_came_true() -> None:
    chance = {}
    for is_copied in (True, False):
        rng = np.random.default_rng(0)
        index, text = SuffixIndex(10_000), rng.integers(0, 1000, 400).tolist()
        index.append(text)
        for start in range(0, 300, 6):
            index.append(text[start : start + 4])
            more = text[start + 4 : start + 6] if is_copied else [2000 + start, 2001 + start]
            index.append(more, is_chosen=True)
            index.separate()
        index.append(text[350:354])
        tokens, _, log_probs = below(index, 1, 1)
        assert tokens == [text[354]]
        chance[is_copied] = np.exp(log_probs[0])
    assert chance[True] > 0.9
    assert chance[False] < 0.2


def test_a_name_that_was_changed_once_is_changed_again() -> None:
    """A replacement chosen by the target is proposed at the next occurrence."""
    name, renamed = [50, 51, 52], [60, 50, 51, 52]
    text = [1, 2, 3, *name, 4, 5, 6, 7, 8, *name, 9, 10, 11]
    index = SuffixIndex(1000)
    index.append(text)
    index.separate()
    index.append([1, 2, 3])
    assert below(index, 3, 3)[0] == name
    index.append([*renamed, 4, 5, 6], is_chosen=True)
    assert below(index, 2, 2)[0] == [7, 8]
    tokens, parents, _ = below(index, 9, 40)
    tree = Tree.of([-1, *tokens], [-1, *(parent + 1 for parent in parents)])
    node: int | None = 0
    for token in (7, 8, *renamed):
        assert node is not None
        node = tree.child(node, token)
    assert node is not None
    index.append([7, 8], is_chosen=True)
    assert below(index, 1, 1)[0] == renamed[:1]
    index.append([*name, 9], is_chosen=True)
    index.separate()
    index.append([7, 8])
    assert below(index, 1, 1)[0] == name[:1]


def guesses_of(index: SuffixIndex) -> dict[int, float]:
    tokens, parents, log_probs = below(index, 1, 9)
    assert set(parents) <= {-1}
    return dict(zip(tokens, np.exp(log_probs).tolist(), strict=True))


@pytest.mark.parametrize(
    ("changed", "at"),
    [([90], 9), ([90, 91, 92], 9), ([90, 2], 9), ([], 12), ([9, 9], 8)],
    ids=["replaced", "more for one", "a token that stands elsewhere", "left out", "put in"],
)
def test_a_copy_goes_on_after_a_change(changed: list[int], at: int) -> None:
    """The copy continues at once after a replaced token, else after a matching token."""
    text = [*range(1, 30), 50, 51, 50, 50, *range(60, 70)]
    text[12] = text[13] = 50
    index = SuffixIndex(1000)
    index.append([90, 91, 92, *range(200, 240), *text, 99, 1, 2])
    index.append(text[2:8], is_chosen=True)
    index.append(changed, is_chosen=True)
    chances = []
    for place in range(at, 20):
        if place > at or len(changed) == 1:
            chances.append(guesses_of(index).get(text[place], 0.0))
        index.append(text[place : place + 1], is_chosen=True)
    assert min(chances) > 0.05, chances
    assert chances[-1] > 0.6


def test_a_text_goes_on_as_it_begins_not_as_an_older_one() -> None:
    """Proposals come from this text too, despite a longer match in an older text."""
    index = SuffixIndex(1000)
    begin, head = [80, 81, 82, 83], [1, 2, 3, 4, 5]
    index.append([*head, 20, 21, *begin])
    index.append([*head, 30, 31], is_chosen=True)
    index.separate()
    index.append([*head, 40, 41, *begin])
    index.append(head, is_chosen=True)
    found = guesses_of(index)
    assert {30, 40} <= set(found)
    tokens, _, _ = below(index, 2, 9)
    assert 41 in tokens
    for number in range(100, 140):
        index.separate()
        index.append([*head, number, number + 50, *begin])
        index.append([*head, number, number + 50], is_chosen=True)
    index.separate()
    index.append([*head, 60, 61, *begin])
    index.append(head, is_chosen=True)
    found = guesses_of(index)
    assert found[60] > 0.8
    assert max(chance for token, chance in found.items() if token != 60) < 0.3


def proposed(proposer: SuffixProposer, request: SpeculativeState, *, begins: bool = True) -> Tree:
    if begins:
        proposer.start(request)
    (tree,) = proposer.propose([request])
    assert tree is not None
    return tree


def test_outcomes_go_on_in_another_process() -> None:
    proposer, text = SuffixProposer(), [*range(50), *range(30)]
    request = request_of(text[:60])
    proposed(proposer, request)
    for n in range(61, 80):
        request.history = text[:n]
        proposed(proposer, request, begins=False)
    stored = json.loads(json.dumps(proposer.to_dict()))
    again = SuffixProposer()
    again.learn(stored)
    assert again.to_dict() == stored
    tree, first = (proposed(x, request_of(text)) for x in (again, SuffixProposer()))
    assert tree.tokens == first.tokens
    assert tree.log_probs[5] > first.log_probs[5]
    for bad in ({}, {"outcomes": {"0": [[1.0, 2.0]]}}, {"outcomes": {"0": [[0.0, 0.0]] * 96}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            again.learn(bad)


def test_texts_go_on_and_part() -> None:
    proposer, first = SuffixProposer(), [*range(20), 5, 6]
    request = request_of(first)
    assert proposed(proposer, request).tokens == [6, *range(7, 16)]
    memory = request.notes["suffix"]
    longer = request_of([*first, 30, 10], request.sequence)
    assert proposed(proposer, longer).tokens[:4] == [10, 11, 12, 13]
    assert len(memory.index) == 24
    other = request_of([*range(10), 19, 5], request.sequence)
    assert proposed(proposer, other).tokens[:3] == [5, 6, 30]
    assert len(memory.index) == 24 + 1 + 2
    proposer.forget(request.sequence)
    other = request_of([*range(10), 19, 5], request.sequence)
    assert proposed(proposer, other).tokens[:3] == [5, 6, 7]


@pytest.mark.parametrize("comes_late", [False, True])
def test_a_tree_begins_with_the_last_token_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch, comes_late: bool
) -> None:
    proposer, request = SuffixProposer(), request_of([*range(20), 5])
    proposed(proposer, request)
    request.history.append(6)
    propose = proposer._proposals.propose

    def interrupted(*args: Any) -> None:
        if comes_late:
            propose(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(proposer._proposals, "propose", interrupted)
        proposed(proposer, request, begins=False)
    assert proposed(proposer, request, begins=False).tokens[0] == 6


def test_each_sequence_has_its_own_texts() -> None:
    proposer = SuffixProposer()
    one, two = request_of([1, 2, 3, 9, 1, 2]), request_of([1, 2, 4, 9, 1, 2])
    for request in (one, two):
        proposer.start(request)
    trees = proposer.propose([one, two])
    assert [tree.tokens[1] for tree in trees if tree is not None] == [3, 4]


def test_texts_of_another_scope_are_not_proposed() -> None:
    proposer = SuffixProposer()
    theirs = request_of([*range(20), 5, 6])
    assert proposed(proposer, theirs).n_drafted
    ours = request_of([5, 6], theirs.sequence)
    ours.scope = "another"
    assert not proposed(proposer, ours).n_drafted
    assert proposed(proposer, request_of([5, 6], theirs.sequence)).n_drafted == 0


def test_what_repeats_goes_on_repeating() -> None:
    for period in ([7], [1, 2], [1, 2, 3, 4, 5]):
        index = SuffixIndex(100)
        index.append(period * 3)
        assert below(index, 11, 11)[0] == (period * 12)[:11]


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(Error, match="max_tokens is 1, must be 2 to"):
        SuffixIndex(1)
    index = SuffixIndex(9)
    with pytest.raises(Error, match="token id -4 is below 0"):
        index.append([1, -4])
    with pytest.raises(ValueError, match="must be \\[classes, 2\\]"):
        index.outcomes = np.ones((2, 2))
    with pytest.raises(Error, match="0 of 1 candidates were accepted"):
        index.outcomes = np.tile([1.0, 0.0], (96, 1))
