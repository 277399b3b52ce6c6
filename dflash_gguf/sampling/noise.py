"""Gumbel noise that makes sampling independent of speculation, and draft scores that use it.

Steps of sampling, equal to llama.cpp's default chain (its other samplers are off by default):
biases, banned tokens, penalties, top-k, top-p, min-p, temperature. The sampled token has the
largest

    score(token) = (logit - best logit) / temperature + gumbel(seed, sequence, position, token)

of the kept tokens (float32 logits, float64 scores). This samples exactly from their softmax without
generator state: equal rows at a position give the same token, whatever was drafted before. The
noise, bit for bit (unsigned 64-bit arithmetic, wrapping; seed and sequence modulo 2^64):

    mix(x)  = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9;
              x ^= x >> 27; x *= 0x94D049BB133111EB; x ^ x >> 31
    state   = 0; for each a of (seed, sequence, position): state = mix((state ^ a) + G)
    bits    = mix(state + (token + 1) * G)        with G = 0x9E3779B97F4A7C15
    u       = ((bits >> 12) + 0.5) * 2^-52        exact in float64, 0 < u < 1
    gumbel  = -log(-log(u))                       float64

So a token's noise is the (token + 1)-th output of splitmix64 started at `state`. Position is the
index that the sampled token gets: the first token after n prompt tokens has position n.

Sources: the chain, llama.cpp, common/sampling.cpp and src/llama-sampler.cpp; Gumbel's argmax,
Maddison et al., arXiv 1411.0030. The core samples: csrc/sampling/sampler.h.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import DecodeConfig

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class TokenLogprobs(NamedTuple):
    """Log-probability of a sampled token (-inf: impossible) and of the best tokens, best first."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplingNoise:
    """The seed and the banned tokens that a request's sampler and draft scorer share."""

    def __init__(
        self, config: DecodeConfig, *, sequence: int = 0, banned: Collection[int] = ()
    ) -> None:
        """Resolves the seed (None: random); banned tokens are never sampled (logit -inf)."""
        self.config = config
        self.sequence = sequence
        self.seed = secrets.randbits(32) if config.seed is None else config.seed
        self.noise_base = _state(self.seed, sequence)
        """Hash state of the noise before the position is mixed in."""
        self.banned = frozenset(banned)


class DraftScorer(SamplingNoise):
    """Predicts the sampler's effect on draft candidates. Holds no state between rows."""

    def __init__(
        self, config: DecodeConfig, *, sequence: int = 0, banned: Collection[int] = ()
    ) -> None:
        super().__init__(config, sequence=sequence, banned=banned)
        self._banned_ids = np.array(sorted(self.banned), dtype=np.int64)
        self._biased_ids = np.array(sorted(config.logit_bias), dtype=np.int64)
        biases = [config.logit_bias[token] for token in self._biased_ids.tolist()]
        self._biases = np.array(biases, dtype=np.float32)

    @property
    def is_argmax(self) -> bool:
        """True if the sampler takes the best logit that is not banned: greedy, no penalties."""
        return self.config.temperature == 0.0 and not self.config.has_penalties

    def adjusted_among(self, ids: Ids, logits: Floats, history: Sequence[int]) -> Floats:
        """Returns the logits of distinct tokens `ids` after biases, penalties and bans, [n]."""
        row = logits.copy()
        if len(self._biased_ids):
            at = np.minimum(np.searchsorted(self._biased_ids, ids), len(self._biased_ids) - 1)
            row += np.where(self._biased_ids[at] == ids, self._biases[at], np.float32(0.0))
        if self.config.penalises_history and len(history) > 0:
            recent, counts = self._recent(history)
            at = np.minimum(np.searchsorted(recent, ids), len(recent) - 1)
            places = np.flatnonzero(recent[at] == ids)
            with np.errstate(over="ignore"):
                self._penalise(row, places, counts[at[places]])
        if self.banned:
            row[self.is_banned(ids)] = -np.inf
        return row

    def is_banned(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the tokens that are never sampled, with the shape of `ids`."""
        if not len(self._banned_ids):
            return np.zeros(ids.shape, dtype=bool)
        at = np.minimum(np.searchsorted(self._banned_ids, ids), len(self._banned_ids) - 1)
        is_banned: NDArray[np.bool_] = self._banned_ids[at] == ids
        return is_banned

    def is_cut(self, log_q: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns a mask of the candidates that top-k, top-p or min-p would remove.

        log_q: [n, k], log-probabilities relative to the whole vocabulary, in any order. Tokens
        beyond the k candidates count only with their total probability.
        """
        config = self.config
        places = np.arange(len(log_q))[:, None], np.argsort(-log_q, axis=1, kind="stable")
        values = log_q[places]
        weights = np.exp(values)
        before = np.cumsum(weights, axis=1) - weights
        mass = np.ones((len(log_q), 1))
        cut = np.zeros(log_q.shape, dtype=bool)
        if 0 < config.top_k < log_q.shape[1]:
            cut[:, config.top_k :] = True
            mass = before[:, config.top_k, None]
        if config.top_p < 1.0:
            cut |= before >= config.top_p * mass
        if config.min_p > 0.0:
            cut |= values < values[:, :1] + np.log(config.min_p)
        cut[:, 0] = False
        is_cut = np.empty_like(cut)
        is_cut[places] = cut
        return is_cut

    def _recent(self, history: Sequence[int]) -> tuple[Ids, Ids]:
        recent = np.asarray(history[-self.config.repeat_last_n :], dtype=np.int64)
        return np.unique(recent, return_counts=True)

    def _penalise(self, row: Floats, places: Ids, counts: Ids) -> None:
        config = self.config
        repeat = np.float32(config.repeat_penalty)
        values = row[places]
        values = np.where(values <= 0, values * repeat, values / repeat)
        row[places] = values - (
            counts.astype(np.float32) * np.float32(config.frequency_penalty)
            + np.float32(config.presence_penalty)
        )


def noise_of(
    samplers: Sequence[SamplingNoise], counts: Sequence[int], positions: Ids, ids: Ids
) -> NDArray[np.float64]:
    """Returns the noise of tokens [n, k] at n positions; counts: positions of each sampler."""
    states = np.repeat(np.array([x.noise_base for x in samplers], dtype=np.uint64), counts)
    states ^= positions.astype(np.uint64)
    states += np.uint64(GOLDEN)
    return _noise(_mixed(states)[:, None], ids)


def gumbel(seed: int, sequence: int, position: int, tokens: Ids) -> NDArray[np.float64]:
    """Returns the Gumbel noise of `tokens` [n] at a position, float64 [n]; see the module."""
    return _noise(np.uint64(_state(seed, sequence, position)), tokens)


def _state(*values: int) -> int:
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = _mixed((state ^ np.uint64(value & MASK)) + np.uint64(GOLDEN))
    return int(state[0])


def _noise(states: np.uint64 | NDArray[np.uint64], tokens: Ids) -> NDArray[np.float64]:
    bits = tokens.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(GOLDEN)
    bits += states
    uniform = (_mixed(bits) >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(MIX_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(MIX_2)
    bits ^= bits >> np.uint64(31)
    return bits
