"""Limits of the core, as dflash.h declares them."""

from __future__ import annotations

from ._ffi import constants

_LIMITS = constants("dfl_limit")

MAX_TOP = _LIMITS["DFL_MAX_TOP"]
"""Best tokens of a row that may be picked."""
MAX_VERIFY = _LIMITS["DFL_MAX_VERIFY"]
"""Rows that a verify may be given room for."""
MAX_THREADS = _LIMITS["DFL_MAX_THREADS"]
"""Threads of an engine."""
MAX_PARALLEL = _LIMITS["DFL_MAX_PARALLEL"]
"""Sequences of an engine."""
PAGE = _LIMITS["DFL_PAGE"]
"""K/V rows that sequences take at a time, and that prefixes share."""
