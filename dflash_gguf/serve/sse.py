"""Responses of the generating routes: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .completion_choice import CompletionChoice
from .engine_client import (
    BusyError,
    ClientGone,
    EngineClient,
    Event,
    KeepAlive,
    NotReadyError,
    Submission,
)
from .errors import error_response
from .messages import Ask, Ended, Failed, Prefilled, Scored, Started, Stepped
from .schemas import BadRequestError
from .threads import INLINE, aside
from .wire_format import WireFormat, encode

OnEnd = Callable[[CompletionChoice], None]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _FailedError(Exception):
    def __init__(self, message: Failed, wire_format: WireFormat) -> None:
        super().__init__(wire_format.in_own_words(message.sentence))
        self.status = message.status


class _GoneError(Exception):
    """Raised if the client closed its connection."""


class GenerationResponse(Response):
    """Response of a generating route, whole or streamed, with a status that the engine decides."""

    def __init__(
        self,
        engine: EngineClient,
        wire_format: WireFormat,
        ask: Ask,
        choices: Sequence[CompletionChoice],
        *,
        is_stream: bool,
        wants_progress: bool,
        timeout_s: float,
        keep_alive_s: float,
        on_end: OnEnd,
    ) -> None:
        """Creates a response. on_end: called with each answer that has ended."""
        self.background = None
        self.raw_headers = []
        self._engine = engine
        self._wire_format = wire_format
        self._ask = ask
        self._choices = choices
        self._is_stream = is_stream
        self._wants_progress = wants_progress
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self._heard = self._sending_since = 0.0
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = self._engine.submit(self._ask)
        except (BadRequestError, BusyError, NotReadyError) as error:
            await error_response(error)(scope, receive, send)
            return
        watch = asyncio.create_task(_watch(receive, request))
        clock = asyncio.create_task(self._clock(request, asyncio.current_task()))
        scope["log"] = self._log
        try:
            await (self._stream if self._is_stream else self._whole)(request, scope, receive, send)
        except _GoneError:
            scope["outcome"] = "client left"
        except asyncio.CancelledError:
            scope["outcome"] = "ended by the server"
            if not self._is_slow():
                raise
            scope["outcome"] = "client does not read"
        finally:
            request.cancel()
            for task in (watch, clock):
                task.cancel()

    def _log(self) -> str:
        n_prompt = sum(len(choice.prompt.tokens) for choice in self._choices)
        n_tokens = sum(len(choice.tokens) for choice in self._choices)
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        n_cached = sum(x.n_cached for x in stats)
        cached = f" ({n_cached} cached)" if len(stats) == len(self._choices) else ""
        return f"prompt {n_prompt}{cached}, answer {n_tokens}"

    async def _whole(self, request: Submission, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while request.open or not request.events.empty():
                self._take(request, await request.events.get())
        except _FailedError as error:
            await error_response(error, error.status)(scope, receive, send)
            return
        n_chances = sum(len(x.logprobs) * (x.config.n_probs or 0) for x in self._choices)
        encoded = encode if n_chances <= INLINE else _in_pieces
        data = await aside(lambda: encoded(self._wire_format.whole(self._choices)), n_chances)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, data, is_last=True)

    async def _stream(
        self, request: Submission, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends a stream. An error before the first event sets the status, later it is an event."""
        seen: set[int] = set()
        wire_format = self._wire_format
        try:
            first = [await request.events.get()] if self._ask.is_constrained else []
            if first and isinstance(first[0], Failed):
                raise _FailedError(first[0], wire_format)
            if data := self._encoded(wire_format.start(self._choices)):
                await self._begin(send)
                await self._send(send, data)
            while request.open or first or not request.events.empty():
                events, first = first or [await request.events.get()], []
                while not request.events.empty():
                    events.append(request.events.get_nowait())
                data = b"".join(self._written(request, event, seen) for event in events)
                if data:
                    await self._begin(send)
                    await self._send(send, data)
        except _FailedError as error:
            if not self._is_begun:
                await error_response(error, error.status)(scope, receive, send)
                return
            scope["outcome"] = f"ended early: {error}"
            await self._send(send, wire_format.failure(error.status, str(error)), is_last=True)
            return
        await self._begin(send)
        data = self._encoded(wire_format.finish(self._choices))
        await self._send(send, data + wire_format.DONE, is_last=True)

    def _written(self, request: Submission, event: Event, seen: set[int]) -> bytes:
        if isinstance(event, KeepAlive):
            return self._wire_format.keep_alive()
        choice = self._take(request, event)
        if choice is None:
            return b""
        wire_format, data = self._wire_format, b""
        if isinstance(event, Prefilled):
            progress = choice.progress(event) if self._wants_progress else None
            if progress is not None:
                data = wire_format.encoded(wire_format.progress(choice, progress))
        elif isinstance(event, Stepped):
            events = wire_format.step(choice, event, is_first=choice.index not in seen)
            seen.add(choice.index)
            data = self._encoded(events)
        elif isinstance(event, Ended):
            data = self._encoded(wire_format.end(choice))
        return data

    def _encoded(self, events: Iterable[Any]) -> bytes:
        return b"".join(map(self._wire_format.encoded, events))

    def _take(self, request: Submission, event: Event) -> CompletionChoice | None:
        """Returns an event's CompletionChoice, the event added; None for events of no answer."""
        request.took(event)
        if isinstance(event, ClientGone):
            raise _GoneError
        if isinstance(event, Failed):
            raise _FailedError(event, self._wire_format)
        if not isinstance(event, (Started, Prefilled, Scored, Stepped, Ended)):
            return None
        choice = self._choices[request.runs[event.id]]
        if isinstance(event, Started):
            choice.slot, choice.began = event.slot, time.monotonic()
        elif isinstance(event, Scored):
            choice.prompt_logprobs += event.logprobs
        elif isinstance(event, Stepped):
            choice.add(event, is_stream=self._is_stream)
        elif isinstance(event, Ended):
            choice.stats = event.stats
            self._on_end(choice)
        return choice

    async def _begin(self, send: Send) -> None:
        if not self._is_begun:
            self._is_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
            await send(start)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._sending_since = 0.0
        self._heard = time.monotonic()  # time when data was last sent to the client

    def _is_slow(self) -> bool:
        since = self._sending_since
        return since > 0.0 and time.monotonic() - since >= self._timeout_s

    async def _clock(self, request: Submission, sender: asyncio.Task[Any] | None) -> None:
        """Sends comments into a silent stream; cancels the response if nothing is read."""
        self._heard = time.monotonic()
        while True:
            await asyncio.sleep(min(self._keep_alive_s, self._timeout_s) / 2)
            now = time.monotonic()
            if self._is_slow() and sender is not None:
                sender.cancel()
            elif now - self._heard >= self._keep_alive_s and request.events.empty():
                self._heard = now
                if self._is_stream:
                    request.events.put_nowait(KeepAlive())


async def _watch(receive: Receive, request: Submission) -> None:
    """Waits for the client to disconnect, then cancels its runs, even if nothing is being sent."""
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        request.cancel()
        request.events.put_nowait(ClientGone())


def _in_pieces(value: Any, depth: int = 5) -> bytes:
    """Returns a value as JSON; encodes its parts one by one, to let other threads run between."""
    if depth and isinstance(value, dict):
        fields = (encode(x) + b":" + _in_pieces(y, depth - 1) for x, y in value.items())
        return b"{" + b",".join(fields) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join(_in_pieces(one, depth - 1) for one in value) + b"]"
    return encode(value)
