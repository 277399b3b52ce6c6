"""Saves and loads the state of a training, so that an interruption costs minutes at most."""

from __future__ import annotations

import io
import random
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .._files import replacing


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a training's state; the old file stays until the new one is complete."""
    buffer = io.BytesIO()  # a full disk is an OSError of the file, a RuntimeError of torch
    torch.save(state, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())


def load_state(path: Path) -> dict[str, Any] | None:
    """Returns the state of an interrupted training, or None if there is none.

    Errors: ValueError for a damaged file.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError):
        raise ValueError(f"{path}: is damaged; remove it to begin the updates again") from None
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
