"""Registry of proposers, which draft candidate tokens: one factory for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .dflash import DFlash
from .embedding_scale import ScaleTrial
from .mtp import Mtp
from .proposer import DraftSource, Proposer
from .suffix import MAX_REMEMBERED, SuffixProposer

ProposerFactory = Callable[[DraftSource], Proposer | None]


def _drafter(proposer: type[DFlash], sequence: Any) -> Proposer | None:
    """Returns the proposer of the engine's drafter of this kind."""
    engine = sequence.engine
    for index, drafter in enumerate(x for x in engine.drafters if x.max_draft):
        if drafter.kind == proposer.name:
            trial = None
            if drafter.scale_is_open:
                set_scale = partial(engine.set_draft_scale, drafter=index)
                trial = ScaleTrial(set_scale, (1.0, drafter.sqrt_scale))
            return proposer(drafter.max_draft, index, trial)
    return None


def _suffix(sequence: Any) -> Proposer:
    ngrams = next((x for x in sequence.engine.drafters if x.kind == "ngram"), None)
    # Twice the context: a full suffix index drops its older half, which leaves one context.
    return SuffixProposer(min(MAX_REMEMBERED, 2 * sequence.n_ctx), ngrams)


DRAFTERS: Mapping[str, type[DFlash]] = {proposer.name: proposer for proposer in (DFlash, Mtp)}
"""Proposers of drafters, by the kind of the drafter."""
PROPOSERS: Mapping[str, ProposerFactory] = {
    **{kind: partial(_drafter, proposer) for kind, proposer in DRAFTERS.items()},
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
