"""Measures tokens a round (tau) of drafts, and of prompt lookup for comparison.

Replays greedy rounds over finished answers: a draft is accepted up to its first token that differs
from the answer. Source: z-lab/dflash, model.py, dflash_generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..speculative.tree import Tree

# A function that takes (answer's index, position of its last known token) and returns drafts.
Draft = Callable[[Sequence[tuple[int, int]]], Sequence[Sequence[int]]]


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds. accepted[k]: number of drafts whose first k + 1 tokens were accepted."""

    rounds: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens a round, the target's own token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, n_accepted: int, n_new: int) -> None:
        """Adds a round that appended n_new tokens to an answer, n_accepted of them drafted."""
        self.rounds += 1
        self.tokens += n_new
        self.accepted += [0] * (n_accepted - len(self.accepted))
        for place in range(n_accepted):
            self.accepted[place] += 1


def measure(answers: Sequence[tuple[Sequence[int], int]], draft: Draft) -> Acceptance:
    """Replays rounds over finished answers, each given as (all tokens, number of prompt tokens).

    An answer's first token comes from the prefill and belongs to no round.
    """
    result = Acceptance()
    places = [n_prompt for _, n_prompt in answers]
    while True:
        active = [i for i, (tokens, _) in enumerate(answers) if places[i] + 1 < len(tokens)]
        if not active:
            return result
        drafts = draft([(i, places[i]) for i in active])
        for i, guessed in zip(active, drafts, strict=True):
            rest = answers[i][0][places[i] + 1 :]
            tree = Tree.of([answers[i][0][places[i]], *guessed])
            n_right = len(tree.accepted(rest)) - 1
            n_new = min(n_right + 1, len(rest))
            result.add(n_right, n_new)
            places[i] += n_new


def prompt_lookup(known: Sequence[int], n_draft: int) -> list[int]:
    """Returns the tokens after the last earlier occurrence of the newest 3, 2 or 1 tokens.

    Source: apoorvumang/prompt-lookup-decoding, as in transformers (prompt_lookup_num_tokens).
    """
    for size in range(min(3, len(known) - 1), 0, -1):
        tail = list(known[-size:])
        for start in range(len(known) - size - 1, -1, -1):
            if list(known[start : start + size]) == tail:
                return list(known[start + size : start + size + n_draft])
    return []


def repeated_share(answers: Sequence[Sequence[int]], size: int = 8) -> float:
    """Returns the share of all `size`-grams that occurred before in the same answer."""
    n_all = n_repeated = 0
    for tokens in answers:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - size + 1):
            run = tuple(tokens[start : start + size])
            n_repeated += run in seen
            seen.add(run)
            n_all += 1
    return n_repeated / n_all if n_all else 0.0
