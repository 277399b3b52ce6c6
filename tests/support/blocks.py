"""Answers of parts, and the streams of a format for these, without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from dflash_gguf.config import DecodeConfig
from dflash_gguf.serve.completion_choice import CompletionChoice
from dflash_gguf.serve.messages import AskedPrompt, ResultStats, Stepped
from dflash_gguf.serve.wire_format import WireFormat
from dflash_gguf.text.reasoning import OutputPart

TEXTS = st.sampled_from(["a", "b c", "\n\n", "é", '"'])
SAID = st.sampled_from(["text", "reasoning"])
SAID_PARTS = st.builds(lambda text, kind: [OutputPart(text, kind)], TEXTS, SAID)
CALL_PIECES = st.sampled_from([[], ["{}"], ['{"path":', ' "a', '.py"}'], ['{"a": [1, 2', "]}"]])


@st.composite
def block_parts(draw: st.DrawFn) -> list[OutputPart]:
    """Draws the parts of an answer: text and reasoning, and tool calls with their arguments."""
    parts: list[OutputPart] = []
    n_calls = 0
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            parts += draw(SAID_PARTS)
        else:
            parts += call(n_calls, draw(st.sampled_from(["read", "add"])), draw(CALL_PIECES))
            n_calls += 1
    return parts


def stats(n_tokens: int, stop_reason: str, stop_text: str | None) -> ResultStats:
    return ResultStats(
        *(7, 3, 4, n_tokens, n_tokens, 1, 1.0, 0.1, 0.1),
        *(stop_reason, stop_text, 1, "none", 0, 0, {}, None, {}),
    )


def answer(
    parts: Sequence[OutputPart], stop_reason: str = "token", stop_text: str | None = None
) -> CompletionChoice:
    """Returns the ended answer to a prompt of 7 tokens, 4 of them cached."""
    choice = CompletionChoice(0, AskedPrompt(list(range(7))), DecodeConfig())
    choice.parts, choice.tokens = list(parts), [1] * len(parts)
    choice.stats = stats(len(parts), stop_reason, stop_text)
    return choice


def streamed(wire_format: WireFormat, choice: CompletionChoice, n_parts: int) -> list[Any]:
    """Returns the events of an answer as decoded JSON. n_parts: parts of one round."""
    parts, final, choice.stats, choice.parts = choice.parts, choice.stats, None, []
    events = list(wire_format.start([choice]))
    for at in range(0, len(parts), n_parts):
        step = Stepped(1, [1], parts[at : at + n_parts], [], None)
        events += wire_format.step(choice, step, is_first=at == 0)
        choice.add(step, is_stream=True)
    choice.stats = final
    events += [*wire_format.end(choice), *wire_format.finish([choice])]
    data = b"".join(map(wire_format.encoded, events)).decode()
    found = []
    for event in data.split("\n\n")[:-1]:
        name, body = event.split("\n", 1)
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def call(index: int, name: str, pieces: Sequence[str]) -> list[OutputPart]:
    arguments = [OutputPart(piece, "arguments", index) for piece in pieces]
    return [OutputPart(name, "call", index), *arguments]
