"""Probability that the target accepts a drafter's candidate, learned online from outcomes.

Drafters are overconfident at late positions, and acceptance depends on the sampling settings. So
the probabilities of candidate i of a position, and of none of the candidates, are

    softmax_i (a log q_i + b + c g_i - d h_i + e f_i)   and   softmax (a log q_rest)

over the candidates and the rest of the vocabulary. q: the drafter's probability. g: the Gumbel
noise that the target will add. h: 1 if top-k, top-p or min-p would remove the candidate from the
drafter's distribution. f: 1 for the drafter's best candidate. A greedy target has g = h = 0. Each
depth has its own weights a to e. The weights (1, 0, 0, 0, 0) give q itself; with c = a and b = d =
e = 0 the highest score belongs to a sample from q with the target's noise. Each outcome is one
Newton step towards the maximum of the log-likelihood, which is concave; old outcomes decay.
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
"""Number of later outcomes at a depth that reduce the weight of an outcome to 1/e."""
PRIORS = {False: (1.0, 0.0, 0.0, 0.0, 0.0), True: (1.0, 0.0, 0.5, 1.0, 0.0)}
"""Prior weights of log q, constant, noise, cut-off and best candidate in a calibration at depth 1,
by whether the target samples; each deeper depth starts from the weights of the depth before."""
PRECISION = (6.0, 2.0, 6.0, 2.0, 2.0)
"""Prior precision of a calibration's five weights, as if about ten outcomes had been seen."""
PULL = 0.2
"""Permanent pull of calibration weights towards their prior, as a fraction of PRECISION."""
BOUNDS = np.array([[0.02, -6.0, 0.0, 0.0, -6.0], [4.0, 6.0, 4.0, 8.0, 6.0]])
"""Bounds of the calibration weights of log q, constant, noise, cut-off and best candidate."""
TOP1_MEMORY = 16
"""Number of later drafts that reduce the weight of an outcome in a top-1 rate to 1/e."""
TOP1_PRIOR = 0.6, 2.0
"""Prior acceptance rate of top-1 candidates, and its weight in outcomes."""
MIN_PROB = 1e-300
"""Lower bound of a path's probability: a product over 200 positions may underflow to 0."""
MIN_LOG_PROB = -30.0
"""Lower bound of log-probabilities, so that a single surprise does not outweigh other outcomes."""


class Calibration:
    """Calibration of one drafter's probabilities for one target and one sampling class."""

    def __init__(self, is_sampled: bool = False) -> None:
        self._is_sampled = is_sampled
        self._prior = np.array(PRIORS[is_sampled])
        self._weights, self._information = np.empty((0, 5)), np.empty((0, 5, 5))
        precision, (lower, upper) = np.array(PRECISION), BOUNDS
        self._params = CalibrationParams(
            self._prior, precision, PULL * precision, lower, upper, 1.0 / MEMORY
        )

    def weights(self, n: int) -> Floats:
        """Returns calibration weights of depths 1 to n, float64 [n, 5]; unseen depths included."""
        return self._of_depths(np.arange(n))

    def log_probs(self, features: Features) -> Floats:
        """Returns each candidate's log-probability of acceptance after its path, float64 [n, k]."""
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
        """Learns from the target's tokens at drafted positions.

        places: [n], index of the target's token among the k candidates; k if it is none of them.
        rows: [n], row of `features` for each token; None for the first n rows. counts: number of
        positions of each draft; None if all positions belong to one draft.
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
        """Returns learned weights and their information matrices as JSON-serialisable values."""
        return {
            "is_sampled": self._is_sampled,
            "weights": self._weights.tolist(),
            "information": self._information.tolist(),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Calibration:
        """Restores a calibration from `to_dict`; KeyError, TypeError or ValueError if invalid."""
        calibration = cls(bool(stored["is_sampled"]))
        weights = np.array(stored["weights"], dtype=np.float64).reshape(-1, 5)
        information = np.array(stored["information"], dtype=np.float64).reshape(len(weights), 5, 5)
        if not (np.isfinite(weights).all() and np.isfinite(information).all()):
            raise ValueError("the stored calibration is not finite")
        calibration._weights, calibration._information = weights, information
        return calibration


class Top1Acceptance:
    """Recent acceptance rate of top-1 candidates by depth, if all before were accepted."""

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._taken: list[float] = []

    def observe(self, candidates: Sequence[int], chosen: Sequence[int]) -> None:
        """Counts which candidates of a chain equal the target's tokens, up to the first miss."""
        self._extend(len(candidates))
        keep = 1.0 - 1.0 / TOP1_MEMORY
        self._tried = [keep * x for x in self._tried]
        self._taken = [keep * x for x in self._taken]
        for depth, (candidate, token) in enumerate(zip(candidates, chosen, strict=False)):
            self._tried[depth] += 1.0
            self._taken[depth] += candidate == token
            if candidate != token:
                return

    def paths(self, n: int) -> list[float]:
        """Returns, for i = 1 to n, the probability that the first i candidates are all accepted."""
        self._extend(n)
        path, (prob, weight), paths = 1.0, TOP1_PRIOR, []
        for taken, tried in zip(self._taken[:n], self._tried, strict=False):
            prob = (taken + weight * prob) / (tried + weight)
            path *= prob
            paths.append(path)
        return paths

    def log_paths(self, n: int) -> list[float]:
        """Returns log-probabilities that the first i = 1 to n candidates are all accepted."""
        return [math.log(max(path, MIN_PROB)) for path in self.paths(n)]

    def to_dict(self) -> list[list[float]]:
        """Returns the decayed counts of tried and of accepted candidates, by depth."""
        return [list(self._tried), list(self._taken)]

    @classmethod
    def from_dict(cls, stored: Sequence[Sequence[float]]) -> Top1Acceptance:
        """Restores acceptance rates from `to_dict`; ValueError or TypeError if invalid."""
        acceptance = cls()
        for tried, taken in zip(*stored, strict=True):
            if not 0.0 <= float(taken) <= float(tried) < 1e6:
                raise ValueError(f"the stored acceptance is invalid: {taken} of {tried} candidates")
            acceptance._tried.append(float(tried))
            acceptance._taken.append(float(taken))
        return acceptance

    def _extend(self, n: int) -> None:
        more = n - len(self._tried)
        self._tried += [0.0] * more
        self._taken += [0.0] * more


