"""Sequence: tokens, K/V and states of one timeline in an engine."""

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
    """Sequence of an engine. Only one thread at a time may use an engine and its sequences."""

    def __init__(self, engine: Engine) -> None:
        """Creates an empty sequence; Error if the engine has `n_parallel` open ones already."""
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.max_draft = engine.max_draft
        self._handle = create("sequence", "sequence_create", engine.handle)
        engine.count_sequences(1)

    @property
    def handle(self) -> Any:
        """The sequence's C handle; raises Error after `close`."""
        if self._handle is None:
            raise Error("the sequence is closed")
        return self._handle

    def close(self) -> None:
        """Frees the sequence's cells and its place in the engine."""
        if self._handle is not None:
            self._handle = None
            self.engine.count_sequences(-1)

    @property
    def position(self) -> int:
        """Number of tokens that the sequence holds."""
        return value("sequence_position", self.handle)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens that the sequence holds, int32 [position]."""
        out = np.empty(self.position, dtype=np.int32)
        call("sequence_get_tokens", self.handle, ffi.from_buffer("int32_t[]", out))
        return out

    def cells_needed(self, n: int) -> int:
        """Returns the number of free cells that n more tokens take."""
        return value("sequence_cells_needed", self.handle, n)

    def prefill(self, tokens: abc.Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens and returns the last token's row; errors as for `Engine.run`."""
        return self.engine.run([BatchEntry(self, tokens)], progress)[0]

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row of logits."""
        return self.engine.run([BatchEntry(self, [token])])[0]

    def draft(self, last_token: int, n_draft: int, k: int = 1, drafter: int = 0) -> Draft:
        """Returns a drafter's candidates after `last_token`; arguments as for `Engine.draft`."""
        return self.engine.draft([DraftRequest(self, last_token, n_draft)], k, drafter)[0]

    def verify(self, tokens: abc.Sequence[int]) -> Rows:
        """Runs a chain of tokens without appending it. Returns its rows; `commit` must follow."""
        return self.engine.run([BatchEntry(self, tokens, is_verify=True)])[0]

    def verify_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """Runs a tree without appending it. Returns a row for each node; `commit_path` must follow.

        tokens: of the nodes; node 0, the root, is the sampled token that is not appended yet.
        parents: -1 for the root, a lower node for others. A node attends to its ancestors and the
        sequence. Error for parents that make no tree, or more than `Engine.max_verify` nodes.
        """
        return self.engine.run([BatchEntry(self, tokens, is_verify=True, parents=parents)])[0]

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the pending verify and drops the others."""
        self.engine.commit([(self, n)])

    def commit_path(self, nodes: abc.Sequence[int]) -> None:
        """Appends a path of the pending verify, root first; errors as for `Engine.commit`."""
        self.engine.commit([(self, nodes)])

    def logits(
        self, tokens: abc.Sequence[int], progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Appends tokens and returns the logits after each, float32 [n, n_vocab]."""
        out = np.empty((len(tokens), self.engine.model.n_vocab), dtype=np.float32)
        self.engine.run([BatchEntry(self, tokens, all_logits=out)], progress)
        return out

    def features(self, tokens: abc.Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens and returns their hidden states, float32 [n, n_taps, n_embd].

        The states are those of the engine's taps: tap i is the residual stream that enters layer i,
        n_layer the last layer's output, n_layer + 1 its norm, which is the output head's input.
        Error for an engine without taps; other errors as for `Engine.run`.
        """
        shape = (len(tokens), len(self.engine.taps), self.engine.model.n_embd)
        out = np.empty(shape, dtype=np.float32)
        self.engine.run([BatchEntry(self, tokens, all_features=out)])
        return out

    def snapshot(self) -> Prefix:
        """Takes a snapshot for other sequences; may invalidate the rows of the last pass.

        Error if the sequence is empty, a verify is pending, or memory is short.
        """
        return Prefix(create("prefix", "sequence_snapshot", self.handle), self.position)

    def snapshot_bytes(self) -> int:
        """Returns the bytes of main memory that `snapshot` would take."""
        n_bytes = new("uint64_t *")
        call("sequence_snapshot_bytes", self.handle, n_bytes)
        return int(n_bytes[0])

    def attach(self, prefix: Prefix, n: int) -> None:
        """Attaches the first n tokens of a prefix, or rewinds a sequence that begins with them.

        Error if the sequence holds other tokens, too few cells are free, or n is a part of the
        prefix although `Engine.partial_prefix_ok` is False.
        """
        call("sequence_restore", self.handle, prefix.handle, n)

    def reset(self) -> None:
        """Empties the sequence."""
        call("sequence_reset", self.handle)
