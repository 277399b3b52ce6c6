"""The kinds of proposers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .calibration import Calibrations
from .proposer import DFlash, Drafts, Proposer

Maker = Callable[[Drafts, Calibrations], Proposer | None]


def _dflash(session: Drafts, calibrations: Calibrations) -> Proposer | None:
    """For a session that has a DFlash drafter."""
    return DFlash(session, calibrations) if session.max_draft else None


PROPOSERS: Mapping[str, Maker] = {
    "dflash": _dflash,
}
"""By name, what makes a proposer for a session; None where the session lacks what it needs."""


def proposer_of(
    session: Drafts, calibrations: Calibrations, name: str | None = None
) -> Proposer | None:
    """The proposer of this name; without one the first that serves the session, if any does.

    calibrations: what is learned, which outlives answers.
    Errors: ValueError for a name that is not known, or whose proposer does not serve the session.
    """
    if name is None:
        made = (make(session, calibrations) for make in PROPOSERS.values())
        return next((proposer for proposer in made if proposer is not None), None)
    if name not in PROPOSERS:
        raise ValueError(f"proposer {name!r} is not known; there are: {', '.join(PROPOSERS)}")
    proposer = PROPOSERS[name](session, calibrations)
    if proposer is None:
        raise ValueError(f"proposer {name!r} lacks its drafter in this session")
    return proposer
