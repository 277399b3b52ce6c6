"""A sequence for the decode loop that says a script, and a proposer that half knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_gguf.rounds import Progress

N_VOCAB = 300
STOP = 256
N_TOP = 64
Floats = np.ndarray[Any, np.dtype[np.float32]]


def common_start(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """What two lists of tokens begin with alike."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return list(a[:n])


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

    def top(self, index: int = -1) -> tuple[Any, Floats]:
        ids = np.argsort(-self._rows[index], kind="stable")[:N_TOP].astype(np.int32)
        return ids, self._rows[index][ids]

    def logits(self, index: int = -1) -> Floats:
        self.n_fetched += 1
        return self._rows[index]


class Scripted:
    """Says the bytes of a script, then STOP, whatever it is fed.

    Logits below the best are noise that depends on the whole path. `fail_at` interrupts the
    decode of that position; `fail_in` the named call, before or after it has worked.
    """

    def __init__(self, script: Sequence[int], n_ctx: int = 64, n_prompt: int = 3) -> None:
        self.engine = self
        self.script = list(script)
        self.n_ctx = n_ctx
        self.n_prompt = n_prompt
        self.tokens: list[int] = []
        self.max_verify = 256
        self.n_most_top = 0  # N_TOP: it is like a device
        self.open: list[int] = []
        self.parents: list[int] = []
        self.rows: list[Rows] = []
        self.verified: list[int] = []
        self.fail_at: int | None = None
        self.fail_in: tuple[str, str] | None = None

    @property
    def position(self) -> int:
        return len(self.tokens)

    def keep_top(self, k: int) -> bool:
        assert k in (0, self.n_most_top)
        return k > 0

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

    def sync(self, tokens: Sequence[int]) -> int:
        self.open = []
        n = len(common_start(self.tokens, tokens[:-1]))
        del self.tokens[n:]
        return n

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
        return self.verify_tree(tokens, range(-1, len(tokens) - 1))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        self._fail("verify", "before")
        assert not self.open
        assert len(parents) == len(tokens) <= self.max_verify
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert self.position + len(tokens) <= self.n_ctx
        self.open, self.parents = list(tokens), list(parents)
        self.verified.append(len(tokens))
        self._fail("verify", "after")
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else self.tokens), token])
        return self._rows(paths)

    def commit(self, n: int) -> None:
        self.commit_path(range(n))

    def commit_path(self, nodes: Sequence[int]) -> None:
        if nodes:
            self._fail("commit", "before")
        assert [self.parents[node] for node in nodes] == [-1, *nodes[:-1]][: len(nodes)]
        self.tokens += [self.open[node] for node in nodes]
        self.open = []
        if nodes:
            self._fail("commit", "after")
