"""Runs same_bits.py over every pair of factors, and checks that the cases cover every pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from covering import all_groups, covering, groups_of
from device import DEVICE
from same_bits import (
    ALL_WORKS,
    FACTORS,
    Case,
    Found,
    Models,
    Row,
    covering_cases,
    is_possible,
    long_cases,
    run_case,
    run_table,
)

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the CPU's kernels are meant")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = covering_cases()
    return sorted(found, key=lambda x: (x.weights, x.kv, x.repack, x.prefix))


def test_every_pair_of_factors_is_among_the_cases(cases: list[Case]) -> None:
    rows = [{name: getattr(case, name) for name in FACTORS} for case in cases]
    assert all(is_possible(row) for row in rows)
    covered = set().union(*(groups_of(row, 2) for row in rows))
    assert covered == all_groups(FACTORS, is_possible, 2)
    assert len(FACTORS["weights"]) * len(FACTORS["kv"]) <= len(cases) < 400


def test_a_covering_set_knows_what_is_impossible() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": ("x", "y")}
    rows = covering(factors, lambda row: row.get("a", 0) != row.get("b", 1))
    covered = set().union(*(groups_of(row, 2) for row in rows))
    assert (("a", 1), ("b", 1)) not in covered
    assert len(covered) == 6 + 3 * 2 + 3 * 2
    with pytest.raises(ValueError, match="no combination holds"):
        covering(factors, lambda row: len(row) < 3)


def test_a_covering_set_of_triples_holds_every_triple() -> None:
    factors = {name: range(3) for name in "abcde"}
    rows = covering(factors, lambda row: row.get("a", 0) != row.get("b", 1), strength=3)
    covered = set().union(*(groups_of(row, 3) for row in rows))
    possible = {(a, b, c) for a in range(3) for b in range(3) for c in range(3) if a != b}
    assert {
        (g[0][1], g[1][1], g[2][1]) for g in covered if [x for x, _ in g] == ["a", "b", "c"]
    } == possible
    assert len(rows) < 3 * 27


def check(cases: list[Case], folder: Path) -> None:
    models = Models(folder)
    found = {case: run_case(case, models) for case in cases}
    differing = [f"{x}: {case}" for case, x in found.items() if x.n_different]
    assert not differing, "\n".join(differing)
    assert sum(x.n_rows for x in found.values()) > 10 * len(cases)


@pytest.mark.parametrize("kind", FACTORS["kind"])
def test_rows_have_the_bits_of_plain_decoding(cases: list[Case], kind: str, tmp_path: Path) -> None:
    check([case for case in cases if case.kind == kind], tmp_path)


def test_contexts_beyond_all_limits(tmp_path: Path) -> None:
    check(long_cases(), tmp_path)


def test_a_cell_of_the_table_has_all_kinds_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    compare = Found.compare

    def noting(self: Found, row: Row, expected: Row, what: str) -> None:
        compared.append(what)
        compare(self, row, expected, what)

    monkeypatch.setattr(Found, "compare", noting)
    cases = [
        Case("qwen35", "q4_0", "q8_0/q8_0", p, n, ALL_WORKS, True) for n in (1, 2) for p in (0, 100)
    ]
    found = dict(run_table(cases, Models(tmp_path)))
    assert list(found) == cases
    assert not any(x.n_different for x in found.values())
    assert min(x.n_rows for x in found.values()) > 2 + 64
    for work in ("row 63 of 64", "node", "a step after a path", "a prefill", "decoding"):
        assert sum(what.startswith(work) for what in compared) >= 2, work


def test_a_row_that_differs_is_told() -> None:
    found, row = Found(), np.linspace(0, 1, 301, dtype=np.float32)
    found.compare(row, row.copy(), "the same")
    found.compare(row, row + np.float32(1e-7), "another")
    assert (found.n_rows, found.n_different, found.first) == (2, 1, "another")
