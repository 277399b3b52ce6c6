"""Shares of the parts of bench_gpu.py in a run's seconds."""

from __future__ import annotations

import pytest
from bench_gpu import LIMIT, PARTS
from gpu.budget import share


def test_parts_that_take_their_share_take_all() -> None:
    weights, left = [8.0, 35.0, 40.0], 300.0
    taken = []
    for index in range(len(weights)):
        taken.append(share(left, weights[index:]))
        left -= taken[-1]
    assert taken == pytest.approx([300 * w / sum(weights) for w in weights])
    assert left == pytest.approx(0)


def test_what_a_part_leaves_goes_to_the_later_ones() -> None:
    assert share(270 - 10, [30, 30]) == pytest.approx(130)


def test_parts_without_weight_get_what_is_left_then() -> None:
    assert share(100, [50, 0, 0]) == 100
    assert share(40, [0, 0]) == 20
    assert share(30, [0]) == 30


def test_parts_without_weight_are_the_last() -> None:
    weights = [part.weight for part in PARTS.values()]
    assert weights == sorted(weights, key=lambda weight: weight == 0)
    build_s = 190  # measured in core seconds; on 16 cores, estimated
    assert sum(weights) + build_s < LIMIT
