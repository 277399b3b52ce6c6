"""Choice of placement and context by the memory plan, on made-up sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dflash_gguf.config import LoadConfig
from dflash_gguf.memory.fit import (
    FitConstraints,
    Planning,
    candidates,
    fit,
    fit_part,
    fits,
    with_context,
)
from dflash_gguf.memory.plan import Plan, PlanItem, check_fits
from dflash_gguf.native import Error


def test_memory_beside_a_device_is_checked_too() -> None:
    items = (
        PlanItem("weights", 100, "device"),
        PlanItem("rest", 60, "host"),
        PlanItem("map", 999, "file"),
    )
    plan = Plan("GPU", True, 110, 64, "f16", "f16", 64, 64, 0, items, host_free_bytes=62)
    check_fits(plan)
    assert fits(replace(plan, free_bytes=110)) and "fits: " in plan.table()
    short = replace(plan, host_free_bytes=50)
    assert short.missing_bytes == 10 and not fits(short)
    assert "does not fit: main memory needs" in short.table()
    with pytest.raises(Error, match=r"main memory has .* 10 bytes short"):
        check_fits(short)


# Bytes of a 27B hybrid: weights, and a cell by K/V type.
WEIGHTS, CELL = 16_000 << 20, {"f16": 65536, "q8_0": 34816, "q4_0": 18432}
N_TRAIN = 262144


def shaped(free: int, weights: int = WEIGHTS) -> tuple[list[Plan], Planning]:
    """Returns a planner with made-up sizes, and the list of plans that it makes."""
    asked: list[Plan] = []

    def plan(config: LoadConfig, n_rows: int) -> Plan:
        assert config.n_ctx is not None
        sizes = (
            weights,
            (CELL[config.cache_type_k] + CELL[config.cache_type_v]) // 2 * config.n_ctx,
            config.n_ubatch * (1 << 20) + config.draft_window * 20480 + n_rows * (4 << 20),
        )
        items = tuple(PlanItem(str(i), size, "device") for i, size in enumerate(sizes))
        asked.append(
            Plan(
                "GPU",
                True,
                free,
                config.n_ctx,
                config.cache_type_k,
                config.cache_type_v,
                config.n_ubatch,
                config.draft_window,
                n_rows,
                items,
            )
        )
        return asked[-1]

    return asked, plan


@pytest.mark.parametrize(
    ("gigabytes", "weights", "constraints", "expected"),
    [
        (80, WEIGHTS, FitConstraints(N_TRAIN, n_rows=64), (N_TRAIN, "f16", 512)),
        # A given context decides the K/V type.
        (24, WEIGHTS, FitConstraints(N_TRAIN, 131072, n_rows=64), (131072, "q8_0", 512)),
        (20, WEIGHTS, FitConstraints(N_TRAIN, 131072, n_rows=64), (131072, "q4_0", 512)),
        # A given K/V type shortens the context.
        (
            24,
            WEIGHTS,
            FitConstraints(N_TRAIN, N_TRAIN, ("f16", "f16"), n_rows=64),
            (125952, "f16", 128),
        ),
        # No given context: the least loss of precision that reaches 32K tokens.
        (19, WEIGHTS, FitConstraints(N_TRAIN, n_rows=64), (34816, "f16", 512)),
        (16, 6000 << 20, FitConstraints(N_TRAIN, n_rows=64), (146432, "f16", 512)),
        (12, 8000 << 20, FitConstraints(N_TRAIN, n_rows=64), (50176, "f16", 512)),
        (8, 6000 << 20, FitConstraints(N_TRAIN, n_rows=64), (34816, "q8_0", 512)),
    ],
)
def test_fit_by_shape(
    gigabytes: int, weights: int, constraints: FitConstraints, expected: tuple[int, str, int]
) -> None:
    _, plan = shaped(gigabytes << 30, weights)
    found = fit(plan, constraints)
    assert found is not None
    assert not found.plan.missing_bytes
    config = found.config
    assert (config.n_ctx, config.cache_type_k, config.n_ubatch) == expected
    assert str(config.n_ctx) in found.reason
    is_cut = constraints.n_ctx is not None and plan(config, 0).n_ctx < constraints.n_ctx
    assert ("does not fit" in found.reason) == is_cut


@pytest.mark.parametrize(
    ("gibibytes", "n_train", "given", "expected"),
    [
        (80, N_TRAIN, None, 32768),
        (80, 8192, None, 8192),
        (80, 8192, 50000, 50000),
        (18, N_TRAIN, None, 22528),
        (16, N_TRAIN, None, 1024),
        (16, 512, None, 512),
    ],
)
def test_context_by_shape(gibibytes: int, n_train: int, given: int | None, expected: int) -> None:
    _, plan = shaped(gibibytes << 30)
    config = with_context(plan, LoadConfig(n_ctx=given), n_train)
    assert config == LoadConfig(n_ctx=expected)


def test_a_context_that_fit_found_is_the_longest() -> None:
    asked, plan = shaped(24 << 30)
    found = fit(plan, FitConstraints(N_TRAIN, n_rows=64))
    assert found is not None and found.config.n_ctx is not None
    longer = plan(replace(found.config, n_ctx=found.config.n_ctx + 1024), found.n_rows)
    assert not fits(longer) and fits(found.plan)
    assert len(asked) < 40


def test_nothing_fits() -> None:
    _, plan = shaped(8 << 30)
    assert fit(plan, FitConstraints(N_TRAIN)) is None
    assert fit(plan, FitConstraints(N_TRAIN, 4096)) is None


def of_part(free: int, experts: int) -> Callable[[int, int], Planning]:
    """Returns planners of a model with 11 layers of 1000 MiB, `experts` MiB of them experts."""

    def planning(layers: int, without: int) -> Planning:
        with_experts = min(layers - 1, 10 - without)
        return shaped(free, layers * (1000 - experts) + with_experts * experts << 20)[1]

    return planning


@pytest.mark.parametrize(
    ("gibibytes", "experts", "expected"),
    [(8, 0, (6, 0)), (8, 900, (11, 4)), (2, 900, (6, 10)), (1, 900, None)],
)
def test_fit_part_by_shape(gibibytes: int, experts: int, expected: tuple[int, int] | None) -> None:
    constraints = FitConstraints(N_TRAIN, n_rows=64)
    part = fit_part(of_part(gibibytes << 30, experts), constraints, 10, experts > 0)
    assert (part and (part.n_gpu_layers, part.n_cpu_moe)) == expected
    if part is not None:
        assert (part.fit.config.n_ctx, part.fit.config.cache_type_k) == (8192, "f16")
        assert fits(part.fit.plan)


def test_what_is_given_is_kept() -> None:
    constraints = FitConstraints(
        N_TRAIN, cache_types=("q5_0", None), n_ubatch=64, draft_window=100, n_rows=8
    )
    for config, n_rows in candidates(constraints):
        assert (config.cache_type_k, config.n_ubatch, config.draft_window) == ("q5_0", 64, 100)
        assert n_rows <= 8
