"""AsyncDecoder: a decoder for asyncio, whose event loop no answer holds up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ._files import AnyPaths
from .config import DecodeConfig, LoadConfig
from .decoder import Decoder, Prompt
from .loading import load
from .outputs import Result, Step
from .stream import Stream
from .text.chat import Message

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from .options import DecodeOptions, LoadOptions

N_THREADS = 64
"""Most answers that are read at once. A thread waits for the next step of each."""
T = TypeVar("T")


class AsyncStream:
    """An unfinished answer: `async for` yields its steps. Cancelling a wait for one loses none."""

    def __init__(
        self, begin: Callable[[Callable[[], bool]], Stream], threads: ThreadPoolExecutor
    ) -> None:
        """Use `AsyncDecoder.stream`.

        begin: makes the stream; its argument returns True once the answer is to end.
        """
        self._begin = begin
        self._threads = threads
        self._is_over = threading.Event()
        self._stream: Stream | None = None
        self._coming: asyncio.Future[Step | None] | None = None

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        if self._coming is None:
            self._coming = asyncio.get_running_loop().run_in_executor(self._threads, self._next)
        step = await asyncio.shield(self._coming)
        self._coming = None
        if step is None:
            raise StopAsyncIteration
        return step

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the answer with the tokens it has so far; returns once it computes no more."""
        self._is_over.set()
        if self._coming is not None:
            await asyncio.wait((self._coming,))
        if self._stream is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._stream.close)

    def result(self) -> Result:
        """Returns the result so far. ValueError if no step was asked for."""
        if self._stream is None:
            raise ValueError("the answer has not begun: iterate the stream first")
        return self._stream.result()

    def _next(self) -> Step | None:
        if self._stream is None:
            self._stream = self._begin(self._is_over.is_set)
        return next(self._stream, None)


class AsyncDecoder:
    """A decoder whose methods do not block asyncio's event loop. `decoder` is the one it uses.

    Answers wait for each other; with n_parallel above 1 that many are computed at once.
    """

    def __init__(self, decoder: Decoder) -> None:
        if not isinstance(decoder, Decoder):
            raise TypeError(
                f"decoder is {decoder!r:.60}: give a Decoder, or await AsyncDecoder.load"
            )
        self.decoder = decoder
        self._threads = ThreadPoolExecutor(N_THREADS, "dflash-answer")

    @classmethod
    async def load(
        cls,
        path: str | os.PathLike[str],
        *,
        drafter: AnyPaths = None,
        config: LoadConfig | None = None,
        **options: Unpack[LoadOptions],
    ) -> AsyncDecoder:
        """Loads a model; arguments and errors as for `load`."""
        return cls(await asyncio.to_thread(load, path, drafter=drafter, config=config, **options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Frees the model; unfinished answers raise RuntimeError."""
        await self._run(self.decoder.close)

    def stream(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> AsyncStream:
        """Returns an answer to read by `async for`; the first step begins it.

        Arguments and errors as for `Decoder.stream`; errors are raised by the first step.
        """
        return AsyncStream(
            lambda is_over: self.decoder.begin(
                self.decoder.request(prompt, config, **settings), is_over
            ),
            self._threads,
        )

    async def generate(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Result:
        """Answers a prompt; arguments and errors as for `Decoder.generate`.

        Cancelling the task ends the answer after the running round.
        """
        return await _read(self.stream(prompt, config, **settings))

    async def chat(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        **settings: Unpack[DecodeOptions],
    ) -> Result:
        """Answers a conversation; arguments and errors as for `Decoder.chat`.

        Cancelling the task ends the answer after the running round.
        """
        stream = await self.chat_stream(
            messages,
            config,
            template=template,
            enable_thinking=enable_thinking,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            **settings,
        )
        return await _read(stream)

    async def chat_stream(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        **settings: Unpack[DecodeOptions],
    ) -> AsyncStream:
        """Renders a conversation and returns its answer to read, as `stream` does."""
        prompt, config = await self._run(
            lambda: self.decoder.chat_turn(
                messages,
                config,
                settings,
                template=template,
                enable_thinking=enable_thinking,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
            )
        )
        return self.stream(prompt, config)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _read(stream: AsyncStream) -> Result:
    async with stream:
        async for _ in stream:
            pass
        return stream.result()
