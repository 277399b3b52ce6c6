"""The text of an answer: detokenisation, stop strings, reasoning."""

from __future__ import annotations

from typing import Protocol

from ..config import DecodeConfig
from ..text.reasoning import Format, OutputPart, joined
from ..text.stream import StopMatcher, Utf8Stream


class VocabularyLike(Protocol):
    """The part of a tokenizer that decoding uses."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def suppressed_tokens(self) -> frozenset[int]:
        """Ids that are never sampled."""

    def piece(self, token: int) -> bytes:
        """Returns the bytes a token adds to the text; none for a control token."""


class OutputProcessor:
    """Turns the tokens of an answer into parts, and finds its end.

    Its state is a function of the tokens, so that it can go back to any number of them.
    """

    def __init__(
        self,
        vocabulary: VocabularyLike,
        config: DecodeConfig,
        n_room: int,
        reasoning: Format | None = None,
    ) -> None:
        """n_room: tokens the context has room for; one more can be sampled, as the last.

        reasoning: marks of reasoning; None where the chat template has none.
        """
        self._vocabulary = vocabulary
        self._config = config
        self._n_room = n_room
        self._reasoning = None if config.reasoning_format == "none" else reasoning
        self._n_read = self._n_parts_read = 0
        self.tokens: list[int] = []
        self.stop_reason: str | None = None
        self.rewind(0)

    @property
    def text(self) -> str:
        """All text that is certain, without reasoning."""
        return joined(self._parts, "text")

    @property
    def reasoning(self) -> str | None:
        """The reasoning that is certain; None where nothing marks it."""
        return None if self._splitter is None else joined(self._parts, "reasoning")

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop.matched

    @property
    def n_left(self) -> int:
        """Tokens that may still be sampled."""
        limit = self._config.max_tokens
        n_most = self._n_room + 1
        return (n_most if limit is None else min(limit, n_most)) - len(self.tokens)

    @property
    def n_new(self) -> int:
        """Tokens that `take_new` has not returned."""
        return len(self.tokens) - self._n_read

    def push(self, token: int) -> bool:
        """Adds a token; True if it ends the answer."""
        self.tokens.append(token)
        if token in self._vocabulary.stop_tokens and not self._config.ignore_eos:
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
        """Returns the tokens and the parts that were added since the last call."""
        tokens, parts = self.tokens[self._n_read :], self._parts[self._n_parts_read :]
        self._n_read += len(tokens)
        self._n_parts_read += len(parts)
        return tuple(tokens), tuple(parts)

    def rewind(self, n_tokens: int) -> None:
        """Goes back to the first n tokens."""
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
