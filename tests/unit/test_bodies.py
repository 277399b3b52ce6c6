"""Bytes of request bodies in flight."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dflash_gguf.serve import bodies
from dflash_gguf.serve.bodies import Bodies
from dflash_gguf.serve.schemas import TokenizeBody
from dflash_gguf.serve.settings import Settings

LIMIT = 4 << 20
PART = b'"' + b"x" * (1 << 20)


class Client:
    """A client that sends parts of a body when it is told to."""

    def __init__(self, name: str) -> None:
        self.parts: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.request = Request({"type": "http", "asker": name}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        data, has_more = await self.parts.get()
        return {"type": "http.request", "body": data, "more_body": has_more}

    def send(self, data: bytes, *, has_more: bool = True) -> None:
        self.parts.put_nowait((data, has_more))


async def hold(reader: Bodies, client: Client, done: asyncio.Event) -> int:
    async with reader.read(client.request, TokenizeBody) as (_, n_bytes):
        await done.wait()
        return n_bytes


def test_the_client_with_the_most_bytes_loses_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "N_LARGEST", 2)

    async def life() -> None:
        reader, done = Bodies(replace(Settings(), max_body_bytes=LIMIT)), asyncio.Event()
        greedy = [Client("greedy") for _ in range(3)]
        tasks = [asyncio.create_task(hold(reader, client, done)) for client in greedy]
        for client in greedy:
            client.send(PART)
            client.send(PART)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        honest = Client("honest")
        task = asyncio.create_task(hold(reader, honest, done))
        honest.send(b'{"content":' + PART)
        honest.send(b'"}' + b" " * (2 << 20), has_more=False)
        done.set()
        assert await task > 3 << 20
        await asyncio.sleep(0.05)
        refused = [task for task in tasks if task.done()]
        assert refused
        for task in refused:
            with pytest.raises(HTTPException, match="bodies of more than 8388608 bytes") as error:
                await task
            assert error.value.status_code == 503
        assert len(refused) < len(tasks)
        for left in tasks:
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError, HTTPException):
                await left
        assert not reader._received

    asyncio.run(life())


def test_a_whole_body_is_not_dropped_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "N_LARGEST", 2)

    async def life() -> None:
        reader, done = Bodies(replace(Settings(), max_body_bytes=LIMIT)), asyncio.Event()
        clients = [Client(name) for name in ("a", "a", "b")]
        tasks = [asyncio.create_task(hold(reader, client, done)) for client in clients]
        for client in clients:
            client.send(b'{"content":' + PART + b"x" * (1 << 20))
        await asyncio.sleep(0.05)
        clients[0].send(b"x" * (3 << 19) + b'"}', has_more=False)
        clients[2].send(b"x" * (3 << 19))  # exceeds the budget in the same turn of the loop
        await asyncio.sleep(0.05)
        done.set()
        assert await tasks[0] > 3 << 20
        for task in tasks[1:]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HTTPException):
                await task

    asyncio.run(life())


def test_small_bodies_need_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "N_LARGEST", 0)

    async def life() -> None:
        reader, done = Bodies(Settings()), asyncio.Event()
        done.set()
        for size in (0, 1 << 19):
            client = Client("a")
            client.send(b'{"content":"' + b"x" * size + b'"}', has_more=False)
            assert await hold(reader, client, done) > size

    asyncio.run(life())


def test_a_server_that_ends_cancels_a_body() -> None:
    async def life() -> None:
        reader = Bodies(Settings())
        task = asyncio.create_task(hold(reader, Client("a"), asyncio.Event()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not reader._received

    asyncio.run(life())
