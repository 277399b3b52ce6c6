"""What drafts and passes of one pair cost here: every size of the ladder, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .. import native
from ..speculative.cost_model import CostModel, Round
from ..speculative.proposers.dflash import N_RANKED
from ..speculative.speculator import Clock, RowsLike, untimed
from ..speculative.statistics import N_TIMES
from ..speculative.tree import Tree


class VerifiableSequence(Protocol):
    """A `native.Sequence`, as far as one round of it goes."""

    def verify(self, tokens: Sequence[int]) -> RowsLike:
        """Runs tokens after the sequence and returns a row for each; appends nothing."""

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> RowsLike:
        """The same for nodes that see only their ancestors; the root comes first, parent -1."""

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the verify that waits for it; 0 is always allowed."""

    def commit_path(self, nodes: Sequence[int]) -> None:
        """Appends a path of the tree that waits for it, from the root down."""


def branched(n: int) -> list[int]:
    """Returns the parents of a tree of n nodes: half a main chain, half siblings along it."""
    return [-1, *(max(0, node - 2 + node % 2) for node in range(1, n))]


def measure(
    sequence: native.Sequence, prompt: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]
) -> CostModel:
    """Medians of rounds after a prompt that accept nothing.

    lengths: positions drafted. sizes: candidates verified, as a chain and as a tree.
    Errors: Error from the core, also where the context is too short.
    """
    costs = CostModel()
    sequence.reset()
    last = sequence.prefill(prompt).argmax()
    sequence.engine.reserve_verify(max(sizes) + 1)
    start, first = sequence.snapshot(), last
    for _ in range(1 + N_TIMES):
        sequence.attach(start, start.n_tokens)  # contexts of one length compare
        last = first
        done = Round(sequence.position, n_tokens=1)
        started = time.perf_counter()
        last = sequence.decode(last).argmax()
        done.pass_s = time.perf_counter() - started
        done.n_experts = sequence.engine.n_experts
        costs.observe(done)
        for number, size in enumerate(sizes):
            for is_tree in (False, True) if size > 1 else (False,):
                n = lengths[number % len(lengths)]
                costs.observe(_round(sequence, last, n, size, is_tree))
    return costs


def _round(sequence: native.Sequence, last: int, n: int, size: int, is_tree: bool) -> Round:
    """A chain of best candidates, or a tree of ranked ones."""
    done = Round(
        sequence.position,
        n_positions=n,
        is_top1=not is_tree,
        n_drafted=size,
        is_tree=is_tree,
        n_tokens=1,
    )
    width = N_RANKED if is_tree else 1
    started = time.perf_counter()
    draft = sequence.draft(last, n, width)
    drafted = time.perf_counter()
    tokens = [last, *(int(draft.tokens[i % n, i // n % width]) for i in range(size))]
    tree = Tree.of(tokens, branched(size + 1) if is_tree else None)
    verify(sequence, tree, lambda rows, node: rows.argmax(node), lambda _: True)
    done.draft_s, done.pass_s = drafted - started, time.perf_counter() - drafted
    done.n_experts = sequence.engine.n_experts
    return done


def verify(
    sequence: VerifiableSequence,
    tree: Tree,
    choose: Callable[[RowsLike, int], int],
    take: Callable[[int], bool],
    clock: Clock = untimed,
) -> int:
    """A round of one sequence: verifies a tree and commits the path that the target takes.

    Returns the candidates it took.

    choose: the target's token after a node, given the rows. take: is given each of these tokens;
    True ends the path before the token, so that nothing behind it is committed. clock: of "verify"
    and "commit". After an exception the sequence is as before the round.
    """
    try:
        with clock("verify"):
            if tree.is_chain:
                rows = sequence.verify(tree.tokens)
            else:
                rows = sequence.verify_tree(tree.tokens, tree.parents)
        path, n_taken = tree.follow(partial(choose, rows), take)
        with clock("commit"):
            if tree.is_chain:
                sequence.commit(len(path))
            else:
                sequence.commit_path(path)
    except BaseException:
        sequence.commit(0)
        raise
    return n_taken
