"""Saves and loads the state of a training, so that an interruption costs minutes at most."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from .._files import replacing


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a training's state; the old file stays until the new one is complete."""
    with replacing(path) as file:
        torch.save(state, file)


def load_state(path: Path) -> dict[str, Any] | None:
    """Returns the state of an interrupted training, or None if there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def pick(n: int, seed: int, start: int, count: int) -> list[int]:
    """Returns a part of an endless sequence of shuffles of 0..n-1, which the seed determines."""
    found: list[int] = []
    while len(found) < count:
        place = start + len(found)
        order = list(range(n))
        random.Random(f"{seed}/{place // n}").shuffle(order)
        found += order[place % n : place % n + count - len(found)]
    return found
