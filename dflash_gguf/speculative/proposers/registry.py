"""The kinds of proposers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .dflash import DFlash
from .proposer import Drafts, Proposer
from .suffix import N_MOST, Copy

Maker = Callable[[Drafts], Proposer | None]


def _dflash(sequence: Drafts) -> Proposer | None:
    """For an engine that has a DFlash drafter."""
    return DFlash(sequence.max_draft) if sequence.max_draft else None


def _copy(sequence: Drafts) -> Proposer:
    """For any. As many tokens as the context holds are remembered at least, twice that at most."""
    return Copy(min(N_MOST, 2 * sequence.n_ctx))


PROPOSERS: Mapping[str, Maker] = {
    "dflash": _dflash,
    "copy": _copy,
}
"""By name, what makes a proposer for sequences like this one; None where it lacks what it needs."""


def proposers_of(sequence: Drafts) -> list[Proposer]:
    """All that serve the sequence and others of its engine."""
    made = (make(sequence) for make in PROPOSERS.values())
    return [proposer for proposer in made if proposer is not None]
