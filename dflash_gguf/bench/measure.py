"""Measures how long drafts of a drafter and passes of its target take, by number of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .. import native
from ..speculative.cost_model import N_FIRST, N_TIMES, CostModel, Round
from ..speculative.proposers.dflash import N_RANKED


def branched(n: int) -> list[int]:
    """Returns the parents in a tree of n nodes: a main chain whose nodes have a sibling each."""
    return [-1, *(max(0, node - 2 + node % 2) for node in range(1, n))]


def measure(
    sequence: native.Sequence,
    proposer: str,
    prompt: Sequence[int],
    lengths: Sequence[int],
    sizes: Sequence[int],
) -> CostModel:
    """Measures the costs of rounds that follow a prompt and accept no candidate.

    proposer: name of the first drafter's proposer. lengths: numbers of drafted positions. sizes:
    nodes of verified chains and trees.
    """
    costs = CostModel()
    sequence.reset()
    last = sequence.prefill(prompt).argmax()
    sequence.engine.reserve_verify(max(sizes) + 1)
    start, first = sequence.snapshot(), last
    for _ in range(N_FIRST + N_TIMES):
        sequence.attach(start, start.n_tokens)  # rewinds to the prompt: costs depend on the length
        last = first
        done = Round(sequence.position, n_tokens=1)
        started = time.perf_counter()
        last = sequence.decode(last).argmax()
        done.pass_s = time.perf_counter() - started
        costs.observe(done)
        for number, size in enumerate(sizes):
            for is_tree in (False, True) if size > 1 else (False,):
                n = lengths[number % len(lengths)]
                costs.observe(_round(sequence, proposer, last, n, size, is_tree))
    return costs


def _round(
    sequence: native.Sequence, proposer: str, last: int, n: int, size: int, is_tree: bool
) -> Round:
    """Runs and times a round with a top-1 chain, or with a tree of ranked candidates."""
    done = Round(
        sequence.position,
        proposer=proposer,
        n_positions=n,
        n_draft_rows=n + 1,
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
    if is_tree:
        sequence.verify_tree(tokens, branched(size + 1)).argmax(0)
        sequence.commit_path([0])
    else:
        sequence.verify(tokens).argmax(0)
        sequence.commit(1)
    done.draft_s, done.pass_s = drafted - started, time.perf_counter() - drafted
    return done
