"""Newton steps of what is learned as outcomes come in."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, ffi, new

Floats = NDArray[np.float64]


class CalibrationParams:
    """Parameters of the calibration, numbers [5]; see `dfl_calibration_params` in dflash.h."""

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
        """Changes weights [n, 5] and information [n, 5, 5], outcome by outcome.

        gradients: [.., 5] and curvatures: [.., 5, 5] of the depths of each outcome, one outcome's
        after another's: counts says how many.

        Raises:
            Error: an outcome has more depths than there are.
        """
        into = (
            ffi.from_buffer("double[]", weights, True),
            ffi.from_buffer("double[]", information, True),
        )
        of = ffi.from_buffer("double[]", gradients), ffi.from_buffer("double[]", curvatures)
        n = ffi.new("int64_t[]", counts)
        call("calibration_update", self.handle, *into, len(weights), *of, n, len(counts))
