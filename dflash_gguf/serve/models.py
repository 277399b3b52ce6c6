"""Models that the server offers, and loading and unloading of their engines."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, NotReadyError
from .folder import LAST_USED, check
from .load_queue import LoadQueue
from .messages import Ready
from .prompts import PromptBuilder
from .schemas import BadRequestError
from .settings import Settings

N_THREADS = 4
"""Threads of each model that prepare chats. One at a time renders; the others tokenize."""
MAX_THREADS_OF_CLIENT = 2
"""Most of these threads that work for one client, whose large requests would hold up the others."""
T = TypeVar("T")


async def never() -> None:
    """Waits for ever, as a client does not leave whose connection is unknown."""
    await asyncio.Event().wait()


@dataclass(eq=False)
class ServedModel:
    """A model that the server offers.

    names: aliases; responses use the first. args: the model's flags, from which follow settings
    and prompts_of (makes the prompt builder). preset: the flags that --models-preset gives it.
    last_ready: the description that the model's last engine process sent. is_asleep: True after
    --sleep-idle-seconds, until the model is loaded again. is_leaving: True while the model's last
    answers are awaited, so that it can be unloaded.
    """

    names: list[str]
    path: Path
    drafters: tuple[Path, ...]
    args: argparse.Namespace
    settings: Settings
    prompts_of: Callable[[Tokenizer | None], PromptBuilder]
    preset: tuple[str, ...] = ()
    loads_on_startup: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    last_used: float | None = None
    engine: EngineClient | None = None
    prompt_builder: PromptBuilder | None = None
    n_bytes: int = 0
    last_ready: Ready | None = None
    is_asleep: bool = False
    is_leaving: bool = False
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(N_THREADS))
    _turns: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    async def in_thread(self, work: Callable[[], T], client: str) -> T:
        """Runs a function that may wait for the chat template, in a thread of this model.

        A template takes up to MAX_RENDER_S; requests to other models do not wait for it.
        """
        turns = self._turns.setdefault(client, asyncio.Semaphore(MAX_THREADS_OF_CLIENT))
        async with turns:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def name(self) -> str:
        """Name of the model in responses."""
        return self.names[0]

    @property
    def state(self) -> str:
        """State of the engine process: unloaded, loading, ready or closed."""
        return "unloaded" if self.engine is None else self.engine.state

    @property
    def flags(self) -> list[str]:
        """Names of the model's files and the flags of its preset, as on a command line."""
        drafters = [word for file in self.drafters for word in ("--model-draft", file.name)]
        words = [part for word in self.preset for part in word.split("=", 1)]
        return ["--model", self.path.name, *drafters, *words]


