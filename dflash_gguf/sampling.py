"""Drawing a token so that speculation cannot change it.

Order of the steps, equal to llama.cpp's default chain (its other samplers are off by default):
biases, banned tokens, penalties, top-k, top-p, min-p, temperature. The token drawn is the largest of

    score(token) = (logit - best logit) / temperature + gumbel(seed, sequence, position, token)

over the kept tokens (float32 logits, float64 scores), which draws exactly from their softmax and keeps no generator state: the
same row at the same position gives the same token, whatever was drafted before it.

The noise, bit for bit (unsigned 64-bit arithmetic, wrapping; seed and sequence modulo 2^64):

    mix(x)  = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^ x >> 31
    state   = 0; for each a of (seed, sequence, position): state = mix((state ^ a) + G)
    bits    = mix(state + (token + 1) * G)        with G = 0x9E3779B97F4A7C15
    u       = ((bits >> 12) + 0.5) * 2^-52        exact in float64, 0 < u < 1
    gumbel  = -log(-log(u))                       float64

so a token's noise is the (token + 1)-th output of splitmix64 started at `state`. Position is the
index the drawn token gets in the sequence: the first token after n prompt tokens has position n.

Source of the chain: llama.cpp, common/sampling.cpp and src/llama-sampler.cpp. Of Gumbel's
argmax: Maddison et al., arXiv 1411.0030.
"""  # noqa: E501

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import DecodeConfig

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
N_BLOCKS = 64
"""Ways to split a row in the search for its largest entries; 32 to 128 measured alike."""
N_MASS_FIRST = 256
"""Best tokens that top-p sorts first, when nothing else narrows the row; more if they do not do."""
LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Choice:
    """A drawn token and how clearly it won.

    margin: score of the best minus score of the second, infinite if only one was kept. Scores
        are logits at temperature 0 and as the module's documentation says otherwise. It does not
        see how near a token is to the cuts of top-k, top-p and min-p.
    """

    token: int
    margin: float


