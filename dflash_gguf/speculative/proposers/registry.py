"""The kinds of proposers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .dflash import DFlash
from .proposer import DraftSource, Proposer
from .suffix import MAX_REMEMBERED, SuffixProposer

ProposerFactory = Callable[[DraftSource], Proposer | None]


def _dflash(sequence: DraftSource) -> Proposer | None:
    """For an engine that has a DFlash drafter."""
    return DFlash(sequence.max_draft) if sequence.max_draft else None


def _suffix(sequence: DraftSource) -> Proposer:
    """For any. As many tokens as the context holds are remembered at least, twice that at most."""
    return SuffixProposer(min(MAX_REMEMBERED, 2 * sequence.n_ctx))


PROPOSERS: Mapping[str, ProposerFactory] = {
    "dflash": _dflash,
    "suffix": _suffix,
}
"""By name, what makes a proposer for sequences like this one; None where it lacks what it needs."""


def create_proposers(sequence: DraftSource) -> list[Proposer]:
    """All that serve the sequence and others of its engine."""
    made = (make(sequence) for make in PROPOSERS.values())
    return [proposer for proposer in made if proposer is not None]
