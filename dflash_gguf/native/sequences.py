"""Sequences of an engine: their tokens and caches, and passes over them."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, new, value
from .engines import Engine
from .passes import BatchEntry, Draft, DraftRequest, Rows
from .prefixes import Prefix
from .progress import Progress


class Sequence:
    """One sequence of an engine, with its position. Not for two threads at once."""

    def __init__(self, engine: Engine) -> None:
        """Creates an empty sequence.

        Raises:
            Error: the engine has as many that are not closed as it holds, `Engine.n_parallel`.
        """
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.max_draft = engine.max_draft
        self._handle = create("sequence", "sequence_create", engine.handle)
        engine.count_sequences(1)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the sequence is closed")
        return self._handle

    def close(self) -> None:
        """Gives its place in the engine to another."""
        if self._handle is not None:
            self._handle = None
            self.engine.count_sequences(-1)

    @property
    def position(self) -> int:
        """Tokens the caches hold."""
        return value("sequence_position", self.handle)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens in the caches."""
        out = np.empty(self.position, dtype=np.int32)
        call("sequence_get_tokens", self.handle, ffi.from_buffer("int32_t[]", out))
        return out

    def cells_needed(self, n: int) -> int:
        """Returns how many of `Engine.n_free_cells` n more tokens take."""
        return value("sequence_cells_needed", self.handle, n)

    def prefill(self, tokens: abc.Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens in micro-batches and returns the row of the last one.

        Raises:
            Error: a token id outside the vocabulary, more tokens than the context has room for.
            What progress raises; the sequence then ends after the last finished micro-batch.
        """
        return self.engine.run([BatchEntry(self, tokens)], progress)[0]

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""
        return self.engine.run([BatchEntry(self, [token])])[0]

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """Returns the drafter's candidates after `last_token`; see `Engine.draft`."""
        return self.engine.draft([DraftRequest(self, last_token, n_draft)], k)[0]

    def verify(self, tokens: abc.Sequence[int]) -> Rows:
        """Runs tokens after the sequence in one pass without appending them.

        Every row can be read until `commit`, which must follow.
        """
        return self.engine.run([BatchEntry(self, tokens, is_verify=True)])[0]

    def verify_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """Runs the nodes of a tree after the sequence in one pass without appending them.

        tokens: node 0 is the root, which is chosen but not appended.
        parents: -1 for the root, else a node before; a node sees its ancestors and the sequence.

        Every node's row can be read until `commit_path`, which must follow.

        Raises:
            Error: parents that make no tree, or more nodes than there is room for.
        """
        return self.engine.run([BatchEntry(self, tokens, is_verify=True, parents=parents)])[0]

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the last verify; the rest leaves no trace."""
        self.engine.commit([(self, n)])

    def commit_path(self, nodes: abc.Sequence[int]) -> None:
        """Appends a path of the last verify, root first; the rest leaves no trace.

        Raises:
            Error: the nodes are not a path down from the root.
        """
        self.engine.commit([(self, nodes)])

    def logits(self, tokens: abc.Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens and returns every one's logits, float32 [n, n_vocab]."""
        out = np.empty((len(tokens), self.engine.model.n_vocab), dtype=np.float32)
        self.engine.run([BatchEntry(self, tokens, all_logits=out)])
        return out

    def snapshot(self) -> Prefix:
        """Takes a snapshot for other sequences; may invalidate the rows of the last pass.

        Raises:
            Error: it holds no tokens, a verify waits for its commit, or memory is short.
        """
        return Prefix(create("prefix", "sequence_snapshot", self.handle), self.position)

    def snapshot_bytes(self) -> int:
        """Returns the bytes of main memory that `snapshot` takes."""
        n_bytes = new("uint64_t *")
        call("sequence_snapshot_bytes", self.handle, n_bytes)
        return int(n_bytes[0])

    def attach(self, prefix: Prefix, n: int) -> None:
        """Attaches the first n tokens of a prefix, or goes back to them in place.

        Raises:
            Error: it holds other tokens, more cells than are free, or a part of a prefix that can
            only be taken whole.
        """
        call("sequence_restore", self.handle, prefix.handle, n)

    def reset(self) -> None:
        """Goes back to position 0."""
        call("sequence_reset", self.handle)
