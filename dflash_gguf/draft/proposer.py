"""Where candidates come from. The loop verifies them whatever their source."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core import Draft
from ..sampling import Sampler
from .calibration import Calibration, Calibrations, Features
from .tree import Candidates

N_RANKED = 32
"""Candidates of a position that compete for its place where the best logit does not decide."""


class Proposer(Protocol):
    """A source of candidates for the tokens to come."""

    @property
    def max_draft(self) -> int:
        """Positions of one proposal at most."""

    def propose(
        self, seen: Sequence[int], n: int, sampler: Sampler, *, is_narrow: bool
    ) -> Candidates | None:
        """What may follow `seen` at the next n positions; None if it has failed for this answer.

        seen: prompt and answer; its last token is chosen, but not in the caches yet.
        sampler: what the target's rows will be given to.
        is_narrow: whether only the best candidate of a position will be used.
        """

    def observe(self, tokens: Sequence[int]) -> None:
        """Learns what the target chose in the round that followed, whatever its kind."""


class Drafts(Protocol):
    """What this module asks of a sequence."""

    @property
    def max_draft(self) -> int:
        """Tokens of one draft at most; 0 without a drafter."""

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """What may follow `last_token`, the k best of each of n_draft positions."""


class DFlash:
    """The sequence's DFlash drafter, with chances learned from what the target took.

    The target's noise is known before it draws, so candidates are ranked with it, as much as it was
    found to tell: both then draw the same token far more often than two independent draws would.
    """

    def __init__(
        self, sequence: Drafts, calibrations: Calibrations, *, n_ranked: int = N_RANKED
    ) -> None:
        """calibrations: what is learned, which outlives answers."""
        self._sequence = sequence
        self._calibrations = calibrations
        self._n_ranked = n_ranked
        self._open: tuple[Calibration, Features, NDArray[np.int64]] | None = None

    @property
    def max_draft(self) -> int:
        """One less than the drafter's block."""
        return self._sequence.max_draft

    def propose(
        self, seen: Sequence[int], n: int, sampler: Sampler, *, is_narrow: bool
    ) -> Candidates | None:
        """Drafts n positions; none, with a warning, if the drafter's scores are not finite."""
        self._open = None
        is_plain = is_narrow and sampler.is_argmax and not sampler.banned
        draft = self._sequence.draft(seen[-1], n, 1 if is_plain else self._n_ranked)
        # A sum over a whole row is not finite where its best logit is not.
        if not math.isfinite(draft.log_sum_exp.sum() + (0.0 if is_plain else draft.logits.sum())):
            sentence = "the drafter's scores are not finite numbers: decoding goes on without it"
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
            return None
        if is_plain:
            return Candidates(draft.tokens, np.zeros(draft.tokens.shape))
        tokens = draft.tokens.astype(np.int64)
        config = sampler.config
        calibration = self._calibrations.of(config.temperature, config.has_penalties)
        noise = sampler.noise(tokens, len(seen)) if config.temperature > 0.0 else None
        logits = _adjusted(sampler, tokens, draft.logits, seen, noise, calibration.weights(n))
        log_q = logits - draft.log_sum_exp[:, None]
        features = Features(log_q, noise, None if noise is None else sampler.is_cut(log_q))
        self._open = calibration, features, tokens
        chances = calibration.log_chances(features)
        chances[np.isneginf(logits)] = -np.inf
        order = np.argsort(-chances, axis=1, kind="stable")
        return Candidates(
            np.take_along_axis(tokens, order, 1), np.take_along_axis(chances, order, 1)
        )

    def observe(self, tokens: Sequence[int]) -> None:
        """Learns at which place the target's choices stood."""
        if self._open is None:
            return
        (calibration, features, candidates), self._open = self._open, None
        n, k = candidates.shape
        places = []
        for row, token in zip(candidates, tokens[:n], strict=False):
            found = np.flatnonzero(row == token)
            places.append(int(found[0]) if found.size else k)
        calibration.observe(features, places)


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
    if not sampler.banned and not sampler.config.has_penalties:
        return logits.astype(np.float64)
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
