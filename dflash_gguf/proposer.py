"""Where candidates come from. The loop verifies them whatever their source."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .sampling import Sampler

N_RANKED = 32
"""Candidates of a position that compete for its place where the best logit does not decide."""


class Proposer(Protocol):
    """A source of candidates for the tokens to come."""

    @property
    def max_draft(self) -> int:
        """Candidates of one proposal at most."""

    def propose(self, seen: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        """Up to n tokens that may follow `seen`, each after those before it.

        seen: prompt and answer; its last token is chosen, but not in the caches yet.
        sampler: what the target's rows will be given to.
        """

    def observe(self, tokens: Sequence[int]) -> None:
        """Learns the tokens that a round put into the caches, after any kind of round."""


class Draft(NamedTuple):
    """What a drafter proposes for n_draft positions: their k best tokens, best first."""

    tokens: NDArray[np.int32]
    """[n_draft, k]"""
    logits: NDArray[np.float32]
    """Raw, [n_draft, k]."""
    log_sum_exp: NDArray[np.float32]
    """Of all raw logits of a position, [n_draft]; less it, a logit is a log-probability."""


class Drafts(Protocol):
    """What this module asks of a session."""

    @property
    def max_draft(self) -> int:
        """Tokens of one draft at most; 0 without a drafter."""

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """What may follow `last_token`, the k best of each of n_draft positions."""


class Chain:
    """The session's DFlash drafter, one candidate a position.

    A candidate is what the target would choose if its row were the drafter's: greedy by the best
    logit, sampled with the target's own noise (shared), so that both draw the same token far more
    often than two independent draws would.
    """

    def __init__(self, session: Drafts, *, n_ranked: int = N_RANKED) -> None:
        self._session = session
        self._n_ranked = n_ranked
        self._has_warned = False

    @property
    def max_draft(self) -> int:
        """One less than the drafter's block."""
        return self._session.max_draft

    def propose(self, seen: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        """Drafts n candidates; none, warning once, if the drafter's scores are not finite."""
        k = 1 if sampler.is_argmax and not sampler.banned else self._n_ranked
        draft = self._session.draft(seen[-1], n, k)
        tokens, logits = draft.tokens, draft.logits
        if not np.isfinite(logits).all():
            if not self._has_warned:
                self._has_warned = True
                sentence = "the drafter's scores are not finite numbers"
                warnings.warn(sentence, RuntimeWarning, stacklevel=2)
            return []
        if k == 1:
            return [int(token) for token in tokens[:, 0]]
        path = list(seen)
        for ids, scores in zip(tokens.astype(np.int64), logits, strict=True):
            if sampler.banned.issuperset(ids.tolist()):
                path.append(int(ids[0]))
            else:
                path.append(sampler.choose_among(ids, scores, path, len(path)))
        return path[len(seen) :]

    def observe(self, tokens: Sequence[int]) -> None:
        """Nothing to learn: the session keeps what the drafter reads of each token."""
