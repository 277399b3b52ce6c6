"""Errors of constraints."""

from __future__ import annotations

import re

MAX_MESSAGE = 300
"""Most characters of an error of llguidance in a message."""


class ConstraintError(ValueError):
    """An answer cannot go on: its next mask needs more time or memory than the limits allow."""


def sentence(text: str) -> str:
    """Returns an error of llguidance in one line, without its parser's state and excerpts."""
    text = re.split(r"\n?<(?:backtrace|state|non-verbose)|\n +\d+ \| ", text)[0]
    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
    return " ".join(text.split())[:MAX_MESSAGE]
