"""A model and a session that say a script, with the surface of core.Model and core.Session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_gguf.decode import Progress

N_VOCAB = 263
END = 260


class FakeModel:
    """`n_recurrent` decides whether the session can be truncated."""

    def __init__(self, n_recurrent: int = 0, n_vocab: int = N_VOCAB) -> None:
        self.path = "/models/fake.gguf"
        self.backend = "FAKE"
        self.n_recurrent = n_recurrent
        self.n_vocab = n_vocab
        self.n_ctx_train = 128
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class FakeRows:
    def __init__(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self._logits = logits

    def argmax(self, index: int = -1) -> int:  # noqa: ARG002
        return int(self._logits.argmax())

    def logits(self, index: int = -1) -> np.ndarray[Any, np.dtype[np.float32]]:  # noqa: ARG002
        return self._logits


class FakeCheckpoint:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position = len(tokens)


class FakeSession:
    """After the prompt's end (`mark`) it says `script`, then END; `fed` counts tokens computed."""

    def __init__(self, model: FakeModel, script: bytes, mark: int, n_ctx: int = 64) -> None:
        self.model, self.script, self.mark, self.n_ctx = model, script, mark, n_ctx
        self.n_threads = 2
        self.tokens: list[int] = []
        self.fed: list[int] = []
        self.interrupt_at: int | None = None
        self.n_closed = 0

    @property
    def position(self) -> int:
        return len(self.tokens)

    def _row(self) -> FakeRows:
        logits = np.random.default_rng(self.position).standard_normal(self.model.n_vocab)
        since = (
            self.position
            - 1
            - max((i for i, token in enumerate(self.tokens) if token == self.mark), default=-1)
        )
        logits[self.script[since] if since < len(self.script) else END] = 9.0
        return FakeRows(logits.astype(np.float32))

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> FakeRows:
        for done, token in enumerate(tokens):
            if progress is not None:
                progress(done, len(tokens))
            self._append(token)
        return self._row()

    def decode(self, token: int) -> FakeRows:
        self._append(token)
        return self._row()

    def _append(self, token: int) -> None:
        if self.position >= self.n_ctx:
            raise AssertionError("fed beyond the context")
        self.fed.append(token)
        self.tokens.append(token)
        if self.position == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.tokens += tokens
        return np.zeros((len(tokens), self.model.n_vocab), dtype=np.float32)

    def take(self) -> FakeCheckpoint:
        return FakeCheckpoint(list(self.tokens))

    def holds(self, checkpoint: FakeCheckpoint) -> bool:
        return self.tokens[: checkpoint.position] == checkpoint.tokens

    def restore(self, checkpoint: FakeCheckpoint) -> None:
        self.tokens = list(checkpoint.tokens)

    def truncate(self, position: int) -> None:
        if self.model.n_recurrent and position not in (0, self.position):
            raise AssertionError("truncated a recurrent model")
        del self.tokens[position:]

    def reset(self) -> None:
        self.tokens = []

    def close(self) -> None:
        self.n_closed += 1
