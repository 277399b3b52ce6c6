"""Every pair of factors of the table of scripts/same_bits.py; and that the set holds every pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import all_pairs, covering, pairs_of
from device import DEVICE
from same_bits import FACTORS, Case, Models, is_possible, long_cases, pairwise_cases, run_case
from small_models import SHAPES

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the CPU's kernels are meant")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = pairwise_cases()
    return sorted(found, key=lambda x: (x.weights, x.kv, x.repack, x.prefix))


def test_every_pair_of_factors_is_among_the_cases(cases: list[Case]) -> None:
    rows = [{name: getattr(case, name) for name in FACTORS} for case in cases]
    assert all(is_possible(row) for row in rows)
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == all_pairs(FACTORS, is_possible)
    assert len(FACTORS["weights"]) * len(FACTORS["kv"]) <= len(cases) < 400


def test_a_covering_set_knows_what_is_impossible() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": ("x", "y")}
    rows = covering(factors, lambda row: row.get("a", 0) != row.get("b", 1))
    covered = set().union(*(pairs_of(row) for row in rows))
    assert ("a", 1, "b", 1) not in covered
    assert len(covered) == 6 + 3 * 2 + 3 * 2
    with pytest.raises(ValueError, match="no combination holds"):
        covering(factors, lambda row: len(row) < 3)


def check(cases: list[Case], folder: Path) -> None:
    models = Models(folder)
    found = {case: run_case(case, models) for case in cases}
    differing = [f"{x}: {case}" for case, x in found.items() if x.n_different]
    assert not differing, "\n".join(differing)
    assert sum(x.n_rows for x in found.values()) > 10 * len(cases)


@pytest.mark.parametrize("kind", SHAPES)
def test_rows_have_the_bits_of_plain_decoding(cases: list[Case], kind: str, tmp_path: Path) -> None:
    check([case for case in cases if case.kind == kind], tmp_path)


def test_contexts_beyond_all_limits(tmp_path: Path) -> None:
    check(long_cases(), tmp_path)
