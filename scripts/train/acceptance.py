"""What drafts are worth: tokens a round by the reference's rule, and plain prompt lookup beside it.

Decoding is greedy, so a round's outcome follows from the finished answer: a draft is accepted up to
its first token that differs. Source: z-lab/dflash, model.py, dflash_generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_gguf.speculative.tree import Tree

# Drafts for several answers: (answer, place of the last known token) pairs to lists of tokens.
Draft = Callable[[Sequence[tuple[int, int]]], Sequence[Sequence[int]]]


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds. accepted[k]: drafts whose first k + 1 tokens were right."""

    rounds: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens a round, the target's own among them."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, n_accepted: int, n_new: int) -> None:
        """One round, which kept `n_new` tokens."""
        self.rounds += 1
        self.tokens += n_new
        self.accepted += [0] * (n_accepted - len(self.accepted))
        for place in range(n_accepted):
            self.accepted[place] += 1


def measure(answers: Sequence[tuple[Sequence[int], int]], draft: Draft) -> Acceptance:
    """Rounds over finished answers: (all tokens, number of those that are the prompt) each.

    The first token of an answer comes from the prompt's pass and belongs to no round.
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


def prompt_lookup(known: Sequence[int], n_draft: int, longest: int = 3) -> list[int]:
    """The tokens that followed the last earlier occurrence of the newest 3, 2 or 1 tokens.

    Source: apoorvumang/prompt-lookup-decoding, as in transformers (prompt_lookup_num_tokens).
    """
    for size in range(min(longest, len(known) - 1), 0, -1):
        tail = list(known[-size:])
        for start in range(len(known) - size - 1, -1, -1):
            if list(known[start : start + size]) == tail:
                return list(known[start + size : start + size + n_draft])
    return []


def repeated_share(answers: Sequence[Sequence[int]], size: int = 8) -> float:
    """Of all runs of `size` tokens, those that stood in the same answer before."""
    n_all = n_repeated = 0
    for tokens in answers:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - size + 1):
            run = tuple(tokens[start : start + size])
            n_repeated += run in seen
            seen.add(run)
            n_all += 1
    return n_repeated / n_all if n_all else 0.0
