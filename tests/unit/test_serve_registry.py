"""Loading and unloading of models, with engines that are made up."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from dflash_gguf.serve.engine_client import NotReadyError
from dflash_gguf.serve.models import ModelRegistry, ServedModel
from dflash_gguf.serve.settings import Settings


class Engine:
    """An engine whose model is not sound, or fails after it was checked, or loads."""

    def __init__(self, name: str, kind: str, said: list[str]) -> None:
        self.name, self.kind, self.said = name, kind, said
        self.state = "loading"

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

    async def wait_idle(self) -> None:
        pass

    async def close(self) -> None:
        self.said.append(f"close {self.name}")

    def require_ready(self) -> Any:
        return object()

    def touch(self) -> None:
        pass


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
    kinds = {"a": "good", "b": kind}
    settings, args = Settings(), argparse.Namespace()
    models = [
        ServedModel([name], Path(name), None, args, settings, lambda _: object())  # type: ignore
        for name in kinds
    ]
    for model in models:
        model.prompt_builder = object()  # type: ignore[assignment]
    registry = ModelRegistry(
        models,
        lambda model: Engine(model.name, kinds[model.name], said),  # type: ignore[arg-type, return-value]
    )

    async def life() -> str:
        await registry.take("a")
        said.clear()
        try:
            await registry.take("b")
        except NotReadyError:
            assert models[1].last_used is None
        seen = list(said)
        model, *_ = await registry.take("any")
        assert seen == events
        return model.name

    assert asyncio.run(life()) == ("b" if kind == "good" else "a")
