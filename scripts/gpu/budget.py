"""Shares the seconds of a run among its parts."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_S = 5.0
"""A part that would have less is not started: loading Python and the device takes as long."""


def share(left_s: float, weights: Sequence[float]) -> float:
    """Returns the seconds of the first of the remaining parts, by their weights.

    What a part leaves is shared again. Parts without a weight come last and get what is left then.
    """
    total = sum(weights)
    return left_s * weights[0] / total if total > 0 else left_s / len(weights)