class ModelRegistry:
    """Finds the model of a request and loads it; unloads another if max_loaded are loaded."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        new_engine: Callable[[ServedModel], EngineClient],
        max_loaded: int = 1,
        max_waiting: int = 128,
    ) -> None:
        """max_loaded: most models that are loaded at once, 0 for no limit.

        max_waiting: requests that may wait for a model that is not loaded.
        """
        self.all = list(models)
        self._new_engine = new_engine
        self._max_loaded = max_loaded or len(self.all)
        self._queue = LoadQueue(self._load, max_waiting)
        self._turn = asyncio.Lock()  # of loads and of models that fall asleep

    @property
    def engines(self) -> Iterable[EngineClient]:
        """Engine clients of all models that are loaded or being loaded."""
        return [model.engine for model in self.all if model.engine is not None]

    @property
    def is_one(self) -> bool:
        """True if the server offers a single model; requests may then name any model."""
        return len(self.all) == 1

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of a name. Raises BadRequestError (404) for an unknown one.

        None and "any": the loaded model used last; if none is loaded, one whose file is sound.
        """
        if self.is_one:
            return self.all[0]
        if not name or name == LAST_USED:
            return self._resident() or self._sound()
        for model in self.all:
            if name in model.names:
                return model
        raise BadRequestError(
            f"model {name!r} is not served: /v1/models lists all",
            status=404,
            kind="not_found_error",
        )

    def _resident(self) -> ServedModel | None:
        loaded = [model for model in self.all if model.engine is not None]
        return max(
            loaded, key=lambda one: (one.state == "ready", one.last_used or 0.0), default=None
        )

    def _sound(self) -> ServedModel:
        """Returns the sound model that was used last, else the first sound one."""
        recent = sorted(self.all, key=lambda model: -(model.last_used or 0.0))
        for model in recent:
            try:
                check(model.path)
            except ValueError:
                continue
            return model
        return recent[0]

    async def take(
        self,
        name: str | None,
        *,
        generates: bool = False,
        client: str = "",
        gone: Callable[[], Awaitable[None]] = never,
    ) -> tuple[ServedModel, EngineClient, PromptBuilder]:
        """Returns a loaded model, its engine and its prompt builder.

        With several models, waits while the model is loaded. generates: True for a new answer,
        which waits behind another model that takes this one's place. client: who asks. gone:
        returns when the client closes its connection. Raises BadRequestError for an unknown name,
        NotReadyError if loading fails or the single model is still being loaded, and the errors of
        `LoadQueue.wait`.
        """
        model = self.find(name)
        while model.state != "ready" or (generates and model.is_leaving):
            if self.is_one and not model.is_asleep:
                seconds = model.engine.loading_s if model.engine else 1
                raise NotReadyError("the model is being loaded", seconds)
            try:
                await self._queue.wait(model, client, gone)
            finally:
                for engine in self.engines:
                    engine.tell_soon()
        assert model.engine is not None
        assert model.prompt_builder is not None
        model.last_used, model.is_asleep = time.time(), False
        model.engine.touch()
        return model, model.engine, model.prompt_builder

    def look(self, name: str | None) -> tuple[ServedModel, Ready, PromptBuilder]:
        """Returns a model, its description and its prompt builder; not counted as a use.

        Loads nothing. Raises BadRequestError, or NotReadyError for a model that was never loaded.
        """
        model = self.find(name)
        ready = model.engine.ready if model.engine else model.last_ready
        if ready is None or model.prompt_builder is None:
            raise NotReadyError(
                "the model is being loaded"
                if self.is_one or model.engine
                else f"{model.name} is not loaded yet: a request to it loads it"
            )
        return model, ready, model.prompt_builder

    async def _load(self, model: ServedModel) -> None:
        """Loads a model; unloads others only once the model's files and memory plan are sound.

        If the load fails nevertheless, the unloaded models are loaded again in the background.
        """
        async with self._turn:
            loaded = [one for one in self.all if one.engine is not None and one is not model]
            loaded.sort(key=lambda one: one.last_used or 0.0)
            victims = loaded[: max(0, len(loaded) + 1 - self._max_loaded)]
            unloaded: list[ServedModel] = []
            try:
                if model.engine is None:
                    engine = self.open(model, waits=bool(victims))
                    if victims:
                        await engine.wait_checked()
                        for one in victims:
                            await self._unload(one, model)
                            unloaded.append(one)
                        engine.proceed()
                assert model.engine is not None
                await model.engine.wait()
            except NotReadyError:
                failed, model.engine = model.engine, None
                if failed is not None:
                    await failed.close()
                for one in unloaded:
                    self.open(one)
                raise

    async def _unload(self, model: ServedModel, successor: ServedModel | None = None) -> None:
        """Waits until the last request of a model has ended, then unloads the model.

        successor: the model to be loaded in its place. If no request waits for the successor any
        more, raises NotReadyError and keeps the model.
        """
        engine = model.engine
        assert engine is not None
        model.is_leaving = True
        try:
            await engine.wait_idle(
                lambda: successor is not None and not self._queue.is_wanted(successor)
            )
        finally:
            model.is_leaving = False
        if successor is not None and not self._queue.is_wanted(successor):
            raise NotReadyError(f"no request waits for {successor.name} any more")
        model.engine, model.last_ready = None, engine.ready
        await engine.close()

    async def sleep_idle(self, seconds: float, log: Callable[[str], None]) -> None:
        """Unloads each model that had no request for some seconds, for ever."""
        while True:
            idle = {model: model.engine.idle_s for model in self.all if model.engine is not None}
            await asyncio.sleep(max(0.0, seconds - max(idle.values(), default=0.0)))
            async with self._turn:
                for model in idle:
                    if model.engine is None or model.engine.idle_s < seconds:
                        continue
                    await self._unload(model)
                    model.is_asleep = True
                    log(f"{model.name}: unloaded, no request for {seconds:g} s")

    def open(self, model: ServedModel, *, waits: bool = False) -> EngineClient:
        """Starts the engine process of a model. waits: True to load once `proceed` is called."""

        async def prepare() -> None:
            header = await asyncio.to_thread(check, model.path)
            tokenizer = await asyncio.to_thread(Tokenizer.from_file, model.path)
            model.n_bytes = header.file_bytes
            model.prompt_builder = model.prompts_of(tokenizer)

        model.engine = self._new_engine(model)
        model.engine.start(prepare, waits=waits)
        return model.engine

    def end_requests(self, sentence: str) -> None:
        """Ends the requests in flight with status 503 and a sentence."""
        for engine in self.engines:
            engine.end_requests(sentence)

    def kill(self) -> None:
        """Kills all engine processes."""
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        """Ends the processes of all engines and of all chat templates."""
        for model in self.all:
            if model.prompt_builder is not None and model.prompt_builder.tokenizer is not None:
                model.prompt_builder.tokenizer.end_templates()
        for engine in self.engines:
            await engine.close()
