"""Registry of proposers, which draft candidate tokens: one factory for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .dflash import DFlash
from .embedding_scale import ScaleTrial
from .mtp import Mtp
from .proposer import DraftSource, Proposer
from .suffix import MAX_REMEMBERED, SuffixProposer

ProposerFactory = Callable[[DraftSource], Proposer | None]


def _dflash(sequence: Any) -> Proposer | None:
    engine = sequence.engine
    if not sequence.max_draft or engine.drafter.kind != "dflash":
        return None
    if not engine.drafter.scale_is_open:
        return DFlash(sequence.max_draft)
    scales = 1.0, engine.drafter.sqrt_scale
    return DFlash(sequence.max_draft, ScaleTrial(engine.set_draft_scale, scales))


def _mtp(sequence: Any) -> Proposer | None:
    has_layer = sequence.max_draft and sequence.engine.drafter.kind == "mtp"
    return Mtp(sequence.max_draft) if has_layer else None


def _suffix(sequence: Any) -> Proposer:
    drafter = sequence.engine.drafter
    ngrams = drafter if drafter is not None and drafter.kind == "ngram" else None
    # Twice the context: a full suffix index drops its older half, which leaves one context.
    return SuffixProposer(min(MAX_REMEMBERED, 2 * sequence.n_ctx), ngrams)


PROPOSERS: Mapping[str, ProposerFactory] = {
    "dflash": _dflash,
    "mtp": _mtp,
    "suffix": _suffix,
}
"""Factories of proposers by name; a factory returns None if the engine cannot run its proposer."""


def create_proposers(sequence: DraftSource) -> list[Proposer]:
    """Creates all proposers that the engine of a sequence can run."""
    made = (make(sequence) for make in PROPOSERS.values())
    return [proposer for proposer in made if proposer is not None]


def select_proposers(proposers: Sequence[Proposer], names: Iterable[str] | None) -> list[Proposer]:
    """Returns the proposers with these names (None: all); ValueError for an unknown name."""
    if names is None:
        return list(proposers)
    known = {proposer.name: proposer for proposer in proposers}
    names = list(names)
    for name in names:
        if name not in known:
            available = ", ".join(known) or "none"
            raise ValueError(f"draft_type {name!r} is not available; this decoder has: {available}")
    return [known[name] for name in known if name in names]
