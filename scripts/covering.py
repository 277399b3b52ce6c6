"""Few combinations of factors that hold every pair of their values: a pairwise covering set."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]
N_TRIES = 40
"""Values tried for a row; the one that covers most new pairs is taken."""


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Every two of a row's values with the names of their factors."""
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def all_pairs(
    factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Mapping[str, Any]], bool]
) -> set[Pair]:
    """Pairs that a combination may hold. is_possible is asked of parts of a combination too."""
    return {
        (a, x, b, y)
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if is_possible({a: x, b: y})
    }


def covering(
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    seed: int = 0,
) -> list[Row]:
    """Combinations that hold every possible pair, fewer than twice as many as there must be.

    Greedy: each begins with a pair that is missing, and takes, factor by factor in a random order,
    the value that adds most missing pairs; the best of some such tries stays. The same arguments
    give the same rows. ValueError if a pair is possible alone, but in no combination.
    """
    draw = random.Random(seed)
    missing = all_pairs(factors, is_possible)
    rows = []
    while missing:
        start = min(missing, key=repr)  # sets have no order
        tries = [_completed(start, factors, is_possible, missing, draw) for _ in range(N_TRIES)]
        found = [row for row in tries if row is not None]
        if not found:
            raise ValueError(f"no combination holds {start}")
        row = max(found, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        rows.append(row)
    return rows


def _completed(
    start: Pair,
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[Mapping[str, Any]], bool],
    missing: set[Pair],
    draw: random.Random,
) -> Row | None:
    """A combination that begins with a pair; None where it runs into what is impossible."""
    chosen = {start[0]: start[1], start[2]: start[3]}
    order = [name for name in factors if name not in chosen]
    draw.shuffle(order)
    places = {name: place for place, name in enumerate(factors)}

    def gain(name: str, value: Any) -> int:
        ordered = (
            (other, at, name, value) if places[other] < places[name] else (name, value, other, at)
            for other, at in chosen.items()
        )
        return sum(pair in missing for pair in ordered)

    for name in order:
        values = [x for x in factors[name] if is_possible({**chosen, name: x})]
        if not values:
            return None
        draw.shuffle(values)
        chosen[name] = max(values, key=lambda value: gain(name, value))
    return {name: chosen[name] for name in factors}