class Calibrations:
    """Calibrations of one drafter by sampling class, as each class has its own acceptance."""

    def __init__(self) -> None:
        self._known: dict[str, Calibration] = {}
        self._top1: defaultdict[str, Top1Acceptance] = defaultdict(Top1Acceptance)

    def of(self, config: DecodeConfig) -> Calibration:
        """Returns the calibration for the sampling class of a request's config."""
        sampling_class = sampling_class_of(config)
        if sampling_class not in self._known:
            self._known[sampling_class] = Calibration(is_sampled=config.temperature > 0.0)
        return self._known[sampling_class]

    def top1(self, config: DecodeConfig) -> Top1Acceptance:
        """Returns the top-1 acceptance rates for the sampling class of a request's config."""
        return self._top1[sampling_class_of(config)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the learned values of all sampling classes as JSON-serialisable values."""
        return {
            "ranked": {name: known.to_dict() for name, known in self._known.items()},
            "spines": {name: known.to_dict() for name, known in self._top1.items()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Calibrations:
        """Restores calibrations from `to_dict`; KeyError, TypeError or ValueError if invalid."""
        calibrations = cls()
        for name, known in stored["ranked"].items():
            calibrations._known[name] = Calibration.from_dict(known)
        for name, top1 in stored["spines"].items():
            calibrations._top1[name] = Top1Acceptance.from_dict(top1)
        return calibrations


def sampling_class_of(config: DecodeConfig) -> str:
    """Returns a config's sampling class, the key of learned acceptance: temperature, penalties.

    One digit of the temperature, as each class is kept: a client may draw temperatures.
    """
    return f"{config.temperature:.1g}{' penalised' if config.has_penalties else ''}"


class Features:
    """Inputs of a calibration for n positions, [n, k + 1, 5]: k candidates, all other tokens."""

    def __init__(
        self,
        log_q: Floats,
        noise: Floats | None = None,
        is_cut: NDArray[np.bool_] | None = None,
        depths: NDArray[np.intp] | None = None,
    ) -> None:
        """Builds the calibration's inputs for n drafted positions with k candidates each.

        log_q: [n, k], the drafter's log-probabilities; -inf for banned candidates. noise: [n, k],
        Gumbel noise of the target's sampler. is_cut: [n, k], True if the sampler would remove the
        candidate. Both are None for a greedy target. depths: [n], positions in their drafts from 0
        on; None: one draft.
        """
        n, k = log_q.shape
        self.depths: NDArray[np.intp] = np.arange(n) if depths is None else depths
        self.log_probs: Floats | None = None  # calibrated log-probs of candidates and other tokens
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
