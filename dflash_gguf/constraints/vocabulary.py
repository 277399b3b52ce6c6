"""A model's vocabulary for llguidance, and bit masks of sets of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from ..text.stream import n_certain

Words = NDArray[np.uint32]
"""A bit mask of tokens, uint32 [(n_vocab + 31) // 32]: bit t % 32 of word t // 32 is token t."""

MAX_FORCED = 1024
"""Most bytes of forced text that are tokenized for a mask, about 1 ms."""
SPECIAL = b"\xff"
"""First byte of control tokens for llguidance: no text has it, so that no text allows them."""


class TokenizerLike(Protocol):
    """The members of a tokenizer that constraints use."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes that a token adds to a text; see `Tokenizer.piece`."""

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Returns the token ids of a text; see `Tokenizer.tokenize`."""


class ConstraintVocabulary:
    """A vocabulary of n_vocab tokens, with the token `end` = n_vocab beside them.

    llguidance allows `end` where the answer may end. A model may have several tokens that end an
    answer, so masks have the bits of all of them instead.
    """

    def __init__(self, tokenizer: TokenizerLike, n_vocab: int) -> None:
        """Reads all tokens, about 10 us each. n_vocab: of the model; ids beyond have no text."""
        self.n_vocab = self.end = n_vocab
        self.n_words = (n_vocab + 31) // 32
        self.stop_tokens = tokenizer.stop_tokens
        n = min(n_vocab, tokenizer.n_tokens)
        tokens = [
            tokenizer.piece(token) or SPECIAL + tokenizer.piece(token, special=True)
            for token in range(n)
        ]
        self._tokens = [*tokens, *([b""] * (n_vocab - n)), SPECIAL + b"<end>"]
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokenizer, self._tokens, self.end)),
            n_vocab=n_vocab + 1,
        )
        self.all = self.words_of(range(n_vocab))
        self.stops = self.words_of(self.stop_tokens)
        """Mask of the tokens that end an answer."""
        self.free = self.words_of(set(range(n_vocab)) - self.stop_tokens)
        """Mask of all tokens but those that end an answer."""
        self.spaces = self._with_text(lambda text: not text.strip(" \t\r\n"))
        """Mask of the tokens of white space."""
        self._by_mark: dict[tuple[str, ...], Words] = {}

    def words_of(self, tokens: Iterable[int]) -> Words:
        """Returns the bit mask of tokens."""
        flags = np.zeros(32 * self.n_words, dtype=np.uint8)
        flags[list(tokens)] = 1
        return np.packbits(flags, bitorder="little").view(np.uint32)

    def text(self, token: int) -> str:
        """Returns a token's text, or its name if it is a control token, which a mark may be.

        Bytes beyond ASCII, which no mark has, become U+FFFD.
        """
        return self._tokens[token].removeprefix(SPECIAL).decode("ascii", "replace")

    def opening(self, held: str, mark: str) -> Words:
        """Returns the mask of tokens that continue `held`, the begun text, to a begun mark."""

        def begins(text: str) -> bool:
            text = (held + text).lstrip() if held else text
            return bool(text) and (mark.startswith(text) or text.startswith(mark))

        return self._cached(("opening", held, mark), lambda: self._with_text(begins))

    def closing(self, held: str, mark: str) -> Words:
        """Returns `free` without tokens that end the mark after `held` and have more than space.

        The text behind the mark belongs to the answer, which a constraint could not check then.
        """

        def straddles(text: str) -> bool:
            at = (held + text).find(mark)
            return at >= 0 and bool((held + text)[at + len(mark) :].strip())

        held = held[n_certain(held, mark) :]
        return self._cached(
            ("closing", held, mark), lambda: self.free & ~self._with_text(straddles)
        )

    def _cached(self, key: tuple[str, ...], words: Callable[[], Words]) -> Words:
        if key not in self._by_mark:
            self._by_mark[key] = words()
        return self._by_mark[key]

    def _with_text(self, wanted: Callable[[str], bool]) -> Words:
        return self.words_of(
            token for token in range(self.n_vocab) if (text := self.text(token)) and wanted(text)
        )


class _Tokens:
    """Tokenizer in the form that llguidance's `TokenizerWrapper` takes."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenizerLike, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = tokens, end
        self._tokenizer = tokenizer
        self._is_prefixed = self._bytes(self._ids("a")) != b"a"

    def __call__(self, text: bytes) -> list[int]:
        """Returns the token ids of UTF-8 text, of which forced tokens are made.

        Of a long text returns the first ids only: llguidance asks again behind each token.
        """
        shown = text[:MAX_FORCED].decode(errors="ignore")
        if not self._is_prefixed:
            return self._ids(shown)
        # The tokenizer puts a space before each text: drop it with the line break behind it, which
        # is a token of its own.
        ids, n = self._ids("\n" + shown), 0
        while ids and n < len(b" \n"):
            n += len(self.tokens[ids.pop(0)])
        return ids

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.tokenize(text, add_special=False, parse_special=False)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])
