"""Work that would hold up the event loop, and with it all other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

INLINE = 16 << 10
"""Size of work, in bytes of a request or log-probabilities of an answer, that takes no thread."""
T = TypeVar("T")


async def aside(work: Callable[[], T], size: int) -> T:
    """Runs a function, in a thread if the work is large, so that other requests go on."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
