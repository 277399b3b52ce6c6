"""The kinds of proposers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .dflash import DFlash
from .proposer import DraftSource, Proposer
from .suffix import MAX_REMEMBERED, SuffixProposer

ProposerFactory = Callable[[DraftSource], Proposer | None]


PROPOSERS: Mapping[str, ProposerFactory] = {
    "dflash": lambda sequence: DFlash(sequence.max_draft) if sequence.max_draft else None,
    # Remembers of each text at least as many tokens as the context holds, at most twice that.
    "suffix": lambda sequence: SuffixProposer(min(MAX_REMEMBERED, 2 * sequence.n_ctx)),
}
"""Factories of proposers for a sequence's engine, by name; None if the engine lacks something."""


def create_proposers(sequence: DraftSource) -> list[Proposer]:
    """All that serve the sequence and others of its engine."""
    made = (make(sequence) for make in PROPOSERS.values())
    return [proposer for proposer in made if proposer is not None]


def select_proposers(proposers: Sequence[Proposer], names: Iterable[str] | None) -> list[Proposer]:
    """Returns the proposers with these names; all of them if names is None.

    Errors: ValueError for a name that none of them has.
    """
    if names is None:
        return list(proposers)
    known = {proposer.name: proposer for proposer in proposers}
    names = list(names)
    for name in names:
        if name not in known:
            available = ", ".join(known) or "none"
            raise ValueError(f"draft_type {name!r} is not there; this decoder has: {available}")
    return [known[name] for name in known if name in names]
