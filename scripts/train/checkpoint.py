"""A run's state on disk, replaced as a whole, so that an interruption costs minutes at most."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` beside the file first, then puts it in its place."""
    beside = path.with_name(path.name + ".part")
    torch.save(state, beside)
    os.replace(beside, path)


def load_state(path: Path) -> dict[str, Any] | None:
    """The state of an interrupted run; None where there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def pick(n: int, seed: int, start: int, count: int) -> list[int]:
    """Items `start` to `start + count` of an endless list: 0..n-1 in a new order each time round.

    A function of its arguments alone: a resumed run sees what an uninterrupted one would have.
    """
    found: list[int] = []
    while len(found) < count:
        place = start + len(found)
        order = list(range(n))
        random.Random(f"{seed}/{place // n}").shuffle(order)
        found += order[place % n : place % n + count - len(found)]
    return found
