"""Counters of the null GPU, by rounds and graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import null_gpu


def test_a_capability_is_a_number(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"'8\.6'"):
        null_gpu.build(tmp_path, "8.6")


def test_calls_are_told_by_the_round_where_there_is_such_a_gpu() -> None:
    before = dict.fromkeys(null_gpu.COUNTS, 10)
    after = {**before, "graph_launches": 40, "used_bytes": 99}
    told = null_gpu.calls_a_round(before, after, 10)["calls_a_round"]
    assert told.pop("graph_launches") == 3
    assert set(told.values()) == {0}
    assert null_gpu.calls_a_round(None, None, 10) == {}


def test_kernels_are_told_by_the_graph() -> None:
    before = dict.fromkeys(null_gpu.COUNTS, 10)
    after = {**before, "captures": 12, "captured_kernels": 310}
    assert null_gpu.kernels_a_graph(before, after) == {"kernels_a_graph": 150.0}
    assert null_gpu.kernels_a_graph(before, before) == {}
    assert null_gpu.kernels_a_graph(None, None) == {}
