"""A fake model and sequence that say a script, with the interface of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scripted import Floats, Rows, Scripted

from dflash_gguf.native import Draft

N_VOCAB = 263
END = 260


def n_since(tokens: Sequence[int], mark: int) -> int:
    """Returns the number of tokens behind the last mark, or of all if there is none."""
    return next((n for n, token in enumerate(reversed(tokens)) if token == mark), len(tokens))


class FakeModel:
    def __init__(self, n_vocab: int = N_VOCAB) -> None:
        self.path = "/models/fake.gguf"
        self.backend = "FAKE"
        self.kernels = {"FAKE": 1}
        self.n_vocab = n_vocab
        self.n_ctx_train = 128
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class FakeDrafter:
    def __init__(self, block_size: int) -> None:
        self.path = "/models/fake-drafter.gguf"
        self.kind = "dflash"
        self.scale_is_open = False
        self.kernels = {"FAKE": 1}
        self.block_size, self.max_draft = block_size, block_size - 1


class FakeSequence(Scripted):
    """Says `script` after the last `mark` token, then END; `fed` holds the computed tokens.

    With a block size it has a drafter that knows the script, but is wrong at every third byte.
    """

    def __init__(
        self, model: FakeModel, script: bytes, mark: int, n_ctx: int = 64, block_size: int = 1
    ) -> None:
        super().__init__(script, n_ctx, model=model)
        self.model, self.mark = model, mark
        self.fed: list[int] = []
        self.engine.drafters = [FakeDrafter(block_size)] if block_size > 1 else []
        self.engine.max_verify = max(block_size, 1)
        self.max_draft = block_size - 1

    def _next(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the byte after these tokens and its index in the script."""
        since = n_since(tokens, self.mark)
        return (self.script[since] if since < len(self.script) else END), since

    def row(self, path: Sequence[int]) -> Floats:
        logits = np.random.default_rng(len(path)).standard_normal(self.model.n_vocab)
        logits[self._next(path)[0]] = 9.0
        return logits.astype(np.float32)

    def draft(self, last_token: int, n_draft: int, k: int = 1, _drafter: int = 0) -> Draft:
        assert not self.open
        assert n_draft <= self.max_draft
        path = [*self.tokens, last_token]
        for _ in range(n_draft):
            token, place = self._next(path)
            path.append(token if place % 3 else ord("?"))
        tokens = np.tile(np.array(path[-n_draft:], dtype=np.int32)[:, None], (1, k))
        tokens[:, 1:] = np.arange(1, k)
        logits = np.tile(np.linspace(9, 0, k, dtype=np.float32), (n_draft, 1))
        return Draft(tokens, logits, np.logaddexp.reduce(logits, axis=1))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int] | None) -> Rows:
        self.fed += tokens
        return super().verify_tree(tokens, parents)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.fed.append(token)
            super().append([token])

    def logits(
        self, tokens: Sequence[int], _progress: object = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.tokens += tokens
        return np.zeros((len(tokens), self.model.n_vocab), dtype=np.float32)
