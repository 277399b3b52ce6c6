"""Settings that fit a device: the context if none was given; with --fit also K/V types and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..config import DEFAULT_N_CTX, TREE_BUDGET, LoadConfig
from ..native import DEFAULTS, MAX_VERIFY
from .plan import Plan, gib

USEFUL_CONTEXT = 32768
"""Context in tokens that --fit tries to reach by reducing other settings, if no -c is given."""
USABLE = 0.98
"""Usable share of free memory: other programs' use varies, and allocators round up."""
PART_CONTEXT = 8192
"""Context in tokens of a model that is split between GPU and CPU, if n_ctx is not given."""
STEP = 1024
"""Step in tokens between the context lengths that are tried."""

PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
"""Types of K and V in order of precision, highest first."""

Planning = Callable[[LoadConfig, int], Plan]
"""A function that returns the memory plan for settings and for the rows of a verify."""


@dataclass(frozen=True, slots=True)
class FitConstraints:
    """Settings that the user fixed; None leaves the setting to --fit.

    n_ctx: context in tokens. cache_types: of K and of V. n_ubatch, draft_window: as in LoadConfig.
    n_rows: maximum rows of a verify. n_ctx_train: context length that the model was trained for.
    """

    n_ctx_train: int
    n_ctx: int | None = None
    cache_types: tuple[str | None, str | None] = (None, None)
    n_ubatch: int | None = None
    draft_window: int | None = None
    n_rows: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """The chosen settings, their memory plan, and a line with the reason.

    uses_drafter: False if the model is predicted to be faster without the given drafter.
    """

    config: LoadConfig
    n_rows: int
    plan: Plan
    reason: str
    uses_drafter: bool = True


@dataclass(frozen=True, slots=True)
class SplitFit:
    """A split that fits: layers on the GPU (the output head is one), expert layers on the CPU."""

    n_gpu_layers: int
    n_cpu_moe: int
    fit: Fit


def _small_parts(constraints: FitConstraints) -> Iterator[tuple[int, int, int]]:
    for n_ubatch, window, n_rows in (
        (DEFAULTS["n_ubatch"], DEFAULTS["draft_window"], MAX_VERIFY),
        (256, 2048, TREE_BUDGET + 1),
        (128, 1024, 1),
    ):
        yield (
            constraints.n_ubatch or n_ubatch,
            constraints.draft_window or window,
            min(constraints.n_rows, n_rows),
        )


def _pairs(constraints: FitConstraints) -> list[tuple[str, str]]:
    key, value = constraints.cache_types
    pairs = [(key or k, value or v) for k, v in PAIRS]
    return list(dict.fromkeys(pairs))


def candidates(constraints: FitConstraints) -> Iterator[tuple[LoadConfig, int]]:
    """Yields configs (no n_ctx) and verify rows, best first: 4-bit K/V are tried last."""
    pairs, parts = _pairs(constraints), list(dict.fromkeys(_small_parts(constraints)))
    gentle, rough = pairs[:2], pairs[2:]
    for some in (gentle, rough):
        for part in parts:
            for key, value in some:
                n_ubatch, window, n_rows = part
                yield (
                    LoadConfig(
                        cache_type_k=key,
                        cache_type_v=value,
                        n_ubatch=n_ubatch,
                        draft_window=window,
                    ),
                    n_rows,
                )


def fits(plan: Plan) -> bool:
    """True if a plan needs at most USABLE of the free memory on the host and on the device."""
    return all(needed <= USABLE * free for _, needed, free in plan.places)


