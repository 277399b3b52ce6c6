"""Timelines: what a model has seen, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, lib, new, text
from .limits import MAX_TOP, MAX_VERIFY
from .load_config import LoadConfig, c_options
from .models import Drafter, Model
from .progress import Progress, c_callback


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A prefix of a session's timeline that can be gone back to, in this session."""

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

    def __init__(self, session: Session, n_rows: int = 1) -> None:
        self._session = session
        self._pass = session.n_passes
        self._n_rows = n_rows

    def __len__(self) -> int:
        return self._n_rows

    def _checked(self, index: int) -> tuple[Any, int]:
        if not -self._n_rows <= index < self._n_rows:
            raise ValueError(f"row {index}: the pass has {self._n_rows}")
        if self._pass != self._session.n_passes:
            raise Error("these rows are gone: the session has run another pass")
        return self._session.handle, index % self._n_rows

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, the lowest id on ties; no row is copied."""
        token = new("int32_t *")
        call("session_argmax", *self._checked(index), token)
        return int(token[0])

    def top(self, index: int = -1) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The best tokens of a row and their logits, best first, the lowest id on ties.

        As many as `Session.keep_top` was told; Error if it was told nothing before the pass.
        """
        tokens = np.empty(self._session.n_top, dtype=np.int32)
        logits = np.empty(self._session.n_top, dtype=np.float32)
        into = ffi.from_buffer("int32_t[]", tokens), ffi.from_buffer("float[]", logits)
        call("session_top", *self._checked(index), *into)
        return tokens, logits

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of a row, float32 [n_vocab]."""
        row = np.empty(self._session.model.n_vocab, dtype=np.float32)
        call("session_logits", *self._checked(index), ffi.from_buffer("float[]", row))
        return row


def _nodes(values: Sequence[int], what: str) -> NDArray[np.int32]:
    """Node numbers as C wants them; which of them make sense is for the core to say."""
    nodes = np.asarray(values)
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"{what}: need a list of integers, got {nodes.dtype} {list(nodes.shape)}")
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(nodes, limits.min, limits.max), dtype=np.int32)


class Session:
    """One timeline of a model with its caches and cursor. Not for two threads at once."""

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        drafter: Drafter | None = None,
        draft_window: int | None = None,
        config: LoadConfig | None = None,
    ) -> None:
        """Allocates the caches and the compute buffer.

        config: in place of the model's. n_ctx, draft_window: in place of the config's.

        Raises:
            Error: out of memory, or the cache types do not work on the model's device.
        """
        config = config or model.config
        options = c_options("dfl_session_params", config)
        options["n_ctx"] = model.n_ctx if n_ctx is None else n_ctx
        options["drafter"] = ffi.NULL if drafter is None else drafter.handle
        if draft_window is not None:
            options["draft_window"] = draft_window
        params = new("dfl_session_params *", options)
        self.model = model
        self.drafter = drafter
        self.max_draft = 0 if drafter is None else min(drafter.block_size, MAX_VERIFY) - 1
        self.n_passes = self.n_top = 0
        self._max_verify: int | None = None
        self._handle = create("session", "session_create", model.handle, params)
        self.n_ctx = int(self.info().n_ctx)
        self.n_threads = int(self.info().n_threads)

    @property
    def cpu_operations(self) -> list[str]:
        """Operations that the device lacks and the CPU does, by ggml's names."""
        return [name for name in text(self.info().cpu_operations).split(",") if name]

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the session is closed")
        return self._handle

    def close(self) -> None:
        """Frees the caches."""
        self._handle = None

    def info(self) -> Any:
        """The session's `dfl_session_info`: position, threads, bytes of each buffer."""
        info = new("dfl_session_info *")
        call("session_get_info", self.handle, info)
        return info

    @property
    def position(self) -> int:
        """Tokens the caches hold."""
        return int(self.info().position)

    def _ids(self, tokens: Sequence[int]) -> Any:
        """Token ids as C takes them; whether the model has them is for the core to say."""
        if isinstance(tokens, (list, tuple)):
            try:
                return ffi.new("int32_t[]", tokens)  # fast, and a round has few
            except (TypeError, OverflowError):
                pass
        return ffi.from_buffer("int32_t[]", self._checked_ids(tokens))

    def _checked_ids(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"tokens: need a list of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.model.n_vocab):
            bad = next(int(x) for x in ids if not 0 <= x < self.model.n_vocab)
            raise Error(f"token id {bad} is outside the vocabulary of {self.model.n_vocab}")
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _run(
        self, tokens: Sequence[int], progress: Progress | None, out: NDArray[np.float32] | None
    ) -> None:
        ids = self._ids(tokens)
        logits = ffi.NULL if out is None else ffi.from_buffer("float[]", out, True)
        self.n_passes += 1
        with c_callback(progress) as callback:
            call(
                "session_prefill",
                self.handle,
                ids,
                len(ids),
                logits,
                callback,
                ffi.NULL,
            )

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens in micro-batches and returns the row of the last one.

        Raises:
            Error: a token id outside the vocabulary, more tokens than the context has room for.
            What progress raises; the timeline then ends after the last finished micro-batch.
        """
        self._run(tokens, progress, None)
        return Rows(self)

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""
        self.n_passes += 1
        null = ffi.NULL
        call("session_prefill", self.handle, self._ids([token]), 1, null, null, null)
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
        self.n_passes += 1
        call(
            "session_draft",
            self.handle,
            last,
            n_draft,
            k,
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("float[]", logits),
            ffi.from_buffer("float[]", log_sum_exp),
        )
        return Draft(tokens, logits, log_sum_exp)

    @property
    def max_verify(self) -> int:
        """Rows of one verify at most; `reserve_verify` makes room for more."""
        if self._max_verify is None:
            self._max_verify = int(self.info().verify_rows)
        return self._max_verify

    @property
    def n_most_top(self) -> int:
        """Best tokens of a row that `keep_top` may be asked for."""
        return min(MAX_TOP, self.model.n_vocab)

    def keep_top(self, k: int) -> bool:
        """Has a device pick the k best (0 to MAX_TOP) of every row in the passes to come.

        They are then all that need be copied: `Rows.top`. False where the rows are at hand, on a
        CPU, or where the device cannot; 0 ends it.
        """
        kept = new("int32_t *")
        call("session_keep_top", self.handle, k, kept)
        self.n_top = int(kept[0])
        return self.n_top > 0

    def reserve_verify(self, n: int) -> None:
        """Makes room for verifies of up to n rows, 1 to MAX_VERIFY; never less than there is.

        Raises:
            Error: n is out of range, a verify waits for its commit, or memory is short.
        """
        self.n_passes += 1
        self._max_verify = None
        call("session_reserve_verify", self.handle, n)

    def verify(self, tokens: Sequence[int]) -> Rows:
        """Runs tokens after the timeline in one pass without appending them.

        Every row can be read until `commit`, which must follow.
        """
        ids = self._ids(tokens)
        self.n_passes += 1
        call("session_verify", self.handle, ids, len(ids))
        return Rows(self, len(ids))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
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
        self.n_passes += 1
        call(
            "session_verify_tree",
            self.handle,
            ids,
            ffi.from_buffer("int32_t[]", above),
            len(ids),
        )
        return Rows(self, len(ids))

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the last verify; the rest leaves no trace."""
        self.n_passes += 1
        call("session_commit", self.handle, n)

    def commit_path(self, nodes: Sequence[int]) -> None:
        """Appends a path of the last verify, root first; the rest leaves no trace.

        Raises:
            Error: the nodes are not a path down from the root.
        """
        path = _nodes(nodes, "nodes")
        self.n_passes += 1
        call("session_commit_path", self.handle, ffi.from_buffer("int32_t[]", path), path.size)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens and returns every one's logits, float32 [n, n_vocab]."""
        out = np.empty((len(tokens), self.model.n_vocab), dtype=np.float32)
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
        self.n_passes += 1
        call("checkpoint_restore", self.handle, checkpoint.handle)

    def truncate(self, position: int) -> None:
        """Forgets the tokens from a position on.

        Raises:
            Error: on a model with recurrent layers, unless position is 0 or the present one.
        """
        self.n_passes += 1
        call("session_truncate", self.handle, position)

    def reset(self) -> None:
        """Goes back to position 0."""
        self.n_passes += 1
        call("session_reset", self.handle)
