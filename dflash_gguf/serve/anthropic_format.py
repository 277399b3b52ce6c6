"""Response format of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .blocks import BlockFormat, ContentBlock, new_id
from .completion_choice import CompletionChoice, Event
from .errors import error_body
from .serializers import ResponseContext

SIGNATURE = "dflash"
"""Signature of thinking: clients send thinking without one back as text, or not at all."""
PING: Event = {"type": "ping"}


class MessagesFormat(BlockFormat):
    """Format of Anthropic's Messages."""

    CONSTRAINT = "output_config.format"

    def __init__(self, context: ResponseContext) -> None:
        super().__init__()
        self._context = context
        self._id = f"msg_{new_id()}"

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """Returns the whole message."""
        choice = self._gather(choices)
        content = [_whole(block) for block in self._blocks]
        message = self._message(choice) | self._stopped(choice) | {"content": content}
        return message | self._context.verbose

    def start(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """Yields message_start, with the length of a prompt of which nothing is cached yet."""
        yield {"type": "message_start", "message": self._message(choices[0])}

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:  # noqa: ARG002
        """Returns a ping with the progress of a prompt."""
        return PING | {"prompt_progress": progress}

    def keep_alive(self) -> bytes:
        """Returns a ping."""
        return self.encoded(PING)

    def failure(self, status: int, sentence: str) -> bytes:
        """Returns an event of type error, by whose own type clients decide to try again.

        Clients stop at an api_error, though the same request may well succeed.
        """
        kind = "overloaded_error" if status >= 500 else None
        return self.encoded(error_body(status, sentence, kind))

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Yields the end of the last block, message_delta and message_stop."""
        yield from self._end(choice)
        yield {
            "type": "message_delta",
            "delta": self._stopped(choice),
            "usage": _usage(choice),
            **self._context.verbose,
        }
        yield {"type": "message_stop"}

    def _message(self, choice: CompletionChoice) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(choice),
        }

    def _stopped(self, choice: CompletionChoice) -> Event:
        stop_text = choice.stats.stop_text if choice.stats else None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self._blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if stop_text is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_text}

    def _opened(self, block: ContentBlock) -> Iterator[Event]:
        content: Event
        if block.kind == "call":
            content = _call(block) | {"input": {}}
        elif block.kind == "reasoning":
            content = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            content = {"type": "text", "text": ""}
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def _grown(self, block: ContentBlock, text: str) -> Iterator[Event]:
        if block.kind == "call":
            yield _delta(block, {"type": "input_json_delta", "partial_json": text})
        elif block.kind == "reasoning":
            yield _delta(block, {"type": "thinking_delta", "thinking": text})
        else:
            yield _delta(block, {"type": "text_delta", "text": text})

    def _closed(self, block: ContentBlock) -> Iterator[Event]:
        if block.kind == "reasoning":
            yield _delta(block, {"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": block.index}


def _delta(block: ContentBlock, delta: Event) -> Event:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _call(block: ContentBlock) -> Event:
    return {"type": "tool_use", "id": block.call_id, "name": block.name}


def _whole(block: ContentBlock) -> Event:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return _call(block) | {"input": _input(block.text)}


def _input(arguments: str) -> msgspec.Raw | str:
    """Returns the arguments of a call; as a text if they are malformed JSON."""
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return msgspec.Raw((arguments or "{}").encode())


def _usage(choice: CompletionChoice) -> Event:
    n_cached = choice.stats.n_cached if choice.stats else 0
    return {
        "input_tokens": len(choice.prompt.tokens) - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": choice.stats.n_tokens if choice.stats else 0,
    }
