"""The answer as far as it goes: its tokens, its text, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..config import DecodeConfig
from ..text.reasoning import Splitter, TextSegment
from ..text.stream import StopMatcher, Utf8Stream


class VocabularyLike(Protocol):
    """What decoding asks of a tokenizer."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def suppressed_tokens(self) -> frozenset[int]:
        """Ids that are never drawn."""

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for a control token."""


class Answer:
    """Tokens drawn so far. It is over once `stop_reason` is set."""

    def __init__(
        self,
        vocabulary: VocabularyLike,
        config: DecodeConfig,
        n_room: int,
        cancelled: Callable[[], bool],
        splitter: Splitter | None = None,
    ) -> None:
        """n_room: tokens the context has room for; one more can be drawn, as the last.

        splitter: tells thoughts apart; without one all text is the answer's.
        """
        self.tokens: list[int] = []
        self.stop_reason: str | None = None
        self._vocabulary = vocabulary
        self._n_room = n_room
        self._ignore_eos = config.ignore_eos
        self._max_tokens = config.max_tokens
        self._cancelled = cancelled
        self._utf8 = Utf8Stream()
        self._stop = StopMatcher(config.stop_texts)
        self._splitter = splitter
        self._parts: list[TextSegment] = []
        self._n_parts_read = 0

    @property
    def text(self) -> str:
        """All text that is certain, without thoughts."""
        return _joined(self._parts, is_reasoning=False)

    @property
    def reasoning(self) -> str | None:
        """The thoughts as far as they are certain; None where nothing tells them apart."""
        return None if self._splitter is None else _joined(self._parts, is_reasoning=True)

    @property
    def stop_text(self) -> str | None:
        """The stop text that was met."""
        return self._stop.matched

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn."""
        limit = self._n_room + 1 if self._max_tokens is None else self._max_tokens
        return min(limit, self._n_room + 1) - len(self.tokens)

    def take(self, token: int) -> bool:
        """Adds a token; whether it ends the answer."""
        self.tokens.append(token)
        if token in self._vocabulary.stop_tokens and not self._ignore_eos:
            self.stop_reason = "token"
        else:
            self._add(self._stop.push(self._utf8.push(self._vocabulary.piece(token))))
            self.stop_reason = self._limit()
        if self.stop_reason is not None:
            self._add(self._stop.push(self._utf8.finish()) + self._stop.finish())
            if self._splitter is not None:
                self._parts += self._splitter.finish()
        return self.stop_reason is not None

    def new_text(self) -> tuple[str, str]:
        """The text and the thoughts that became certain since the last call."""
        new = self._parts[self._n_parts_read :]
        self._n_parts_read += len(new)
        if self._splitter is None:
            return "".join([part.text for part in new]), ""
        return _joined(new, is_reasoning=False), _joined(new, is_reasoning=True)

    def _add(self, text: str) -> None:
        if self._splitter is None:
            self._parts.append(TextSegment(text))
        else:
            self._parts += self._splitter.push(text)

    def _limit(self) -> str | None:
        """Why the answer ends after the token just taken, or None."""
        if self._stop.matched is not None:
            return "text"
        if self._max_tokens is not None and len(self.tokens) >= self._max_tokens:
            return "length"
        if len(self.tokens) > self._n_room:
            return "context"
        return "cancelled" if self._cancelled() else None


def _joined(parts: list[TextSegment], *, is_reasoning: bool) -> str:
    return "".join(part.text for part in parts if part.is_reasoning == is_reasoning)
