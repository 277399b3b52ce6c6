"""Interface of response formats, and their server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from .completion_choice import CompletionChoice, Event
from .errors import error_body
from .messages import Stepped

encode = msgspec.json.Encoder().encode


class WireFormat:
    """Base class of response formats: one answer as a JSON object, or as a stream of events."""

    DONE = b""
    """Bytes after the last event of a stream."""
    CONSTRAINT = "response_format"
    """Name of the field that other formats call response_format."""

    def whole(self, choices: Sequence[CompletionChoice]) -> Any:
        """Returns the whole response."""
        raise NotImplementedError

    def start(self, choices: Sequence[CompletionChoice]) -> Iterable[Event]:  # noqa: ARG002
        """Returns the events that a stream sends before the prompt is computed.

        Without any, the status of a response can still tell of an engine that fails at once.
        """
        return ()

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """Returns an event that reports the progress of a prompt."""
        raise NotImplementedError

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """Yields the events of one round. is_first: True for the first round of the answer."""
        raise NotImplementedError

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Yields the last events of an answer."""
        raise NotImplementedError

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterable[Event]:  # noqa: ARG002
        """Returns the last events of a stream, after the ends of all answers."""
        return ()

    @classmethod
    def in_own_words(cls, sentence: str) -> str:
        """Returns an error message with the name that clients know a field by."""
        return sentence.replace(WireFormat.CONSTRAINT, cls.CONSTRAINT)

    def keep_alive(self) -> bytes:
        """Returns the bytes that a stream sends after some seconds without an event."""
        return b": keep-alive\n\n"

    def failure(self, status: int, sentence: str) -> bytes:
        """Returns the last event of a stream whose answer failed, with the status of the error."""
        return self.encoded(error_body(status, sentence))

    def encoded(self, event: Event) -> bytes:
        """Returns an event as bytes of a stream."""
        return b"data: " + encode(event) + b"\n\n"


class NamedEvents(WireFormat):
    """Base class of formats whose events have their type in a line of their own too."""

    def encoded(self, event: Event) -> bytes:
        """Returns an event as bytes of a stream."""
        return f"event: {event['type']}\n".encode() + super().encoded(event)
