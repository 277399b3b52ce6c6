"""Output of a request: detokenisation, stop strings, reasoning."""

from __future__ import annotations

from typing import Protocol

from ..config import DecodeConfig
from ..text.reasoning import Format, OutputPart, joined
from ..text.stream import StopMatcher, Utf8Stream


class VocabularyLike(Protocol):
    """The members of a tokenizer that requests use."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""

    @property
    def suppressed_tokens(self) -> frozenset[int]:
        """Token ids that are never sampled."""

    def piece(self, token: int) -> bytes:
        """Returns the bytes that a token adds to the text; empty for a control token."""


class OutputProcessor:
    """Turns an answer's tokens into text, and detects its end; the state can be rewound."""

    def __init__(
        self,
        vocabulary: VocabularyLike,
        config: DecodeConfig,
        n_room: int,
        reasoning: Format | None = None,
    ) -> None:
        """Creates the output processor of one answer.

        n_room: context left after the prompt, in tokens; the last token of an answer needs no room.
        """
        self._vocabulary = vocabulary
        self._config = config
        self._n_room = n_room
        self._reasoning = None if config.reasoning_format == "none" else reasoning
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
        return None if self._splitter is None else joined(self._parts, "reasoning")

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
            self._add(self._stop.push(self._utf8.push(self._vocabulary.piece(token))))
            limit = self._config.max_tokens
            if self._stop.matched is not None:
                self.stop_reason = "text"
            elif limit is not None and len(self.tokens) >= limit:
                self.stop_reason = "length"
            elif len(self.tokens) > self._n_room:
                self.stop_reason = "context"
        is_over = self.stop_reason is not None
        if is_over:
            self._add(self._stop.push(self._utf8.finish()) + self._stop.finish())
            if self._splitter is not None:
                self._parts += self._splitter.finish()
        return is_over

    def take_new(self) -> tuple[tuple[int, ...], tuple[OutputPart, ...]]:
        """Returns the tokens and the text parts that were added since the last call."""
        tokens, parts = self.tokens[self._n_read :], self._parts[self._n_parts_read :]
        self._n_read += len(tokens)
        self._n_parts_read += len(parts)
        return tuple(tokens), tuple(parts)

    def rewind(self, n_tokens: int) -> None:
        """Shortens the answer to its first n_tokens tokens."""
        tokens, self.tokens = self.tokens[:n_tokens], []
        self.stop_reason = None
        self._utf8 = Utf8Stream()
        self._stop = StopMatcher(self._config.stop_texts)
        self._splitter = None if self._reasoning is None else self._reasoning.splitter()
        self._parts: list[OutputPart] = []
        for token in tokens:
            self.push(token)

    def _add(self, text: str) -> None:
        if self._splitter is not None:
            self._parts += self._splitter.push(text)
        elif text:
            self._parts.append(OutputPart(text))
