"""Bodies of requests: read within a time and a budget of bytes, then decoded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from .schemas import read
from .settings import Settings
from .threads import aside

SMALL = 1 << 20
"""Bytes of a body that need no budget: the number of connections bounds their sum."""
N_LARGEST = 4
"""Budget of all larger bodies together, in bodies of the largest size."""
B = TypeVar("B", bound=msgspec.Struct)


class _Received:
    """A body in memory. task: receives it, None once it is complete."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.parts: list[bytes] = []
        self.n_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.is_refused = False

    @property
    def n_counted(self) -> int:
        return self.n_bytes if self.n_bytes > SMALL else 0


class Bodies:
    """Reads request bodies within a budget of bytes in memory.

    Beyond it, the client whose bodies have the most bytes gets 503 for its largest unfinished one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._received: list[_Received] = []

    @contextlib.asynccontextmanager
    async def read(self, request: Request, kind: type[B]) -> AsyncIterator[tuple[B, int]]:
        """Yields the decoded body of a request and its bytes, which count until the block ends.

        HTTPException: 408 too slow, 413 too large, 503 too many bytes in flight.
        """
        body = _Received(request.scope["asker"])
        self._received.append(body)
        try:
            await self._receive(request, body)
            decoded, request.scope["ignored"] = await self._decoded(body, kind)
            yield decoded, body.n_bytes
        finally:
            self._drop(body)

    async def _decoded(self, body: _Received, kind: type[B]) -> tuple[B, list[str]]:
        data = b"".join(body.parts)
        body.parts = []
        return await aside(lambda: read(data, kind), body.n_bytes)

    async def _receive(self, request: Request, body: _Received) -> None:
        limit, seconds = self._settings.max_body_bytes, self._settings.timeout_s

        async def receive() -> None:
            async for part in request.stream():
                body.n_bytes += len(part)
                if body.n_bytes > limit:
                    raise HTTPException(413, f"the request body exceeds the limit of {limit} bytes")
                body.parts.append(part)
                self._make_room()

        body.task = asyncio.ensure_future(receive())
        try:
            await asyncio.wait_for(body.task, seconds)
        except asyncio.TimeoutError:
            raise HTTPException(
                408, f"the request body did not arrive within {seconds:g} s"
            ) from None
        except asyncio.CancelledError:
            if not body.is_refused:
                raise
            raise HTTPException(
                503,
                f"bodies of more than {N_LARGEST * limit} bytes are in flight: send the request "
                "again, or a smaller one",
                {"Retry-After": "10"},
            ) from None
        finally:
            body.task = None

    def _make_room(self) -> None:
        budget = N_LARGEST * self._settings.max_body_bytes
        while sum(body.n_counted for body in self._received) > budget:
            n_of_client: Counter[str] = Counter()
            for body in self._received:
                n_of_client[body.client] += body.n_counted
            victim = max(
                (body for body in self._received if body.task and not body.task.done()),
                key=lambda body: (n_of_client[body.client], body.n_counted),
            )
            victim.is_refused = True
            if victim.task is not None:
                victim.task.cancel()
            self._drop(victim)

    def _drop(self, body: _Received) -> None:
        body.parts = []
        if body in self._received:
            self._received.remove(body)
