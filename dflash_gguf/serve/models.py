"""Models that the server offers, and loading and unloading of their engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..convert.schema import DRAFTERS, Key
from ..text.gguf_metadata import GgufMetadata
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, NotReadyError
from .prompts import PromptBuilder
from .schemas import BadRequestError

LAST_USED = "any"
"""Model name in a request that stands for the model used last."""


@dataclass
class ServedModel:
    """A model that the server offers. names: aliases; responses use the first."""

    names: list[str]
    path: Path
    drafter: Path | None
    created: int = field(default_factory=lambda: int(time.time()))
    last_used: float | None = None
    engine: EngineClient | None = None
    prompt_builder: PromptBuilder | None = None

    @property
    def name(self) -> str:
        """Name of the model in responses."""
        return self.names[0]

    @property
    def state(self) -> str:
        """State of the engine process: unloaded, loading, ready or closed."""
        return "unloaded" if self.engine is None else self.engine.state


class ModelRegistry:
    """Finds the model of a request and loads it; unloads another if max_loaded are loaded."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        new_engine: Callable[[ServedModel], EngineClient],
        builder_of: Callable[[Tokenizer | None], PromptBuilder],
        max_loaded: int = 1,
    ) -> None:
        self.all = list(models)
        self._new_engine = new_engine
        self._builder_of = builder_of
        self._max_loaded = max_loaded
        self._turn = asyncio.Lock()

    @property
    def engines(self) -> Iterable[EngineClient]:
        """Engine clients of all models that are loaded or being loaded."""
        return [model.engine for model in self.all if model.engine is not None]

    @property
    def is_one(self) -> bool:
        """True if the server offers a single model; requests may then name any model."""
        return len(self.all) == 1

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of a name; None: the last used. Raises BadRequestError (404)."""
        if self.is_one:
            return self.all[0]
        if not name or name == LAST_USED:
            return max(self.all, key=lambda model: model.last_used or 0.0)
        for model in self.all:
            if name in model.names:
                return model
        raise BadRequestError(
            f"model {name!r} is not served: /v1/models lists all",
            status=404,
            kind="not_found_error",
        )

    async def take(self, name: str | None) -> tuple[ServedModel, EngineClient, PromptBuilder]:
        """Returns a loaded model, its engine and its prompt builder.

        With several models, waits while the model is loaded. Raises BadRequestError for an unknown
        name, NotReadyError if loading fails or the single model is still being loaded.
        """
        model = self.find(name)
        model.last_used = time.time()
        if not self.is_one:
            async with self._turn:
                await self._load(model)
        if model.engine is None or model.prompt_builder is None:
            raise NotReadyError("the model is being loaded")
        model.engine.require_ready()
        return model, model.engine, model.prompt_builder

    async def _load(self, model: ServedModel) -> None:
        if model.engine is None:
            while len(list(self.engines)) >= self._max_loaded:
                await self._unload_one()
            await self.open(model)
        assert model.engine is not None
        try:
            await model.engine.wait()
        except NotReadyError:
            engine, model.engine = model.engine, None
            await engine.close()
            raise

    async def _unload_one(self) -> None:
        """Unloads the least recently used model after its last request has ended."""
        loaded = [model for model in self.all if model.engine is not None]
        model = min(loaded, key=lambda one: one.last_used or 0.0)
        engine = model.engine
        assert engine is not None
        while engine.n_requests:
            await asyncio.sleep(0.05)
        model.engine = None
        await engine.close()

    async def open(self, model: ServedModel) -> None:
        """Starts the engine process of a model; reads the tokenizer if that was not done before."""
        if model.prompt_builder is None:
            tokenizer = await asyncio.to_thread(Tokenizer.from_file, model.path)
            model.prompt_builder = self._builder_of(tokenizer)
        model.engine = self._new_engine(model)
        model.engine.start()

    def end_requests(self, sentence: str) -> None:
        """Ends the requests in flight with status 503 and a sentence."""
        for engine in self.engines:
            engine.end_requests(sentence)

    def kill(self) -> None:
        """Kills all engine processes."""
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        """Ends all engine processes."""
        for engine in self.engines:
            await engine.close()


def models_in_folder(folder: str | os.PathLike[str]) -> list[ServedModel]:
    """Returns the models in a folder: GGUF files, and subfolders with a model and a drafter.

    Raises ValueError if there is no model, or if a subfolder holds several models or drafters.
    """
    models = []
    root = Path(folder)
    for path in sorted(root.iterdir()):
        if path.suffix == ".gguf" and not _is_drafter(path):
            models.append(ServedModel([path.stem], path, None))
        elif path.is_dir() and (files := sorted(path.glob("*.gguf"))):
            drafters = [file for file in files if _is_drafter(file)]
            targets = [file for file in files if file not in drafters and not _is_later_part(file)]
            if len(targets) != 1 or len(drafters) > 1:
                raise ValueError(
                    f"--models: {path} holds {len(targets)} models and {len(drafters)} drafters, "
                    "must hold one model, and one drafter at most"
                )
            models.append(ServedModel([path.name], targets[0], drafters[0] if drafters else None))
    models = [model for model in models if not _is_later_part(model.path)]
    if not models:
        raise ValueError(f"--models {root}: holds no GGUF file of a model")
    return models


def _is_drafter(path: Path) -> bool:
    with GgufMetadata(path) as file:
        return file.text(Key.GENERAL_ARCHITECTURE) in DRAFTERS


def _is_later_part(path: Path) -> bool:
    """True for the second and later files of a model that is split into several files."""
    part = path.stem.rpartition("-of-")[0].rpartition("-")[2]
    return part.isdigit() and int(part) > 1
