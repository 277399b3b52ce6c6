"""Limits of the core, from dflash.h."""

from __future__ import annotations

from ._ffi import constants

_LIMITS = constants("dfl_limit")

MAX_TOP = _LIMITS["DFL_MAX_TOP"]
"""Largest k of a top-k selection on a device."""
MAX_VERIFY = _LIMITS["DFL_MAX_VERIFY"]
"""Largest number of rows of a verify."""
MAX_THREADS = _LIMITS["DFL_MAX_THREADS"]
"""Largest number of threads of an engine."""
MAX_PARALLEL = _LIMITS["DFL_MAX_PARALLEL"]
"""Largest number of open sequences of an engine."""
PAGE = _LIMITS["DFL_PAGE"]
"""Cells of a K/V page: sequences claim pages, and prefixes share them."""
