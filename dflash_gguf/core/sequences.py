"""Timelines in an engine: what a model has seen, and its passes."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, lib, new
from .engines import Engine
from .progress import Progress, c_callback


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A prefix of a sequence that can be gone back to, in this sequence."""

    handle: Any
    position: int


class Draft(NamedTuple):
    """What a drafter proposes for n_draft positions: their k best tokens, best first."""

    tokens: NDArray[np.int32]
    """[n_draft, k]"""
    logits: NDArray[np.float32]
    """Raw, [n_draft, k]."""
    log_sum_exp: NDArray[np.float32]
    """Of all raw logits of a position, [n_draft]; less it, a logit is a log-probability."""


class Rows:
    """The logits of one pass, a row for each token asked for; gone with the next call that runs."""

    def __init__(self, sequence: Sequence, n_rows: int = 1) -> None:
        self._sequence = sequence
        self._call = sequence.n_calls
        self._n_rows = n_rows

    def __len__(self) -> int:
        return self._n_rows

    def _checked(self, index: int) -> tuple[Any, int]:
        if not -self._n_rows <= index < self._n_rows:
            raise ValueError(f"row {index}: the pass has {self._n_rows}")
        if self._call != self._sequence.n_calls:
            raise Error("these rows are gone: the sequence has run another pass")
        return self._sequence.handle, index % self._n_rows

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, the lowest id on ties; no row is copied."""
        token = new("int32_t *")
        call("sequence_argmax", *self._checked(index), token)
        return int(token[0])

    def top(self, index: int = -1) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The best tokens of a row and their logits, best first, the lowest id on ties.

        As many as `Engine.keep_top` was told; Error if it was told anything else before the pass.
        """
        k = self._sequence.engine.n_top
        tokens, logits = np.empty(k, dtype=np.int32), np.empty(k, dtype=np.float32)
        into = ffi.from_buffer("int32_t[]", tokens), ffi.from_buffer("float[]", logits)
        call("sequence_top", *self._checked(index), k, *into)
        return tokens, logits

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of a row, float32 [n_vocab]."""
        row = np.empty(self._sequence.engine.model.n_vocab, dtype=np.float32)
        call("sequence_logits", *self._checked(index), ffi.from_buffer("float[]", row))
        return row


def _nodes(values: abc.Sequence[int], what: str) -> NDArray[np.int32]:
    """Node numbers as C wants them; which of them make sense is for the core to say."""
    nodes = np.asarray(values)
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"{what}: need a list of integers, got {nodes.dtype} {list(nodes.shape)}")
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(nodes, limits.min, limits.max), dtype=np.int32)


class Sequence:
    """One timeline in an engine, with its cursor. Not for two threads at once."""

    def __init__(self, engine: Engine) -> None:
        """An empty timeline.

        Raises:
            Error: the engine has a sequence that is not closed: it holds one at a time.
        """
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.max_draft = engine.max_draft
        self.n_calls = 0
        self._handle = create("sequence", "sequence_create", engine.handle)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the sequence is closed")
        return self._handle

    def close(self) -> None:
        """Gives its place in the engine to another."""
        self._handle = None

    @property
    def position(self) -> int:
        """Tokens the caches hold."""
        return int(lib().dfl_sequence_position(self.handle))

    def _ids(self, tokens: abc.Sequence[int]) -> Any:
        """Token ids as C takes them; whether the model has them is for the core to say."""
        if isinstance(tokens, (list, tuple)):
            try:
                return ffi.new("int32_t[]", tokens)  # fast, and a round has few
            except (TypeError, OverflowError):
                pass
        return ffi.from_buffer("int32_t[]", self._checked_ids(tokens))

    def _checked_ids(self, tokens: abc.Sequence[int]) -> NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"tokens: need a list of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.engine.model.n_vocab):
            bad = next(int(x) for x in ids if not 0 <= x < self.engine.model.n_vocab)
            raise Error(f"token id {bad} is outside the vocabulary of {self.engine.model.n_vocab}")
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _run(
        self, tokens: abc.Sequence[int], progress: Progress | None, out: NDArray[np.float32] | None
    ) -> None:
        ids = self._ids(tokens)
        logits = ffi.NULL if out is None else ffi.from_buffer("float[]", out, True)
        self.n_calls += 1
        with c_callback(progress) as callback:
            call(
                "sequence_prefill",
                self.handle,
                ids,
                len(ids),
                logits,
                callback,
                ffi.NULL,
            )

    def sync(self, tokens: abc.Sequence[int]) -> int:
        """Goes back to where the timeline agrees with `tokens`; how many of them are there.

        At least the last is left to prefill. An open verify is closed. With recurrent layers the
        timeline goes back to where their state was kept, or to the start: before the last token of
        an earlier prompt, if both of them came by `sync` and `prefill`.

        Raises:
            Error: no tokens, a token id outside the vocabulary, more tokens than the context holds.
        """
        ids = self._ids(tokens)
        n_kept = new("int64_t *")
        self.n_calls += 1
        call("sequence_sync", self.handle, ids, len(ids), n_kept)
        return int(n_kept[0])

    def prefill(self, tokens: abc.Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens in micro-batches and returns the row of the last one.

        Raises:
            Error: a token id outside the vocabulary, more tokens than the context has room for.
            What progress raises; the timeline then ends after the last finished micro-batch.
        """
        self._run(tokens, progress, None)
        return Rows(self)

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""
        self.n_calls += 1
        null = ffi.NULL
        call("sequence_prefill", self.handle, self._ids([token]), 1, null, null, null)
        return Rows(self)

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """What the drafter proposes after `last_token`, which is chosen but not appended.

        If its scores are not finite, it has forgotten the timeline so far.

        Raises:
            Error: no drafter, n_draft outside 1 to block_size - 1, or no room in the context.
        """
        (last,) = self._ids([last_token])
        tokens = np.empty((max(0, n_draft), max(0, k)), dtype=np.int32)
        logits = np.empty(tokens.shape, dtype=np.float32)
        log_sum_exp = np.empty(len(tokens), dtype=np.float32)
        self.n_calls += 1
        call(
            "sequence_draft",
            self.handle,
            last,
            n_draft,
            k,
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("float[]", logits),
            ffi.from_buffer("float[]", log_sum_exp),
        )
        return Draft(tokens, logits, log_sum_exp)

    def verify(self, tokens: abc.Sequence[int]) -> Rows:
        """Runs tokens after the timeline in one pass without appending them.

        Every row can be read until `commit`, which must follow.
        """
        ids = self._ids(tokens)
        self.n_calls += 1
        call("sequence_verify", self.handle, ids, len(ids))
        return Rows(self, len(ids))

    def verify_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """Runs the nodes of a tree after the timeline in one pass without appending them.

        tokens: node 0 is the root, which is chosen but not appended.
        parents: -1 for the root, else a node before; a node sees its ancestors and the timeline.

        Every node's row can be read until `commit_path`, which must follow.

        Raises:
            Error: parents that make no tree, or more nodes than there is room for.
        """
        ids = self._ids(tokens)
        if len(parents) != len(ids):
            raise ValueError(f"{len(ids)} tokens and {len(parents)} parents do not make a tree")
        above = _nodes(parents, "parents")
        self.n_calls += 1
        call(
            "sequence_verify_tree",
            self.handle,
            ids,
            ffi.from_buffer("int32_t[]", above),
            len(ids),
        )
        return Rows(self, len(ids))

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the last verify; the rest leaves no trace."""
        self.n_calls += 1
        call("sequence_commit", self.handle, n)

    def commit_path(self, nodes: abc.Sequence[int]) -> None:
        """Appends a path of the last verify, root first; the rest leaves no trace.

        Raises:
            Error: the nodes are not a path down from the root.
        """
        path = _nodes(nodes, "nodes")
        self.n_calls += 1
        call("sequence_commit_path", self.handle, ffi.from_buffer("int32_t[]", path), path.size)

    def logits(self, tokens: abc.Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens and returns every one's logits, float32 [n, n_vocab]."""
        out = np.empty((len(tokens), self.engine.model.n_vocab), dtype=np.float32)
        self._run(tokens, None, out)
        return out

    def take(self) -> Checkpoint:
        """A checkpoint of the present position."""
        handle = create("checkpoint", "checkpoint_take", self.handle)
        return Checkpoint(handle, int(lib().dfl_checkpoint_position(handle)))

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the timeline still begins with the checkpoint's tokens."""
        return bool(lib().dfl_checkpoint_is_valid(self.handle, checkpoint.handle))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint, however often.

        Raises:
            Error: the timeline no longer begins with its tokens.
        """
        self.n_calls += 1
        call("checkpoint_restore", self.handle, checkpoint.handle)

    def truncate(self, position: int) -> None:
        """Forgets the tokens from a position on.

        Raises:
            Error: on a model with recurrent layers, unless position is 0 or the present one.
        """
        self.n_calls += 1
        call("sequence_truncate", self.handle, position)

    def reset(self) -> None:
        """Goes back to position 0."""
        self.n_calls += 1
        call("sequence_reset", self.handle)
