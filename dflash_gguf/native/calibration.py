"""Online calibration of candidate probabilities, by Newton steps in the core."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, ffi, new

Floats = NDArray[np.float64]


class CalibrationParams:
    """Parameters of the calibration, float64 [5] each; `dfl_calibration_params` explains them."""

    def __init__(
        self,
        prior: Floats,
        precision: Floats,
        pull: Floats,
        lower: Floats,
        upper: Floats,
        forgetting: float,
    ) -> None:
        parts = {
            "prior": prior,
            "precision": precision,
            "pull": pull,
            "lower": lower,
            "upper": upper,
        }
        self._keep = {name: ffi.new("double[]", part.tolist()) for name, part in parts.items()}
        self.handle = new("dfl_calibration_params *", {**self._keep, "forgetting": forgetting})

    def step(
        self,
        weights: Floats,
        information: Floats,
        gradients: Floats,
        curvatures: Floats,
        counts: abc.Sequence[int],
    ) -> None:
        """Takes one Newton step for each draft's outcome. All arrays are float64 and contiguous.

        Changes weights [n_depths, 5] and information matrices [n_depths, 5, 5]. Draft i has
        counts[i] depths; gradients [sum(counts), 5] and curvatures [sum(counts), 5, 5] of the
        log-likelihood have a row for each.
        Error if counts[i] exceeds n_depths; nothing has changed then.
        """
        into = (
            ffi.from_buffer("double[]", weights, True),
            ffi.from_buffer("double[]", information, True),
        )
        of = ffi.from_buffer("double[]", gradients), ffi.from_buffer("double[]", curvatures)
        n = ffi.new("int64_t[]", counts)
        call("calibration_update", self.handle, *into, len(weights), *of, n, len(counts))