def longest_context(planning: Planning, config: LoadConfig, n_rows: int, max_ctx: int) -> int:
    """Returns the longest context that fits, a multiple of STEP or `max_ctx`; 0 if none fits."""

    def holds(n_ctx: int) -> bool:
        return fits(planning(replace(config, n_ctx=n_ctx), n_rows))

    return (
        max_ctx
        if holds(max_ctx)
        else _largest(lambda n: holds(n * STEP), (max_ctx - 1) // STEP) * STEP
    )


def with_context(planning: Planning, config: LoadConfig, n_ctx_train: int) -> LoadConfig:
    """Returns the settings with n_ctx set; a given n_ctx is kept.

    Otherwise n_ctx is the longest that fits, at most n_ctx_train and DEFAULT_N_CTX, without room
    for large verifies. If none fits, n_ctx is small, so that its plan shows the missing bytes.
    """
    if config.n_ctx is not None:
        return config
    max_ctx = min(n_ctx_train, DEFAULT_N_CTX)
    n_ctx = longest_context(planning, config, 0, max_ctx)
    return replace(config, n_ctx=n_ctx or min(max_ctx, STEP))


def max_verify_rows(planning: Planning, config: LoadConfig, max_rows: int) -> int:
    """Returns the maximum rows of a verify that fit, up to `max_rows`; 0 if none fits."""

    def holds(n_rows: int) -> bool:
        return fits(planning(config, n_rows))

    return max_rows if holds(max_rows) else _largest(holds, max_rows - 1)


def _largest(holds: Callable[[int], bool], upper: int) -> int:
    """Returns the largest number up to `upper` for which `holds` is True, else 0 (bisection)."""
    low, high = 0, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def fit(planning: Planning, constraints: FitConstraints) -> Fit | None:
    """Returns the best settings that fit, shortening the context last; None if none fit."""
    max_ctx = constraints.n_ctx or constraints.n_ctx_train
    *_, (smallest, n_smallest) = candidates(constraints)
    if not fits(planning(replace(smallest, n_ctx=min(max_ctx, STEP)), n_smallest)):
        return None
    enough = constraints.n_ctx or min(max_ctx, USEFUL_CONTEXT)
    best: tuple[int, LoadConfig, int] = (0, LoadConfig(), 0)
    for config, n_rows in candidates(constraints):
        if constraints.n_ctx and not fits(planning(replace(config, n_ctx=max_ctx), n_rows)):
            continue
        n_ctx = max_ctx if constraints.n_ctx else longest_context(planning, config, n_rows, max_ctx)
        if n_ctx > best[0]:
            best = (n_ctx, config, n_rows)
        if n_ctx >= enough:
            break
    if not best[0] and constraints.n_ctx:
        config, n_rows = list(candidates(constraints))[-1]
        best = (longest_context(planning, config, n_rows, max_ctx), config, n_rows)
    if not best[0]:
        return None
    config = replace(best[1], n_ctx=best[0])
    plan = planning(config, best[2])
    return Fit(config, best[2], plan, _reason(planning, constraints, plan))


def fit_part(
    planning_of: Callable[[int, int], Planning],
    constraints: FitConstraints,
    n_layer: int,
    has_experts: bool,
) -> SplitFit | None:
    """Returns the largest part of a model that fits on the GPU with the best settings, or None.

    Experts go to the CPU before layers do, as a token uses few experts. planning_of: returns the
    plan function for a number of layers on the GPU and a number of layers without experts.
    """
    config, n_rows = next(candidates(constraints))
    config = replace(config, n_ctx=constraints.n_ctx or min(constraints.n_ctx_train, PART_CONTEXT))

    def holds(layers: int, without_experts: int) -> bool:
        return fits(planning_of(layers, without_experts)(config, n_rows))

    layers, without = n_layer + 1, n_layer if has_experts else 0
    if has_experts and holds(layers, n_layer):
        without -= _largest(lambda n: holds(layers, n_layer - n), n_layer)
        place = f"all layers, of which the first {without} without their experts"
    else:
        layers = _largest(lambda n: holds(n, without), n_layer)
        place = f"{layers} of {n_layer + 1} layers{' without experts' if has_experts else ''}"
    if not layers:
        return None
    plan = planning_of(layers, without)(config, n_rows)
    reason = f"{place}, {_chosen(plan)}: {_used(plan)}, the rest stays on the CPU"
    return SplitFit(layers, without, Fit(config, n_rows, plan, reason))


def _used(plan: Plan) -> str:
    return f"{gib(plan.needed_bytes)} of {gib(plan.free_bytes)}"


def _chosen(plan: Plan) -> str:
    chosen = (
        f"context {plan.n_ctx}, K/V {plan.cache_type_k}/{plan.cache_type_v}, "
        f"micro-batch {plan.n_ubatch}"
    )
    if plan.verify_rows:
        chosen += f", window {plan.draft_window}, {plan.verify_rows} rows a verify"
    return chosen


def _reason(planning: Planning, constraints: FitConstraints, plan: Plan) -> str:
    chosen, used = _chosen(plan), _used(plan)
    first, n_rows = next(candidates(constraints))
    ideal = planning(replace(first, n_ctx=constraints.n_ctx or constraints.n_ctx_train), n_rows)
    if fits(ideal):
        return f"{chosen}: {used}, no setting was reduced"
    if constraints.n_ctx and plan.n_ctx < constraints.n_ctx:
        chosen = f"the given context of {constraints.n_ctx} does not fit, {chosen}"
    return (
        f"{chosen}: {used}; {ideal.n_ctx} tokens with {ideal.cache_type_k}/{ideal.cache_type_v} "
        f"would need {gib(ideal.needed_bytes)}"
    )
