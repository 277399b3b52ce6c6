"""The one exception of the converter."""

from __future__ import annotations


class ConvertError(Exception):
    """What a user can cause and mend: one sentence naming the thing, the value and the limit."""
