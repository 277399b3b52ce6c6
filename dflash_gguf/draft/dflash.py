"""The DFlash drafter of a sequence: candidates for every position of a block, in one pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core import Draft
from ..sampling import Sampler
from .calibration import Calibration, Calibrations, Features
from .marginals import Candidates, chain, grow
from .proposer import BRIEF, CHAIN, SPINE, Request, draft_all
from .tree import Tree

N_RANKED = 32
"""Candidates of a position that compete for its place where the best logit does not decide."""


class _Ranked(NamedTuple):
    """A draft whose candidates were ranked: what is compared with what the target takes."""

    calibration: Calibration
    features: Features
    tokens: NDArray[np.int64]


class DFlash:
    """Chances are learned from what the target took.

    A brief proposal takes the best logits as they are; its chances are how often the target took
    such candidates lately. Others rank the candidates by all that is known: bans and penalties, and
    the target's noise, which is known before it draws, as much as that was found to tell.
    """

    name = "dflash"
    is_free = False
    state = None
    """The core keeps it with the sequence."""

    def __init__(self, max_draft: int, *, n_ranked: int = N_RANKED) -> None:
        """max_draft: one less than the drafter's block."""
        self.max_draft = max_draft
        self.calibrations = Calibrations()
        self._n_ranked = n_ranked

    def begin(self, request: Request) -> None:
        """The core has seen the prompt."""

    def propose(self, requests: Sequence[Request]) -> list[Tree | None]:
        """Drafts for all; none, with a warning, where the drafter's scores are not finite."""
        widths = [self._width(request) for request in requests]
        drafts = draft_all(requests, widths)
        return [self._tree(request, draft) for request, draft in zip(requests, drafts, strict=True)]

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """Learns at which place the target's choices stood."""
        note = request.notes.pop(self.name, None)
        if note is None:
            return
        spine = self.calibrations.spine(request.sampler.config)
        if not isinstance(note, _Ranked):
            spine.observe(note, tokens)
            return
        spine.observe(note.tokens[:, 0].tolist(), tokens)
        n, k = note.tokens.shape
        places = []
        for row, token in zip(note.tokens, tokens[:n], strict=False):
            found = np.flatnonzero(row == token)
            places.append(int(found[0]) if found.size else k)
        note.calibration.observe(note.features, places)

    def outlook(self, sampler: Sampler) -> Sequence[float]:
        """How often the target took chains of such candidates lately."""
        return self.calibrations.spine(sampler.config).paths(self.max_draft)

    def forget(self, sequence: Any) -> None:
        """Keeps nothing."""

    def to_dict(self) -> dict[str, Any]:
        """All calibrations."""
        return self.calibrations.to_dict()

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Goes on from those of an earlier process."""
        self.calibrations = Calibrations.from_dict(stored)

    def _width(self, request: Request) -> int:
        if request.shape == CHAIN and request.sampler.is_argmax:
            request.shape = BRIEF
        if request.shape != BRIEF:
            return self._n_ranked
        return min(1 + len(request.sampler.banned), self._n_ranked)

    def _tree(self, request: Request, draft: Draft) -> Tree | None:
        # A sum over a whole row is not finite where its best logit is not.
        sums = sum(draft.log_sum_exp.tolist())  # for so few values faster than numpy's
        sums += 0.0 if request.shape == BRIEF else draft.logits.sum()
        if not math.isfinite(sums):
            sentence = "the drafter's scores are not finite numbers: decoding goes on without it"
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
            return None
        if request.shape == BRIEF:
            return self._brief(request, draft)
        candidates = self._ranked(request, draft)
        root, n = request.seen[-1], request.n_nodes
        if request.shape == CHAIN:
            return chain(root, candidates, n)
        return grow(root, candidates, n, spine=request.shape == SPINE)

    def _brief(self, request: Request, draft: Draft) -> Tree:
        """The best candidate of every position that may be drawn at all."""
        if draft.tokens.shape[1] == 1:
            tokens = draft.tokens[:, 0].tolist()
        else:
            banned = request.sampler.banned
            rows = draft.tokens.tolist()
            tokens = [next((t for t in row if t not in banned), row[0]) for row in rows]
        tokens = tokens[: request.n_nodes]
        request.notes[self.name] = tokens
        chances = self.calibrations.spine(request.sampler.config).log_paths(len(tokens))
        return Tree.chain([request.seen[-1], *tokens], [0.0, *chances])

    def _ranked(self, request: Request, draft: Draft) -> Candidates:
        sampler, seen = request.sampler, request.seen
        tokens = draft.tokens.astype(np.int64)
        config = sampler.config
        calibration = self.calibrations.of(config)
        noise = sampler.noise(tokens, len(seen)) if config.temperature > 0.0 else None
        weights = calibration.weights(len(tokens))
        logits = _adjusted(sampler, tokens, draft.logits, seen, noise, weights)
        log_q = logits - draft.log_sum_exp[:, None]
        features = Features(log_q, noise, None if noise is None else sampler.is_cut(log_q))
        request.notes[self.name] = _Ranked(calibration, features, tokens)
        chances = calibration.log_chances(features)
        chances[np.isneginf(logits)] = -np.inf
        places = np.arange(len(tokens))[:, None], np.argsort(-chances, axis=1, kind="stable")
        return Candidates(tokens[places], chances[places])


def _adjusted(
    sampler: Sampler,
    tokens: NDArray[np.int64],
    logits: NDArray[np.float32],
    seen: Sequence[int],
    noise: NDArray[np.float64] | None,
    weights: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Logits after bans and penalties; these see the likeliest path, whatever branch they are on.

    A position whose candidates are all banned keeps its own.
    """
    if not sampler.config.has_penalties:  # whatever the path is
        adjusted = logits.astype(np.float64)
        if sampler.banned:
            adjusted[sampler.is_banned(tokens)] = -np.inf
            is_none_left = np.isneginf(adjusted).all(axis=1)
            adjusted[is_none_left] = logits[is_none_left]
        return adjusted
    path, rows = list(seen), np.empty(logits.shape)
    for depth, (ids, row) in enumerate(zip(tokens, logits, strict=True)):
        rows[depth] = sampler.adjusted_among(ids, row, path)
        if np.isneginf(rows[depth]).all():
            rows[depth] = row
        scores = weights[depth, 0] * rows[depth]
        if noise is not None:
            scores += weights[depth, 2] * noise[depth]
        path.append(int(ids[np.argmax(scores)]))
    return rows
