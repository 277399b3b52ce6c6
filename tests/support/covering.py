"""Covering sets: few combinations of factors that contain every pair, or triple, of values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Group = tuple[tuple[str, Any], ...]
"""Values of some factors, in the order of the factors."""
N_TRIES = 40
"""Number of random rows per group, of which the row that covers most missing groups is kept."""


def groups_of(row: Mapping[str, Any], strength: int) -> set[Group]:
    """Returns all groups of `strength` values in a row, with the names of their factors."""
    return set(combinations(row.items(), strength))


def all_groups(
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[Mapping[str, Any]], bool],
    strength: int,
) -> set[Group]:
    """Returns all possible groups. is_possible also gets incomplete combinations."""
    return {
        tuple(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(factors[name] for name in names))
        if is_possible(dict(zip(names, values, strict=True)))
    }


def covering(
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    strength: int = 2,
) -> list[Row]:
    """Returns combinations that contain every possible pair (strength 2) or triple (3) of values.

    Greedy: each row starts with a missing group, then takes, factor by factor in random order, the
    value that adds most missing groups. Equal arguments give equal rows. Raises ValueError if a
    group is possible alone, but in no combination.
    """
    draw = random.Random(0)
    missing = all_groups(factors, is_possible, strength)
    rows = []
    for start in sorted(missing, key=repr):
        if start not in missing:
            continue
        tries = [_completed(start, factors, is_possible, missing, draw) for _ in range(N_TRIES)]
        found = [row for row in tries if row is not None]
        if not found:
            raise ValueError(f"no combination holds {start}")
        row = max(found, key=lambda row: len(groups_of(row, strength) & missing))
        missing -= groups_of(row, strength)
        rows.append(row)
    return rows


def _completed(
    start: Group,
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[Mapping[str, Any]], bool],
    missing: set[Group],
    draw: random.Random,
) -> Row | None:
    """Completes a group to a row; returns None if no value is possible for some factor."""
    chosen = dict(start)
    order = [name for name in factors if name not in chosen]
    draw.shuffle(order)
    places = {name: place for place, name in enumerate(factors)}

    def gain(name: str, value: Any) -> int:
        others = combinations(chosen.items(), len(start) - 1)
        groups = (sorted((*other, (name, value)), key=lambda x: places[x[0]]) for other in others)
        return sum(tuple(group) in missing for group in groups)

    for name in order:
        values = [x for x in factors[name] if is_possible({**chosen, name: x})]
        if not values:
            return None
        draw.shuffle(values)
        gains = {value: gain(name, value) for value in values}
        chosen[name] = max(values, key=gains.__getitem__)
    return {name: chosen[name] for name in factors}
