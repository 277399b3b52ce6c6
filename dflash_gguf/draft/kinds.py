"""The kinds of proposers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .calibration import Calibrations
from .proposer import DFlash, Drafts, Proposer

Maker = Callable[[Drafts, Calibrations], Proposer | None]


def _dflash(sequence: Drafts, calibrations: Calibrations) -> Proposer | None:
    """For a sequence that has a DFlash drafter."""
    return DFlash(sequence, calibrations) if sequence.max_draft else None


PROPOSERS: Mapping[str, Maker] = {
    "dflash": _dflash,
}
"""By name, what makes a proposer for a sequence; None where the sequence lacks what it needs."""


def proposer_of(
    sequence: Drafts, calibrations: Calibrations, name: str | None = None
) -> Proposer | None:
    """The proposer of this name; without one the first that serves the sequence, if any does.

    calibrations: what is learned, which outlives answers.
    Errors: ValueError for a name that is not known, or whose proposer does not serve the sequence.
    """
    if name is None:
        made = (make(sequence, calibrations) for make in PROPOSERS.values())
        return next((proposer for proposer in made if proposer is not None), None)
    if name not in PROPOSERS:
        raise ValueError(f"proposer {name!r} is not known; there are: {', '.join(PROPOSERS)}")
    proposer = PROPOSERS[name](sequence, calibrations)
    if proposer is None:
        raise ValueError(f"proposer {name!r} lacks its drafter in this sequence")
    return proposer
