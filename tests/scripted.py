"""A session for the decode loop that says a script, and a proposer that half knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash_gguf.decode import Progress
from dflash_gguf.sampling import Sampler

N_VOCAB = 300
STOP = 256
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Bytes:
    """Token i is the byte i; 256 and above are control tokens, 256 and 257 end an answer."""

    stop_tokens = frozenset({STOP, STOP + 1})
    suppressed_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class Rows:
    def __init__(self, rows: Sequence[Floats]) -> None:
        self._rows = rows
        self.n_fetched = 0

    def argmax(self, index: int = -1) -> int:
        return int(self._rows[index].argmax())

    def logits(self, index: int = -1) -> Floats:
        self.n_fetched += 1
        return self._rows[index]


class Scripted:
    """Says the bytes of a script, then STOP, whatever it is fed.

    Logits below the best are noise that depends on the whole path. `fail_at` interrupts the
    decode of that position; `fail_in` the named call, before or after it has worked.
    """

    def __init__(self, script: Sequence[int], n_ctx: int = 64, n_prompt: int = 3) -> None:
        self.script = list(script)
        self.n_ctx = n_ctx
        self.n_prompt = n_prompt
        self.tokens: list[int] = []
        self.open: list[int] = []
        self.rows: list[Rows] = []
        self.verified: list[int] = []
        self.fail_at: int | None = None
        self.fail_in: tuple[str, str] | None = None

    @property
    def position(self) -> int:
        return len(self.tokens)

    def _row(self, path: Sequence[int]) -> Floats:
        rng = np.random.default_rng(path)
        logits = rng.standard_normal(N_VOCAB).astype(np.float32)
        spoken = len(path) - self.n_prompt
        logits[self.script[spoken] if spoken < len(self.script) else STOP] = 9.0
        return logits

    def _rows(self, paths: Sequence[Sequence[int]]) -> Rows:
        self.rows.append(Rows([self._row(path) for path in paths]))
        return self.rows[-1]

    def _fail(self, name: str, when: str) -> None:
        if self.fail_in == (name, when):
            self.fail_in = None
            raise KeyboardInterrupt

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        assert self.position + len(tokens) <= self.n_ctx
        for done in range(len(tokens)):
            if progress is not None:
                progress(done, len(tokens))
            self.tokens.append(tokens[done])
        return self._rows([self.tokens])

    def decode(self, token: int) -> Rows:
        assert not self.open
        assert self.position < self.n_ctx
        if self.position == self.fail_at:
            raise KeyboardInterrupt
        self.tokens.append(token)
        return self._rows([self.tokens])

    def verify(self, tokens: Sequence[int]) -> Rows:
        self._fail("verify", "before")
        assert not self.open
        assert self.position + len(tokens) <= self.n_ctx
        self.open = list(tokens)
        self.verified.append(len(tokens))
        self._fail("verify", "after")
        return self._rows([self.tokens + self.open[: i + 1] for i in range(len(tokens))])

    def commit(self, n: int) -> None:
        if n:
            self._fail("commit", "before")
        assert n <= len(self.open)
        self.tokens += self.open[:n]
        self.open = []
        if n:
            self._fail("commit", "after")


class HalfRight:
    """Proposes a known continuation; in round r the candidate `wrong(r)` is another token."""

    def __init__(
        self, tokens: Sequence[int], n_prompt: int, wrong: Callable[[int], int], max_draft: int = 15
    ) -> None:
        self.max_draft = max_draft
        self.observed: list[int] = []
        self._tokens, self._n_prompt, self._wrong = list(tokens), n_prompt, wrong
        self._n_rounds = 0

    def propose(self, seen: Sequence[int], n: int, sampler: Sampler) -> list[int]:  # noqa: ARG002
        start = len(seen) - self._n_prompt
        path = (self._tokens[start : start + n] + [7] * n)[:n]
        wrong = self._wrong(self._n_rounds)
        self._n_rounds += 1
        if wrong < n:
            path[wrong] = (path[wrong] + 1) % N_VOCAB
        return path

    def observe(self, tokens: Sequence[int]) -> None:
        self.observed += tokens
