"""Sampling of tokens by the core, and their log-probabilities; noise.py has the formulas."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..config import DecodeConfig
from ..native import CoreSampler, Error, SampleRequest, SamplerOptions
from ..native import Sequence as KvSequence
from .noise import DraftScorer, Floats, Ids, SamplingNoise, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token and the margin by which it won.

    margin: best score minus second-best score, infinite if only one token was kept. Scores are
    logits at temperature 0, noisy scores otherwise. The margin ignores how close a token is to the
    cuts of top-k, top-p and min-p.
    """

    token: int
    margin: float


class Sampler(SamplingNoise):
    """Samples tokens from rows of logits by a DecodeConfig. Holds no state between rows."""

    def __init__(
        self, config: DecodeConfig, *, sequence: int = 0, banned: Collection[int] = ()
    ) -> None:
        super().__init__(config, sequence=sequence, banned=banned)
        self._core = CoreSampler(
            SamplerOptions(
                config.temperature,
                config.top_k,
                config.top_p,
                config.min_p,
                config.repeat_penalty,
                config.presence_penalty,
                config.frequency_penalty,
                config.repeat_last_n,
                self.seed,
                sequence,
            ),
            config.logit_bias,
            self.banned,
        )

    @cached_property
    def scorer(self) -> DraftScorer:
        """Scorer of draft candidates with this sampler's seed, bans and settings."""
        config = replace(self.config, seed=self.seed)
        return DraftScorer(config, sequence=self.sequence, banned=self.banned)

    @property
    def core(self) -> CoreSampler:
        """The sampler in the core."""
        return self._core

    @property
    def n_best(self) -> int:
        """Best tokens of a row that sampling needs; 0: it needs the argmax or the whole row."""
        return self._core.n_best

    def sample_request(
        self,
        sequence: KvSequence,
        history: Sequence[int],
        n_rows: int,
        masks: NDArray[np.uint32] | None = None,
    ) -> SampleRequest:
        """Returns a request to sample along n_rows rows of a sequence after its history."""
        return SampleRequest(
            sequence, self._core, self._penalty_window(history), len(history), n_rows, masks
        )

    def sample(self, logits: Floats, history: Sequence[int], position: int) -> SampledToken:
        """Samples the token for `position`.

        logits: float32 [n_vocab], not changed. history: token ids of prompt and answer so far.
        Errors: ValueError for a row that is not float32 [n_vocab], holds NaN or +inf, or has no
        token to sample.
        """
        row = _checked(logits)
        with _ValueErrors():
            return SampledToken(*self._core.sample(row, self._penalty_window(history), position))

    def distribution(
        self, logits: Floats, history: Sequence[int]
    ) -> tuple[Ids, NDArray[np.float64]]:
        """Returns the tokens that can be sampled, best first, and their probabilities (sum 1)."""
        row = _checked(logits)
        with _ValueErrors():
            kept, values = self._core.filter(row, self._penalty_window(history))
        if self.config.temperature == 0.0:
            return kept.astype(np.int64), np.ones(1)
        order = np.argsort(-values, kind="stable")
        ids, ranked = kept[order].astype(np.int64), values[order].astype(np.float64)
        with np.errstate(over="ignore"):
            weights = np.exp((ranked - ranked[0]) / self.config.temperature)
        chances: NDArray[np.float64] = weights / weights.sum()
        return ids, chances

    def logprobs(self, logits: Floats, history: Sequence[int], token: int) -> TokenLogprobs:
        """Returns the log-probability of a row's sampled token, and of the `n_probs` best tokens.

        With post_sampling_probs the probabilities are the sampler's, else the model's own: without
        biases, penalties and temperature.
        """
        n = self.config.n_probs or 0
        if self.config.post_sampling_probs:
            ids, chances = self.distribution(logits, history)
            with np.errstate(divide="ignore"):
                logs = np.log(chances)
            places = np.flatnonzero(ids == token)
            log_prob = float(logs[places[0]]) if len(places) else -math.inf
            n_kept = min(n, int(np.count_nonzero(chances)))
            return TokenLogprobs(
                log_prob, tuple(zip(ids[:n_kept].tolist(), logs.tolist(), strict=False))
            )
        values = logits.astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        top = ((int(i), float(values[i])) for i in best_ids(logits, n).tolist())
        return TokenLogprobs(float(values[token]), tuple(top))

    def _penalty_window(self, history: Sequence[int]) -> Sequence[int]:
        config = self.config
        return history[-config.repeat_last_n :] if config.penalises_history else ()


def masked(row: Floats, mask: NDArray[np.uint32]) -> Floats:
    """Returns a copy of a row with -inf for the tokens whose bit in the mask is 0."""
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")[: row.size]
    return np.where(flags, row, np.float32(-np.inf))


def best_ids(row: Floats, n: int) -> Ids:
    """Returns the n tokens of a row with the largest logits, best first, lower id on ties."""
    if n == 0:
        return np.empty(0, dtype=np.int64)
    config = DecodeConfig(temperature=1.0, top_k=n, top_p=1.0, min_p=0.0)
    return (
        Sampler(config).distribution(row, ())[0]
        if n < row.size
        else np.argsort(-row, kind="stable")
    )


def _checked(logits: Floats) -> Floats:
    row = np.asarray(logits)
    if row.ndim != 1 or row.dtype != np.float32 or not row.size:
        raise ValueError(f"logits are {row.dtype}{list(row.shape)}, must be float32 [n_vocab]")
    return np.ascontiguousarray(row)


class _ValueErrors:
    """Converts the core's errors about a row into ValueError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Error):
            raise ValueError(str(error)) from None
