"""Response format of OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from .blocks import BlockFormat, ContentBlock, new_id
from .completion_choice import CompletionChoice, Event, timings_of
from .messages import Stepped
from .responses_request import Reasoning, ResponsesBody
from .responses_tools import CustomInput, ResponsesTools
from .serializers import ResponseContext

CONTEXT_EXCEEDED = "context_length_exceeded"
"""Code of the error for a prompt that the context cannot hold."""

DELTAS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
"""Names of the events that add to an item, by the kind of its block."""


CUSTOM = "response.custom_tool_call_input"


class ResponsesFormat(BlockFormat):
    """Format of OpenAI's Responses; blocks are its items."""

    CONSTRAINT = "text.format"

    def __init__(self, context: ResponseContext, body: ResponsesBody) -> None:
        super().__init__()
        self._context = context
        self._body = body
        self._tools = ResponsesTools(body.tools or ())
        self._id = f"resp_{new_id()}"
        self._created = int(time.time())
        self._n_events = 0
        self._input: CustomInput | None = None
        """Reader of the open item's input, if the item calls a custom tool."""
        self._n_sent = 0

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """Returns the whole response."""
        response = self._ended(self._gather(choices))
        texts = [block.text for block in self._blocks if block.kind == "text"]
        return response | {"output_text": "".join(texts)} | self._context.verbose

    def start(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:  # noqa: ARG002
        """Yields response.created and response.in_progress."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._in_progress()

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:  # noqa: ARG002
        """Returns an event response.in_progress that reports the progress of a prompt."""
        return self._in_progress() | {"prompt_progress": progress}

    def keep_alive(self) -> bytes:
        """Returns an event, as Codex takes no comment for a sign of life."""
        return self.encoded(self._in_progress())

    def failure(self, status: int, sentence: str) -> bytes:
        """Returns response.failed; clients try again at a server_error."""
        code = "server_error" if status >= 500 else "invalid_prompt"
        return self.encoded(self._failed(code, sentence))

    def too_long(self, sentence: str) -> bytes:
        """Returns the whole stream for a prompt that the context cannot hold.

        Codex compacts the conversation for this code; it takes status 400 for the user's mistake.
        """
        events = [*self.start(()), self._failed(CONTEXT_EXCEEDED, sentence)]
        return b"".join(map(self.encoded, events))

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """Yields the events of one round's parts, with timings if these are asked for."""
        timings = timings_of(step.stats) if step.stats else {}
        for event in super().step(choice, step, is_first=is_first):
            yield event | timings if "delta" in event else event

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Yields the end of the last item, and response.completed or response.incomplete."""
        yield from self._end(choice)
        response = self._ended(choice)
        event = self._event(f"response.{response['status']}", response=response)
        if self._body.timings_per_token and choice.stats:
            event |= timings_of(choice.stats)
        yield event | self._context.verbose

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._n_events = self._n_events, self._n_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _in_progress(self) -> Event:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def _failed(self, code: str, sentence: str) -> Event:
        error = {"code": code, "message": sentence}
        return self._event("response.failed", response=self._response("failed") | {"error": error})

    def _response(self, status: str) -> Event:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": body.max_output_tokens,
            "model": self._context.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or Reasoning(),
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            "metadata": {},
        }

    def _ended(self, choice: CompletionChoice) -> Event:
        is_cut = choice.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = [self._item(block) for block in self._blocks]
        response["usage"] = _usage(choice)
        return response

    def _item(self, block: ContentBlock, *, is_begun: bool = False) -> Event:
        """Returns a block as an item; is_begun: as an empty one, with which the block begins."""
        status = "in_progress" if is_begun else "completed" if block.is_whole else "incomplete"
        if block.kind == "call":
            item = self._tools.item(block.name, "" if is_begun else block.text or "{}")
            ids = {"id": self._item_id(block), "call_id": block.call_id}
            return {**ids, **item, "status": status}
        if block.kind == "reasoning":
            return {
                "id": self._item_id(block),
                "type": "reasoning",
                "summary": [],
                "content": [] if is_begun else [{"type": "reasoning_text", "text": block.text}],
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self._item_id(block),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if is_begun else [_text_part(block.text)],
        }

    def _item_id(self, block: ContentBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        is_custom = block.kind == "call" and self._tools.is_custom(block.name)
        return f"{'ctc' if is_custom else prefix}_{block.id}"

    def _at(self, block: ContentBlock) -> Event:
        """Returns the fields that say to which item and content an event belongs."""
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _opened(self, block: ContentBlock) -> Iterator[Event]:
        is_custom = block.kind == "call" and self._tools.is_custom(block.name)
        self._input, self._n_sent = CustomInput() if is_custom else None, 0
        yield self._event(
            "response.output_item.added",
            output_index=block.index,
            item=self._item(block, is_begun=True),
        )
        if block.kind == "text":
            part = _text_part("")
            yield self._event("response.content_part.added", **self._at(block), part=part)

    def _grown(self, block: ContentBlock, text: str) -> Iterator[Event]:
        at = self._at(block)
        if self._input is not None:
            if delta := self._input.push(text):
                self._n_sent += len(delta)
                yield self._event(f"{CUSTOM}.delta", **at, delta=delta)
            return
        if block.kind == "text":
            at |= {"logprobs": []}
        yield self._event(f"response.{DELTAS[block.kind]}.delta", **at, delta=text)

    def _closed(self, block: ContentBlock) -> Iterator[Event]:
        item, at = self._item(block), self._at(block)
        if "input" in item:
            if delta := item["input"][self._n_sent :]:
                yield self._event(f"{CUSTOM}.delta", **at, delta=delta)
            yield self._event(f"{CUSTOM}.done", **at, input=item["input"])
        elif block.kind == "call":
            done = {"name": block.name, "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **at, **done)
        elif block.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **at, text=block.text)
        else:
            text = {"text": block.text, "logprobs": []}
            yield self._event("response.output_text.done", **at, **text)
            part = _text_part(block.text)
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=block.index, item=item)


def _text_part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(choice: CompletionChoice) -> Event:
    n_prompt = len(choice.prompt.tokens)
    n_tokens = choice.stats.n_tokens if choice.stats else 0
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": choice.stats.n_cached if choice.stats else 0},
        "output_tokens": n_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.n_reasoning_tokens},
        "total_tokens": n_prompt + n_tokens,
    }
