"""ConvertError, the exception of the converter."""

from __future__ import annotations


class ConvertError(Exception):
    """Error that a user can correct: one sentence with the file, the value and the limit."""
