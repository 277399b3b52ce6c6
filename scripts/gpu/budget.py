"""Divides the time limit of the GPU measurement among its parts."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_S = 5.0
"""Seconds below which no part is started: loading Python and the device takes as long."""


def share(left_s: float, weights: Sequence[float]) -> float:
    """Returns the next part's share of the seconds left. weights: of this and all later parts."""
    total = sum(weights)
    return left_s * weights[0] / total if total > 0 else left_s / len(weights)
