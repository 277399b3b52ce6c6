"""Divides the time limit of a measurement among its parts."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_S = 5.0
"""Minimum seconds of a part: loading Python and the device takes as long."""


def share(left_s: float, weights: Sequence[float]) -> float:
    """Returns the first remaining part's seconds, by weight; parts of weight 0 share the rest."""
    total = sum(weights)
    return left_s * weights[0] / total if total > 0 else left_s / len(weights)