class Chances(NamedTuple):
    """How likely a drawn token was, and which others were.

    log_prob: of the token, -inf if the draw could not give it. top: the best tokens, best first,
    with their log-probabilities.
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws tokens from rows of logits by a DecodeConfig. Holds no state between rows."""

    def __init__(
        self, config: DecodeConfig, *, sequence: int = 0, banned: Collection[int] = ()
    ) -> None:
        """Resolves the seed; `banned` tokens are never drawn (as a logit of -inf)."""
        self.config = config
        self.sequence = sequence
        self.seed = secrets.randbits(32) if config.seed is None else config.seed
        self.banned = frozenset(banned)
        self._banned_ids = np.array(sorted(self.banned), dtype=np.int64)
        self._biased_ids = np.array(sorted(config.logit_bias), dtype=np.int64)
        biases = [config.logit_bias[token] for token in self._biased_ids.tolist()]
        self._biases = np.array(biases, dtype=np.float32)

    @property
    def is_argmax(self) -> bool:
        """Whether the best logit of the row is the answer, unless it is a banned token."""
        return self.config.temperature == 0.0 and not self.config.has_penalties

    @property
    def n_best(self) -> int:
        """How many of a row's best tokens it takes to draw as from the whole row; 0: all of it."""
        config = self.config
        if config.temperature == 0.0 or config.has_penalties or config.top_k <= 0:
            return 0
        return config.top_k + len(self.banned)

    def choose_among(self, ids: Ids, logits: Floats, position: int) -> Choice:
        """Draws as `choose` does, from the `n_best` tokens of a row or more.

        ids: int64 [n], logits: float32 [n], best first, lower id on ties.
        """
        if self.banned:
            allowed = ~np.isin(ids, self._banned_ids)
            ids, logits = ids[allowed], logits[allowed]
        _check_best(logits.max(initial=np.float32(-np.inf)))
        ids, logits = ids[: self.config.top_k], logits[: self.config.top_k]
        with np.errstate(over="ignore"):
            return self._draw(*self._cut(ids, logits, logits), position)

    def choose(self, logits: Floats, seen: Sequence[int], position: int) -> Choice:
        """Draws the token for `position`.

        logits: float32 [n_vocab], not changed. seen: prompt and answer so far, ids in order.
        Errors: ValueError for a row that is not float32 [n_vocab], has NaN or +inf, or nothing
        finite left to draw.
        """
        with np.errstate(over="ignore"):
            row = self._adjusted(logits, seen)
            if self.config.temperature == 0.0:
                return _best(row)
            return self._draw(*self._kept(row), position)

    def _draw(self, kept: Ids, values: Floats, position: int) -> Choice:
        """The best of the kept tokens after their noise."""
        scores = values.astype(np.float64)
        scores -= scores.max()
        scores /= self.config.temperature
        scores += gumbel(self.seed, self.sequence, position, kept)
        winner = int(np.argmax(scores))
        best = float(scores[winner])
        scores[winner] = -np.inf
        margin = best - float(scores.max()) if len(scores) > 1 else math.inf
        return Choice(int(kept[winner]), margin)

    def adjusted_among(self, ids: Ids, logits: Floats, seen: Sequence[int]) -> Floats:
        """The logits of some tokens after bans and penalties, in the order of `ids`.

        ids: int64 [n], distinct. logits: float32 [n], not changed.
        """
        row = logits.copy()
        if len(self._biased_ids):
            at = np.minimum(np.searchsorted(self._biased_ids, ids), len(self._biased_ids) - 1)
            row += np.where(self._biased_ids[at] == ids, self._biases[at], np.float32(0.0))
        if self.config.penalises_seen and len(seen) > 0:
            recent, counts = self._recent(seen)
            at = np.minimum(np.searchsorted(recent, ids), len(recent) - 1)
            places = np.flatnonzero(recent[at] == ids)
            with np.errstate(over="ignore"):
                self._penalise(row, places, counts[at[places]])
        if self.banned:
            row[np.isin(ids, self._banned_ids)] = -np.inf
        return row

    def noise(self, ids: Ids, position: int) -> NDArray[np.float64]:
        """What `choose` adds to the scores of tokens [n, k] of the n positions from `position`."""
        positions = range(position, position + len(ids))
        states = [_state(self.seed, self.sequence, at) for at in positions]
        return _noise(np.array(states, dtype=np.uint64)[:, None], ids)

    def is_cut(self, log_q: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of the best tokens of rows top-k, top-p and min-p would take away.

        log_q: [n, k], log-probabilities within their whole rows, in any order. What lies below the
        k best counts as far as their probabilities say, not token by token.
        """
        config = self.config
        order = np.argsort(-log_q, axis=1, kind="stable")
        values = np.take_along_axis(log_q, order, 1)
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
        found = np.empty_like(cut)
        np.put_along_axis(found, order, cut, 1)
        return found

    def distribution(self, logits: Floats, seen: Sequence[int]) -> tuple[Ids, NDArray[np.float64]]:
        """The tokens that can be drawn, best first, and their probabilities (they sum to 1)."""
        with np.errstate(over="ignore"):
            row = self._adjusted(logits, seen)
            if self.config.temperature == 0.0:
                return np.array([_best(row).token], dtype=np.int64), np.ones(1)
            kept, values = self._kept(row)
            order = np.argsort(-values, kind="stable")
            kept, sorted_values = kept[order], values[order].astype(np.float64)
            weights = np.exp((sorted_values - sorted_values[0]) / self.config.temperature)
        return kept, weights / weights.sum()

    def chances(self, logits: Floats, seen: Sequence[int], token: int) -> Chances:
        """How likely the token of a row was, and the `n_probs` best, as the config asks.

        The model's own probabilities are those of its logits as they are: no bias, penalty or
        temperature is in them.
        """
        n = self.config.n_probs or 0
        if self.config.post_sampling_probs:
            ids, chances = self.distribution(logits, seen)
            with np.errstate(divide="ignore"):
                logs = np.log(chances)
            found = np.flatnonzero(ids == token)
            log_prob = float(logs[found[0]]) if len(found) else -math.inf
            n_kept = min(n, int(np.count_nonzero(chances)))
            return Chances(log_prob, tuple(zip(ids[:n_kept].tolist(), logs.tolist(), strict=False)))
        values = logits.astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        top = ((int(i), float(values[i])) for i in best_ids(logits, n).tolist())
        return Chances(float(values[token]), tuple(top))

    def _adjusted(self, logits: Floats, seen: Sequence[int]) -> Floats:
        """The row after banned tokens and penalties; the argument itself where neither acts."""
        row = np.asarray(logits)
        if row.ndim != 1 or row.dtype != np.float32 or not row.size:
            raise ValueError(f"logits are {row.dtype}{list(row.shape)}, must be float32 [n_vocab]")
        penalise = self.config.penalises_seen and len(seen) > 0
        if not penalise and not self.banned and not len(self._biased_ids):
            return row
        row = row.copy()
        biased = self._biased_ids < row.size
        row[self._biased_ids[biased]] += self._biases[biased]
        row[self._banned_ids[self._banned_ids < row.size]] = -np.inf
        if penalise:
            ids, counts = self._recent(seen)
            if ids[0] < 0 or ids[-1] >= row.size:
                bad = ids[0] if ids[0] < 0 else ids[-1]
                raise ValueError(f"token id {bad} is outside the vocabulary of {row.size}")
            self._penalise(row, ids, counts)
        return row

    def _recent(self, seen: Sequence[int]) -> tuple[Ids, Ids]:
        """The tokens among the last repeat_last_n of `seen`, ascending, and how often each."""
        recent = np.asarray(seen[-self.config.repeat_last_n :], dtype=np.int64)
        return np.unique(recent, return_counts=True)

    def _penalise(self, row: Floats, places: Ids, counts: Ids) -> None:
        """Changes the row in place where tokens were seen `counts` times."""
        config = self.config
        repeat = np.float32(config.repeat_penalty)
        values = row[places]
        values = np.where(values <= 0, values * repeat, values / repeat)
        row[places] = values - (
            counts.astype(np.float32) * np.float32(config.frequency_penalty)
            + np.float32(config.presence_penalty)
        )

    def _kept(self, row: Floats) -> tuple[Ids, Floats]:
        """Ids and logits that survive top-k, top-p and min-p: best first, lower id on ties.

        Where no step is active the whole row comes back in its own order, -inf and all: sorting
        it would cost ten times the rest.
        """
        config = self.config
        best = row.max()
        _check_best(best)
        floor = best + np.log(np.float32(config.min_p)) if config.min_p > 0 else LOWEST
        if 0 < config.top_k < row.size:
            ids, values = _largest(row, config.top_k)
            support = values
        elif config.min_p > 0:
            ids, values = _at_least(row, floor)
            support = row
        elif config.top_p < 1.0:
            return _mass(row, config.top_p)
        else:
            return np.arange(row.size), row
        return self._cut(ids, values, support)

    def _cut(self, ids: Ids, values: Floats, support: Floats) -> tuple[Ids, Floats]:
        """What min-p and top-p leave of tokens, best first. support: whose mass top-p is of."""
        config, best = self.config, values[0]
        floor = best + np.log(np.float32(config.min_p)) if config.min_p > 0 else LOWEST
        n = int(np.searchsorted(-values, -floor, side="right"))
        if config.top_p < 1.0:
            n = min(n, _mass_count(values, config.top_p, _weight_sum(support, best)))
        return ids[: max(n, 1)], values[: max(n, 1)]


def gumbel(seed: int, sequence: int, position: int, tokens: Ids) -> NDArray[np.float64]:
    """The noise of `tokens` [n], float64 [n], as the module's documentation defines it."""
    return _noise(np.uint64(_state(seed, sequence, position)), tokens)


def _state(seed: int, sequence: int, position: int) -> int:
    state = 0
    for value in (seed, sequence, position):
        state = _mix(((state ^ (value & MASK)) + GOLDEN) & MASK)
    return state


def _noise(states: np.uint64 | NDArray[np.uint64], tokens: Ids) -> NDArray[np.float64]:
    bits = tokens.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(GOLDEN)
    bits += states
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(MIX_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(MIX_2)
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def _best(row: Floats) -> Choice:
    """The largest entry, lowest id on ties."""
    token = int(np.argmax(row))
    best = row[token]
    _check_best(best)
    others = [part.max() for part in (row[:token], row[token + 1 :]) if part.size]
    second = float(max(others)) if others else -math.inf
    return Choice(token, float(best) - second)


def _check_best(best: np.float32) -> None:
    """Maxima and argmax carry NaN through, so the best entry tells for the whole row."""
    if np.isnan(best):
        raise ValueError("the logits hold NaN")
    if np.isposinf(best):
        raise ValueError("the logits hold +inf")
    if np.isneginf(best):
        raise ValueError("no token is left to draw: every logit is -inf")


def _largest(row: Floats, n: int) -> tuple[Ids, Floats]:
    """The n largest entries (n < row.size), best first, lower id on ties. The row has no NaN.

    The n-th largest of the maxima of interleaved blocks is a bound that at least n entries
    reach, and whatever reaches it is in one of the few blocks whose maximum does.
    """
    n_blocks = row.size // N_BLOCKS
    if n_blocks < n:
        bound = np.partition(row, row.size - n)[row.size - n]
        ids, values = _at_least(row, bound)
        return ids[:n], values[:n]
    n_whole = n_blocks * N_BLOCKS
    blocks = row[:n_whole].reshape(N_BLOCKS, n_blocks)
    maxima = blocks.max(axis=0)
    bound = np.partition(maxima, n_blocks - n)[n_blocks - n]
    best = np.flatnonzero(maxima >= bound)
    at, block = np.nonzero(blocks[:, best] >= bound)
    rest = n_whole + np.flatnonzero(row[n_whole:] >= bound)
    ids = np.concatenate([at * n_blocks + best[block], rest])  # ascending, as rows of blocks are
    order = np.argsort(-row[ids], kind="stable")[:n]
    return ids[order], row[ids[order]]


def best_ids(row: Floats, n: int) -> Ids:
    """The n best tokens of a row, best first, lower id on ties; all of them if it has fewer."""
    if n == 0:
        return np.empty(0, dtype=np.int64)
    return _largest(row, n)[0] if n < row.size else np.argsort(-row, kind="stable")


def _at_least(row: Floats, bound: np.float32) -> tuple[Ids, Floats]:
    """Entries not below the bound, best first, lower id on ties."""
    ids = np.flatnonzero(row >= bound)
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def _mass(row: Floats, top_p: float) -> tuple[Ids, Floats]:
    """The best entries that together reach the mass top_p; sorts no more than it must."""
    total = _weight_sum(row, row.max())
    n = N_MASS_FIRST
    while n < row.size:
        ids, values = _largest(row, n)
        n_mass = _mass_count(values, top_p, total)
        if n_mass < n:
            return ids[:n_mass], values[:n_mass]
        n *= 16
    ids, values = _at_least(row, LOWEST)
    n_mass = _mass_count(values, top_p, total)
    return ids[:n_mass], values[:n_mass]


def _mass_count(values: Floats, top_p: float, total: float) -> int:
    """How many of the sorted values it takes to reach top_p of `total`; all, if all do not."""
    weights = np.exp(values - values[0]).cumsum(dtype=np.float64)
    return min(int(np.searchsorted(weights, top_p * total)) + 1, len(values))


def _weight_sum(values: Floats, best: np.float32) -> float:
    return float(np.exp(values - best).sum(dtype=np.float64))
