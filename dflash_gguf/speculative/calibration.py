"""Probability that the target accepts a drafter's candidate, learned from outcomes.

Drafters trust their late positions too much, a greedy target is surer than any draw, and how much
noise shared with the target tells depends on how alike the two are. So the chance of candidate i of
a position is

    softmax_i (a log q_i + b + c g_i - d h_i + e f_i)   and of none of them   softmax (a log q_rest)

over the candidates and the rest, with q the drafter's probability, g the noise of the target's draw
and h whether the sampler would cut the candidate off if the row were the drafter's (both 0 where
the target is greedy), f whether it is the drafter's best. a to e are of the depth. At a = 1 and
b = c = d = e = 0 this is q itself; at c = a its largest is a draw from q with the target's noise.
They follow the maximum of the log-likelihood, which is concave, by Newton steps as outcomes come
in; old ones fade.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DecodeConfig
from ..native import CalibrationParams

Floats = NDArray[np.float64]

MEMORY = 64
"""Outcomes of a depth after which the weight of one has fallen to 1/e."""
PRIORS = {False: (1.0, 0.0, 0.0, 0.0, 0.0), True: (1.0, 0.0, 0.5, 1.0, 0.0)}
"""a to e at depth 1 before any outcome, by whether the target samples; a deeper depth starts from
the one before it."""
PRECISION = (6.0, 2.0, 6.0, 2.0, 2.0)
"""Precision of the prior: the information of about ten outcomes."""
PULL = 0.2
"""Strength of the lasting pull back to the prior, as a part of its precision."""
BOUNDS = np.array([[0.02, -6.0, 0.0, 0.0, -6.0], [4.0, 6.0, 4.0, 8.0, 6.0]])
"""Bounds of a to e."""
TOP1_PRIOR = 0.6, 2.0
"""Prior acceptance rate of a best candidate, and its weight in outcomes."""
MIN_PROB = 1e-300
"""Chance that a path has at least: beyond two hundred positions their product may be rounded to 0.
"""
MIN_LOG_PROB = -30.0
"""Log-probabilities below are taken for this one: a single surprise shall not outweigh the rest."""


class Calibration:
    """Calibration of one drafter and target, for one sampling class."""

    def __init__(self, is_sampled: bool = False) -> None:
        self._is_sampled = is_sampled
        self._prior = np.array(PRIORS[is_sampled])
        self._weights, self._information = np.empty((0, 5)), np.empty((0, 5, 5))
        precision, (lower, upper) = np.array(PRECISION), BOUNDS
        self._params = CalibrationParams(
            self._prior, precision, PULL * precision, lower, upper, 1.0 / MEMORY
        )

    def weights(self, n: int) -> Floats:
        """The numbers of depths 1 to n, float64 [n, 5]; unseen depths are like the last seen."""
        return self._of_depths(np.arange(n))

    def log_probs(self, features: Features) -> Floats:
        """Returns the log-probability that each candidate is accepted after its path; [n, k]."""
        features.log_probs = self._log_probs(features)
        of_candidates: Floats = features.log_probs[:, :-1]
        return of_candidates

    def _log_probs(self, features: Features) -> Floats:
        scores: Floats = np.matmul(features.values, self._of_depths(features.depths)[:, :, None])[
            :, :, 0
        ]
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return scores

    def observe(
        self,
        features: Features,
        places: Sequence[int],
        rows: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Learns from outcomes of drafts, one after the other.

        places: [n], of each token that the target took among the k candidates; k for none of them.
        rows: [n], of the features; None: from the first on. counts: positions of each outcome;
        None: all are one outcome's.
        """
        rows, counts = range(len(places)) if rows is None else rows, counts or [len(places)]
        log_probs = features.log_probs
        if log_probs is None:
            log_probs = self._log_probs(features)
        values, probs = features.values[rows], np.exp(log_probs[rows])
        weighted = probs[:, :, None] * values
        mean = weighted.sum(axis=1)
        gradients = values[np.arange(len(places)), places] - mean
        curvatures = np.matmul(weighted.transpose(0, 2, 1), values)
        curvatures -= mean[:, :, None] * mean[:, None]
        self._extend(max(counts))
        self._params.step(self._weights, self._information, gradients, curvatures, counts)

    def _of_depths(self, depths: NDArray[np.intp]) -> Floats:
        """The numbers of depths, from 0 on."""
        if not len(self._weights):
            return np.tile(self._prior, (len(depths), 1))
        weights: Floats = self._weights[np.minimum(depths, len(self._weights) - 1)]
        return weights

    def _extend(self, n: int) -> None:
        for _ in range(len(self._weights), n):
            last = self._weights[-1] if len(self._weights) else self._prior
            self._weights = np.vstack([self._weights, last])
            self._information = np.concatenate([self._information, [np.diag(PRECISION)]])

    def to_dict(self) -> dict[str, Any]:
        """Returns the learned values as plain ones."""
        return {
            "is_sampled": self._is_sampled,
            "weights": self._weights.tolist(),
            "information": self._information.tolist(),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Calibration:
        """Restores `to_dict`. Errors: KeyError, TypeError or ValueError for anything else."""
        calibration = cls(bool(stored["is_sampled"]))
        weights = np.array(stored["weights"], dtype=np.float64).reshape(-1, 5)
        information = np.array(stored["information"], dtype=np.float64).reshape(len(weights), 5, 5)
        if not (np.isfinite(weights).all() and np.isfinite(information).all()):
            raise ValueError("a calibration that is not finite")
        calibration._weights, calibration._information = weights, information
        return calibration


class Top1Acceptance:
    """Acceptance rate of best candidates, by depth, where all before were accepted.

    Old outcomes fade.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._taken: list[float] = []

    def observe(self, candidates: Sequence[int], chosen: Sequence[int]) -> None:
        """Learns from a chain of candidates and the tokens that the target chose instead."""
        self._extend(len(candidates))
        keep = 1.0 - 1.0 / MEMORY
        for depth, (candidate, token) in enumerate(zip(candidates, chosen, strict=False)):
            self._tried[depth] = keep * self._tried[depth] + 1.0
            self._taken[depth] = keep * self._taken[depth] + (candidate == token)
            if candidate != token:
                return

    def paths(self, n: int) -> list[float]:
        """Chances that all of the first candidates are taken, for 1 to n of them.

        A depth that was seldom reached is taken to be like the one before it.
        """
        self._extend(n)
        path, (prob, weight), paths = 1.0, TOP1_PRIOR, []
        for taken, tried in zip(self._taken[:n], self._tried, strict=False):
            prob = (taken + weight * prob) / (tried + weight)
            path *= prob
            paths.append(path)
        return paths

    def log_paths(self, n: int) -> list[float]:
        """Returns the logarithms of `paths`."""
        return [math.log(max(path, MIN_PROB)) for path in self.paths(n)]

    def to_dict(self) -> list[list[float]]:
        """Tried and taken, by depth."""
        return [list(self._tried), list(self._taken)]

    @classmethod
    def from_dict(cls, stored: Sequence[Sequence[float]]) -> Top1Acceptance:
        """Restores `to_dict`. Errors: ValueError or TypeError for anything else."""
        acceptance = cls()
        for tried, taken in zip(*stored, strict=True):
            if not 0.0 <= float(taken) <= float(tried) < 1e6:
                raise ValueError(f"{taken} candidates of {tried}")
            acceptance._tried.append(float(tried))
            acceptance._taken.append(float(taken))
        return acceptance

    def _extend(self, n: int) -> None:
        more = n - len(self._tried)
        self._tried += [0.0] * more
        self._taken += [0.0] * more


class Calibrations:
    """Calibrations by sampling class, as a calibration misleads in another class."""

    def __init__(self) -> None:
        self._known: dict[str, Calibration] = {}
        self._top1: defaultdict[str, Top1Acceptance] = defaultdict(Top1Acceptance)

    def of(self, config: DecodeConfig) -> Calibration:
        """The calibration of a way to draw."""
        sampling_class = sampling_class_of(config)
        if sampling_class not in self._known:
            self._known[sampling_class] = Calibration(is_sampled=config.temperature > 0.0)
        return self._known[sampling_class]

    def top1(self, config: DecodeConfig) -> Top1Acceptance:
        """Returns the acceptance of best candidates in the sampling class of a config."""
        return self._top1[sampling_class_of(config)]

    def to_dict(self) -> dict[str, Any]:
        """All that was learned, as plain values."""
        return {
            "ranked": {name: known.to_dict() for name, known in self._known.items()},
            "spines": {name: known.to_dict() for name, known in self._top1.items()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Calibrations:
        """Restores `to_dict`. Errors: KeyError, TypeError or ValueError for anything else."""
        calibrations = cls()
        for name, known in stored["ranked"].items():
            calibrations._known[name] = Calibration.from_dict(known)
        for name, top1 in stored["spines"].items():
            calibrations._top1[name] = Top1Acceptance.from_dict(top1)
        return calibrations


def sampling_class_of(config: DecodeConfig) -> str:
    """Returns the sampling class of a config: requests of one are accepted equally often."""
    return f"{config.temperature:g}{' penalised' if config.has_penalties else ''}"


class Features:
    """Inputs of a calibration: float64 [n, k + 1, 5]; the last of the k + 1 rows is the rest."""

    def __init__(
        self,
        log_q: Floats,
        noise: Floats | None = None,
        is_cut: NDArray[np.bool_] | None = None,
        depths: NDArray[np.intp] | None = None,
    ) -> None:
        """log_q: [n, k], the drafter's log-probabilities; -inf for what cannot be taken.

        noise: [n, k], of the target's draw. is_cut: [n, k]. None if it is greedy. depths: [n], of
        the positions, from 0 on; None: one draft's, from the first.
        """
        n, k = log_q.shape
        self.depths: NDArray[np.intp] = np.arange(n) if depths is None else depths
        self.log_probs: Floats | None = None  # what these were last taken to mean, [n, k + 1]
        self.values = np.zeros((n, k + 1, 5))
        rest = 1.0 - np.exp(log_q).sum(axis=1)
        self.values[:, :k, 0] = np.maximum(log_q, MIN_LOG_PROB)
        self.values[:, k, 0] = np.log(np.maximum(rest, 1e-6))
        self.values[:, :k, 1] = 1.0
        self.values[np.arange(n), log_q.argmax(axis=1), 4] = 1.0
        if noise is not None:
            self.values[:, :k, 2] = noise
        if is_cut is not None:
            self.values[:, :k, 3] = np.where(is_cut, -1.0, 0.0)
