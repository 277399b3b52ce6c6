"""Checks values that a caller gives; ValueError names the field, the value and the limit."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches

SYNONYMS = {
    "ctx_size": "n_ctx",
    "logprobs": "n_probs",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "top_logprobs": "n_probs",
}
"""Names of other programs for settings."""


def flag(name: str, value: object) -> bool:
    """Returns a value that is True or False; ValueError for any other."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, must be True or False")
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Returns a value of any integer type as int; ValueError unless it is `low` to `high`."""
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, must be an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}, must be an integer") from None
    if number < low:
        raise ValueError(f"{name} is {number}, must be at least {low}")
    if number > high:
        raise ValueError(f"{name} is {number}, must be at most {high}")
    return number


def number(name: str, value: object, low: float, high: float) -> float:
    """Returns a value as float; ValueError unless it is finite and `low` to `high`."""
    if isinstance(value, (bool, str, bytes)):
        raise ValueError(f"{name} is {value!r}, must be a number")
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, must be a number") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} is {result}, must be finite")
    if result < low:
        raise ValueError(f"{name} is {result:g}, must be at least {low:g}")
    if result > high:
        raise ValueError(f"{name} is {result:g}, must be at most {high:g}")
    return result


def text(name: str, value: object) -> str:
    """Returns a str or a path as str; ValueError for any other value."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, must be a text")
    return value


def choice(name: str, value: object, known: tuple[str, ...]) -> str:
    """Returns a value that is one of the known names; ValueError for any other."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(known)}")
    return str(value)


def known_names(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises TypeError for the first name that is not known; it names a similar one."""
    for name in given:
        if name not in known:
            synonym = SYNONYMS.get(name)
            near = [synonym] if synonym in known else get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{name} is no {what}{hint}")
