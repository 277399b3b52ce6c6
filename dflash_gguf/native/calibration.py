"""Newton steps of what is learned as outcomes come in."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, ffi, new

Floats = NDArray[np.float64]


class NewtonRules:
    """Parameters of the calibration, numbers [5]; see `dfl_calibration_params` in dflash.h."""

    def __init__(
        self, prior: Floats, held: Floats, back: Floats, low: Floats, high: Floats, fade: float
    ) -> None:
        parts = {"prior": prior, "precision": held, "pull": back, "lower": low, "upper": high}
        self._keep = {name: ffi.new("double[]", part.tolist()) for name, part in parts.items()}
        self.handle = new("dfl_calibration_params *", {**self._keep, "forgetting": fade})

    def step(
        self,
        weights: Floats,
        information: Floats,
        slopes: Floats,
        spreads: Floats,
        counts: abc.Sequence[int],
    ) -> None:
        """Changes weights [n, 5] and information [n, 5, 5], outcome by outcome.

        slopes: [.., 5] and spreads: [.., 5, 5] of the depths of each outcome, one outcome's after
        another's: counts says how many.

        Raises:
            Error: an outcome has more depths than there are.
        """
        into = (
            ffi.from_buffer("double[]", weights, True),
            ffi.from_buffer("double[]", information, True),
        )
        of = ffi.from_buffer("double[]", slopes), ffi.from_buffer("double[]", spreads)
        n = ffi.new("int64_t[]", counts)
        call("calibration_update", self.handle, *into, len(weights), *of, n, len(counts))
