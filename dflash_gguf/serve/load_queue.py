"""Requests that wait until their model is loaded, and the loads, one at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect

from .engine_client import BusyError, has_room

RETRY_S = 10
"""Seconds for the Retry-After header of a request that finds too many waiting for its model."""


Model = TypeVar("Model", bound=Hashable)


class LoadQueue(Generic[Model]):
    """Loads models in the order in which requests first asked for them."""

    def __init__(self, load: Callable[[Model], Awaitable[None]], max_waiting: int) -> None:
        """load: raises NotReadyError. max_waiting: requests that may wait for one model."""
        self._load = load
        self._max_waiting = max(max_waiting, 1)
        self._waiting: dict[Model, dict[asyncio.Future[None], str]] = {}
        self._loads: asyncio.Task[None] | None = None

    def is_wanted(self, model: Model) -> bool:
        """True while a request waits for a model."""
        return model in self._waiting

    async def wait(self, model: Model, client: str, gone: Callable[[], Awaitable[None]]) -> None:
        """Waits until the model is loaded.

        client: who sent the request. gone: a coroutine function that returns when the client closes
        its connection. Raises NotReadyError if the load fails, BusyError if too many requests wait
        for the model, ClientDisconnect if the client closes its connection first.
        """
        waiting = self._waiting.setdefault(model, {})
        if not has_room(len(waiting), self._max_waiting, Counter(waiting.values()), client):
            raise BusyError(len(waiting), RETRY_S)
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting[loaded] = client
        if self._loads is None or self._loads.done():
            self._loads = asyncio.create_task(self._load_all())
        left = asyncio.ensure_future(gone())
        try:
            await asyncio.wait((loaded, left), return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                raise ClientDisconnect
            loaded.result()
        finally:
            left.cancel()
            loaded.cancel()
            waiting.pop(loaded, None)
            if not waiting and self._waiting.get(model) is waiting:
                del self._waiting[model]

    async def _load_all(self) -> None:
        while self._waiting:
            model = next(iter(self._waiting))
            error: Exception | None = None
            try:
                await self._load(model)
            except Exception as failed:
                error = failed
            requests = self._waiting.pop(model, {})
            for loaded in requests:
                if error is None:
                    loaded.set_result(None)
                else:
                    loaded.set_exception(error)
            while requests:  # they must go on before another model may displace theirs
                await asyncio.sleep(0)
