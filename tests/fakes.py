"""A model and a sequence that say a script, with the surface of those in core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scripted import common_start

from dflash_gguf.core import Draft
from dflash_gguf.rounds import Progress

N_VOCAB = 263
END = 260


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


Floats = np.ndarray[Any, np.dtype[np.float32]]


class FakeRows:
    def __init__(self, rows: list[Floats]) -> None:
        self._rows = rows

    def argmax(self, index: int = -1) -> int:
        return int(self._rows[index].argmax())

    def top(self, index: int = -1) -> tuple[Any, Floats]:
        raise NotImplementedError

    def logits(self, index: int = -1) -> Floats:
        return self._rows[index]


class HasRows:
    """An engine whose rows are at hand."""

    n_most_top = 0

    def keep_top(self, k: int) -> bool:  # noqa: ARG002
        return False


class FakeDrafter:
    def __init__(self, block_size: int) -> None:
        self.path = "/models/fake-drafter.gguf"
        self.kernels = {"FAKE": 1}
        self.block_size = block_size


class FakePrefix:
    """What the first tokens of a FakeSequence left behind: these."""

    n_draft = 0
    idle_cells = 0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.n_tokens = self.n_proven = len(tokens)

    def info(self) -> FakePrefix:
        return self

    def wanted_cells(self, n: int) -> int:  # noqa: ARG002
        return 0

    def close(self) -> None:
        self.tokens = []


class FakeSequence(HasRows):
    """After the prompt's end (`mark`) it says `script`, then END; `fed` counts tokens computed.

    It is its own engine. With a block size it has a drafter, which knows the script but is wrong
    at every third byte.
    """

    def __init__(
        self, model: FakeModel, script: bytes, mark: int, n_ctx: int = 64, block_size: int = 1
    ) -> None:
        self.engine = self
        self.model, self.script, self.mark, self.n_ctx = model, script, mark, n_ctx
        self.n_threads = 2
        self.cpu_operations: list[str] = []
        self.tokens: list[int] = []
        self.fed: list[int] = []
        self.interrupt_at: int | None = None
        self.n_closed = 0
        self.drafter = FakeDrafter(block_size) if block_size > 1 else None
        self.max_draft = block_size - 1
        self.max_verify = max(block_size, 1)
        self.n_parallel = 1
        self.open: list[int] = []
        self.parents: list[int] = []
        self.divides_prefixes = True
        self.prefix_bytes = self.cell_bytes = 0
        self.n_free_cells = n_ctx

    @property
    def position(self) -> int:
        return len(self.tokens)

    def _next(self, tokens: list[int]) -> tuple[int, int]:
        """The byte after these tokens, and its place in the script."""
        mark = max((i for i, token in enumerate(tokens) if token == self.mark), default=-1)
        since = len(tokens) - 1 - mark
        return (self.script[since] if since < len(self.script) else END), since

    def _row(self, tokens: list[int]) -> Floats:
        logits = np.random.default_rng(len(tokens)).standard_normal(self.model.n_vocab)
        logits[self._next(tokens)[0]] = 9.0
        return logits.astype(np.float32)

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
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

    def reserve_verify(self, n: int) -> None:
        assert not self.open
        self.max_verify = max(self.max_verify, n)

    def verify(self, tokens: Sequence[int]) -> FakeRows:
        return self.verify_tree(tokens, range(-1, len(tokens) - 1))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> FakeRows:
        if self.position + len(tokens) > self.n_ctx or len(tokens) > self.max_verify:
            raise AssertionError("verified beyond the context or the room")
        self.fed += tokens
        self.open, self.parents = list(tokens), list(parents)
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else self.tokens), token])
        return FakeRows([self._row(path) for path in paths])

    def commit(self, n: int) -> None:
        self.commit_path(range(n))

    def commit_path(self, nodes: Sequence[int]) -> None:
        assert [self.parents[node] for node in nodes] == [-1, *nodes[:-1]][: len(nodes)]
        self.tokens += [self.open[node] for node in nodes]
        self.open = []

    def sync(self, tokens: Sequence[int]) -> int:
        self.open = []
        n = len(common_start(self.tokens, tokens[:-1]))
        del self.tokens[n:]
        return n

    def wanted_cells(self, n: int) -> int:  # noqa: ARG002
        return 0

    def cost_of_keeping(self) -> int:
        return 0

    def keep(self) -> FakePrefix:
        return FakePrefix(self.tokens)

    def adopt(self, prefix: FakePrefix, n: int) -> None:
        assert not self.tokens
        self.tokens = prefix.tokens[:n]

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> FakeRows:
        for done, token in enumerate(tokens):
            if progress is not None:
                progress(done, len(tokens))
            self._append(token)
        return FakeRows([self._row(self.tokens)])

    def decode(self, token: int) -> FakeRows:
        self._append(token)
        return FakeRows([self._row(self.tokens)])

    def _append(self, token: int) -> None:
        assert not self.open
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

    def reset(self) -> None:
        self.tokens = []

    def close(self) -> None:
        self.n_closed += 1
