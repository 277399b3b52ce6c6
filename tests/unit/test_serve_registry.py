"""Loading and unloading of models, with engines that are made up."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from dflash_gguf.serve.engine_client import BusyError, NotReadyError
from dflash_gguf.serve.models import ModelRegistry, ServedModel
from dflash_gguf.serve.settings import Settings


class Engine:
    """An engine whose model is not sound, or fails after it was checked, or loads."""

    def __init__(self, name: str, kind: str, said: list[str]) -> None:
        self.name, self.kind, self.said = name, kind, said
        self.state = "loading"
        self.is_busy, self.ready = False, None

    def start(self, prepare: Any, *, waits: bool) -> None:  # noqa: ARG002
        self.said.append(f"start {self.name}")

    async def wait_checked(self) -> None:
        if self.kind == "unsound":
            raise NotReadyError("unsound")

    def proceed(self) -> None:
        self.said.append(f"proceed {self.name}")

    async def wait(self) -> None:
        if self.kind != "good":
            raise NotReadyError(self.kind)
        self.state = "ready"

    async def wait_idle(self, is_over: Callable[[], bool]) -> None:
        while self.is_busy and not is_over():
            await asyncio.sleep(0)

    def tell_soon(self) -> None:
        pass

    async def close(self) -> None:
        self.said.append(f"close {self.name}")

    def require_ready(self) -> Any:
        return object()

    def touch(self) -> None:
        pass


def registry_of(kinds: dict[str, str], said: list[str], **limits: int) -> ModelRegistry:
    settings, args = Settings(), argparse.Namespace()
    models = [
        ServedModel([name], Path(name), None, args, settings, lambda _: object())  # type: ignore
        for name in kinds
    ]
    for model in models:
        model.prompt_builder = object()  # type: ignore[assignment]
    return ModelRegistry(
        models,
        lambda model: Engine(model.name, kinds[model.name], said),  # type: ignore[arg-type, return-value]
        **limits,
    )


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("good", ["start b", "close a", "proceed b"]),
        ("unsound", ["start b", "close b"]),
        ("fails", ["start b", "close a", "proceed b", "close b", "start a"]),
    ],
)
def test_a_failed_load_does_not_lose_the_good_model(kind: str, events: list[str]) -> None:
    said: list[str] = []
    registry = registry_of({"a": "good", "b": kind}, said)

    async def life() -> str:
        await registry.take("a")
        said.clear()
        try:
            await registry.take("b")
        except NotReadyError:
            assert registry.all[1].last_used is None
        seen = list(said)
        model, *_ = await registry.take("any")
        assert seen == events
        return model.name

    assert asyncio.run(life()) == ("b" if kind == "good" else "a")


GOOD = {"a": "good", "b": "good", "c": "good"}


async def turns(n: int = 20) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_models_are_loaded_in_the_order_of_the_first_requests() -> None:
    said: list[str] = []

    async def life() -> list[str]:
        registry = registry_of(GOOD, said)
        await registry.take("a")
        busy = registry.all[0].engine
        busy.is_busy = True  # type: ignore[union-attr]
        names = ("c", "b", "c", "b")
        waiting = [asyncio.create_task(registry.take(name)) for name in names]
        await turns()
        assert not any(task.done() for task in waiting)
        assert registry.find("a").is_leaving
        busy.is_busy = False  # type: ignore[union-attr]
        taken = await asyncio.gather(*waiting)
        return [model.name for model, *_ in taken]

    assert asyncio.run(life()) == ["c", "b", "c", "b"]
    starts = [event for event in said if event.startswith("proceed")]
    assert starts == ["proceed c", "proceed b"]


def test_a_model_whose_requests_have_left_displaces_no_other() -> None:
    said: list[str] = []

    async def life() -> None:
        registry = registry_of(GOOD, said)
        await registry.take("a")
        busy = registry.all[0].engine
        busy.is_busy = True  # type: ignore[union-attr]
        leaves = asyncio.Event()

        async def gone() -> None:
            await leaves.wait()

        waiting = [asyncio.create_task(registry.take(name, gone=gone)) for name in "bc"]
        await turns()
        leaves.set()
        for task in waiting:
            with pytest.raises(ClientDisconnect):
                await task
        await turns()
        model, engine, _ = await registry.take("a", generates=True)
        assert engine is busy
        assert not model.is_leaving

    asyncio.run(life())
    assert said == ["start a", "start b", "close b"]


def test_requests_that_wait_for_a_load_are_bounded_by_client() -> None:
    async def life() -> None:
        registry = registry_of(GOOD, [], max_waiting=4)
        await registry.take("a")
        busy = registry.all[0].engine
        busy.is_busy = True  # type: ignore[union-attr]
        waiting = [asyncio.create_task(registry.take("b", client="x")) for _ in range(4)]
        await turns()
        with pytest.raises(BusyError, match="4 answers wait"):
            await registry.take("b", client="x")
        other = asyncio.create_task(registry.take("b", client="y"))
        await turns()
        busy.is_busy = False  # type: ignore[union-attr]
        await asyncio.gather(*waiting, other)

    asyncio.run(life())


def test_an_unexpected_error_of_a_load_reaches_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def life() -> None:
        registry = registry_of(GOOD, [])

        def broken(*_: Any, **__: Any) -> Awaitable[None]:
            raise OSError("no memory")

        monkeypatch.setattr(registry, "open", broken)
        with pytest.raises(OSError, match="no memory"):
            await registry.take("b")

    asyncio.run(life())


def test_large_requests_of_one_client_leave_threads_to_others() -> None:
    (model,) = registry_of({"a": "sound"}, []).all
    gate = threading.Event()

    async def run() -> str:
        large = [asyncio.create_task(model.in_thread(gate.wait, "one")) for _ in range(6)]
        try:
            return await asyncio.wait_for(model.in_thread(lambda: "done", "other"), 10)
        finally:
            gate.set()
            assert await asyncio.gather(*large) == [True] * 6

    assert asyncio.run(run()) == "done"
