"""--fit: context, K/V types, micro-batch and draft that a device has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .config import TREE_BUDGET, LoadConfig
from .plan import Plan, gib

USEFUL_CONTEXT = 32768
"""Without a wish for a context, K/V are quantised further only to reach so many tokens."""
USABLE = 0.98
"""Of what is free: other programs breathe, and allocators round up."""
STEP = 1024
"""Contexts are chosen by so many tokens."""

PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
"""K/V types by what they lose, least first."""

Planning = Callable[[LoadConfig, int], Plan]
"""The plan of settings and rows of a verify."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user decided; None is left to choose.

    n_ctx: tokens. cache_types: K and V. n_ubatch, draft_window: as in LoadConfig. n_rows: of a
    verify. n_ctx_train: the most the model was trained for.
    """

    n_ctx_train: int
    n_ctx: int | None = None
    cache_types: tuple[str | None, str | None] = (None, None)
    n_ubatch: int | None = None
    draft_window: int | None = None
    n_rows: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """The settings chosen, their plan, and a line that says why."""

    config: LoadConfig
    n_rows: int
    plan: Plan
    reason: str


def _small_parts(wish: Wish) -> Iterator[tuple[int, int, int]]:
    """Micro-batch, drafter's window and rows of a verify, largest first."""
    for n_ubatch, window, n_rows in (
        (512, 4096, 256),
        (256, 2048, TREE_BUDGET + 1),
        (128, 1024, 1),
    ):
        yield wish.n_ubatch or n_ubatch, wish.draft_window or window, min(wish.n_rows, n_rows)


def _pairs(wish: Wish) -> list[tuple[str, str]]:
    key, value = wish.cache_types
    pairs = [(key or k, value or v) for k, v in PAIRS]
    return list(dict.fromkeys(pairs))


def candidates(wish: Wish) -> Iterator[tuple[LoadConfig, int]]:
    """Settings but for the context, the best first: large parts shrink before K/V lose much."""
    pairs, parts = _pairs(wish), list(dict.fromkeys(_small_parts(wish)))
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
    """Whether a plan fits with room to spare."""
    return plan.needed_bytes <= USABLE * plan.free_bytes


def longest_context(planning: Planning, config: LoadConfig, n_rows: int, most: int) -> int:
    """The longest context up to `most` that fits, a multiple of STEP or `most`; 0 if none does."""

    def holds(n_ctx: int) -> bool:
        return fits(planning(replace(config, n_ctx=n_ctx), n_rows))

    if holds(most):
        return most
    low, high = 0, (most - 1) // STEP + 1  # in steps: low holds or is 0, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * STEP) else (low, middle)
    return low * STEP


def fit(planning: Planning, wish: Wish) -> Fit | None:
    """The best settings that fit, or None if not even a short context does.

    A wished context is kept as long as K/V types allow it, then shortened.
    """
    most = wish.n_ctx or wish.n_ctx_train
    enough = wish.n_ctx or min(most, USEFUL_CONTEXT)
    best: tuple[int, LoadConfig, int] = (0, LoadConfig(), 0)
    for config, n_rows in candidates(wish):
        if wish.n_ctx and not fits(planning(replace(config, n_ctx=most), n_rows)):
            continue
        n_ctx = most if wish.n_ctx else longest_context(planning, config, n_rows, most)
        if n_ctx > best[0]:
            best = (n_ctx, config, n_rows)
        if n_ctx >= enough:
            break
    if not best[0] and wish.n_ctx:
        config, n_rows = list(candidates(wish))[-1]
        best = (longest_context(planning, config, n_rows, most), config, n_rows)
    if not best[0]:
        return None
    config = replace(best[1], n_ctx=best[0])
    plan = planning(config, best[2])
    return Fit(config, best[2], plan, _reason(planning, wish, plan))


def _reason(planning: Planning, wish: Wish, plan: Plan) -> str:
    used = f"{gib(plan.needed_bytes)} of {gib(plan.free_bytes)}"
    chosen = (
        f"context {plan.n_ctx}, K/V {plan.cache_type_k}/{plan.cache_type_v}, "
        f"micro-batch {plan.n_ubatch}"
    )
    if plan.verify_rows:
        chosen += f", window {plan.draft_window}, {plan.verify_rows} rows a verify"
    first, n_rows = next(candidates(wish))
    ideal = planning(replace(first, n_ctx=wish.n_ctx or wish.n_ctx_train), n_rows)
    if fits(ideal):
        return f"{chosen}: {used}, nothing had to give"
    return (
        f"{chosen}: {used}; {ideal.n_ctx} tokens with {ideal.cache_type_k}/{ideal.cache_type_v} "
        f"would need {gib(ideal.needed_bytes)}"
    )
