"""Output of a request: detokenisation, stop strings, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ..config import DecodeConfig
from ..text.reasoning import Format, OutputPart, PartKind, joined, merged
from ..text.stream import StopMatcher, Utf8Stream
from ..text.tools.formats import AnswerParser, special_texts
from ..text.tools.parser import ToolFormat


class VocabularyLike(Protocol):
    """The members of a tokenizer that requests use."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""

    @property
    def suppressed_tokens(self) -> frozenset[int]:
        """Token ids that are never sampled."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes that a token adds to the text; empty for a control token.

        special: True for the name of a control token.
        """


class OutputProcessor:
    """Turns an answer's tokens into text, and detects its end; the state can be rewound."""

    def __init__(
        self,
        vocabulary: VocabularyLike,
        config: DecodeConfig,
        n_room: int,
        reasoning: Format | None = None,
        tools: ToolFormat | None = None,
    ) -> None:
        """Creates the output processor of one answer.

        n_room: context left after the prompt, in tokens; the last token of an answer needs no room.
        reasoning, tools: how the answer marks reasoning and tool calls; None for no such parts.
        """
        self._vocabulary = vocabulary
        self._config = config
        self._n_room = n_room
        self._reasoning = None if config.reasoning_format == "none" else reasoning
        self._tools = tools
        self._special = special_texts(self._reasoning, tools)
        ends = frozenset() if config.ignore_eos else vocabulary.stop_tokens
        self._stop_tokens = ends.union(config.stop_token_ids)
        self._n_read = self._n_parts_read = 0
        self.tokens: list[int] = []
        self.stop_reason: str | None = None
        self.rewind(0)

    @property
    def text(self) -> str:
        """Text of the answer so far without reasoning; a possible stop string is held back."""
        return joined(self._parts, "text")

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the answer so far; None if nothing marks reasoning."""
        return None if self._reasoning is None else joined(self._parts, "reasoning")

    @property
    def parts(self) -> Sequence[OutputPart]:
        """The parts of the answer so far."""
        return self._parts

    @property
    def stop_text(self) -> str | None:
        """Stop string that ended the answer, or None."""
        return self._stop.matched

    @property
    def n_left(self) -> int:
        """Number of tokens that may still be sampled for the answer."""
        limit = self._config.max_tokens
        n_most = self._n_room + 1
        return (n_most if limit is None else min(limit, n_most)) - len(self.tokens)

    @property
    def n_new(self) -> int:
        """Number of tokens added to the answer since the last call of `take_new`."""
        return len(self.tokens) - self._n_read

    def push(self, token: int) -> bool:
        """Adds a sampled token; returns True if the token ends the answer."""
        self.tokens.append(token)
        if token in self._stop_tokens:
            self.stop_reason = "token"
        else:
            self._add(self._utf8.push(self._piece(token)))
            limit = self._config.max_tokens
            if self._stop.matched is not None:
                self.stop_reason = "text"
            elif self._answer.is_done:
                self.stop_reason = "call"
            elif limit is not None and len(self.tokens) >= limit:
                self.stop_reason = "length"
            elif len(self.tokens) > self._n_room:
                self.stop_reason = "context"
        is_over = self.stop_reason is not None
        if is_over:
            self._finish()
        return is_over

    def take_new(self) -> tuple[tuple[int, ...], tuple[OutputPart, ...]]:
        """Returns the tokens and the text parts that were added since the last call."""
        tokens, parts = self.tokens[self._n_read :], self._parts[self._n_parts_read :]
        self._n_read += len(tokens)
        self._n_parts_read += len(parts)
        return tuple(tokens), tuple(merged(parts))

    def rewind(self, n_tokens: int) -> None:
        """Shortens the answer to its first n_tokens tokens."""
        tokens, self.tokens = self.tokens[:n_tokens], []
        self.stop_reason = None
        self._utf8 = Utf8Stream()
        self._stop = StopMatcher(self._config.stop_texts)
        self._stop_kind: PartKind = "text"
        self._answer = AnswerParser(self._reasoning, self._tools)
        self._parts: list[OutputPart] = []
        for token in tokens:
            self.push(token)

    def _piece(self, token: int) -> bytes:
        piece = self._vocabulary.piece(token)
        if not piece and self._special:
            name = self._vocabulary.piece(token, special=True)
            return name if name.decode("utf-8", "replace") in self._special else b""
        return piece

    def _add(self, text: str) -> None:
        if self._tools is None:
            self._parts += self._answer.push(self._stop.push(text))
        else:
            self._parts += self._stopped(self._answer.push(text))

    def _finish(self) -> None:
        self._add(self._utf8.finish())
        if self._tools is None:
            self._parts += self._answer.push(self._stop.finish()) + self._answer.finish()
        else:
            self._parts += self._stopped(self._answer.finish())
            self._parts += self._unstopped()

    def _stopped(self, parts: Iterable[OutputPart]) -> Iterator[OutputPart]:
        """Yields parts up to a stop text, which tool calls may hold: only text ends an answer."""
        for part in parts:
            if self._stop.matched is not None:
                return
            if part.kind in ("call", "arguments"):
                yield from self._unstopped()
                yield part
                continue
            if part.kind != self._stop_kind:
                yield from self._unstopped()
                self._stop_kind = part.kind
            if text := self._stop.push(part.text):
                yield OutputPart(text, part.kind)

    def _unstopped(self) -> Iterator[OutputPart]:
        """Yields text that was held back, as no stop text can begin with it and go on."""
        if self._stop.matched is None and (text := self._stop.finish()):
            yield OutputPart(text, self._stop_kind)
            self._stop = StopMatcher(self._config.stop_texts)
