"""Parts of passes of many sequences: batch entries, drafts, rows."""

from __future__ import annotations

from collections import abc
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, ffi, new


class SequenceHandle(Protocol):
    """A `Sequence`, as passes know it."""

    engine: Any
    """Its `Engine`."""

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""


class BatchEntry(NamedTuple):
    """Tokens of one sequence that a pass is to run: to append, or candidates to verify."""

    sequence: SequenceHandle
    tokens: abc.Sequence[int]
    is_verify: bool = False
    parents: abc.Sequence[int] | None = None
    """Of a verify: None for a chain, else -1 for the root, which is chosen but not appended yet,
    and a node before for every other one."""
    n_remaining: int = 0
    """Tokens that will follow an append; if there are some, it has no row."""
    all_logits: NDArray[np.float32] | None = None
    """Logits of every token of an append, float32 [n, n_vocab], to be filled in."""


class DraftRequest(NamedTuple):
    """Candidates for n_draft positions after a token that is chosen but not appended."""

    sequence: SequenceHandle
    last_token: int
    n_draft: int


class Draft(NamedTuple):
    """Candidates of a drafter for n_draft positions: their k best tokens, best first."""

    tokens: NDArray[np.int32]
    """[n_draft, k]"""
    logits: NDArray[np.float32]
    """Raw, [n_draft, k]."""
    log_sum_exp: NDArray[np.float32]
    """Log-sum-exp of all raw logits, [n_draft]; less it, a logit is a log-probability."""


class Rows:
    """The logits of one pass, a row for each token asked for.

    They are gone with the next pass or draft of the engine, and with every change of the sequence.
    """

    def __init__(self, sequence: SequenceHandle, first: int, n_rows: int) -> None:
        self._sequence, self._first, self._n_rows = sequence, first, n_rows

    def __len__(self) -> int:
        return self._n_rows

    def _checked(self, index: int) -> tuple[Any, int]:
        if not -self._n_rows <= index < self._n_rows:
            raise ValueError(f"row {index}: the pass has {self._n_rows}")
        return self._sequence.handle, self._first + index % self._n_rows

    def check(self) -> None:
        """Checks an append that has no row.

        Raises:
            Error: it was not finite, so that the sequence is empty.
        """
        call("sequence_check_append", self._sequence.handle)

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, the lowest id on ties; no row is copied."""
        token = new("int32_t *")
        call("sequence_argmax", *self._checked(index), token)
        return int(token[0])

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of a row, float32 [n_vocab]."""
        row = np.empty(self._sequence.engine.model.n_vocab, dtype=np.float32)
        call("sequence_logits", *self._checked(index), ffi.from_buffer("float[]", row))
        return row


def ids_of(tokens: abc.Sequence[int], n_vocab: int) -> Any:
    """Token ids as C takes them; whether the model has them is for the core to say."""
    if isinstance(tokens, (list, tuple)):
        try:
            return ffi.new("int32_t[]", tokens)  # fast, and a round has few
        except (TypeError, OverflowError):
            pass
    return ffi.from_buffer("int32_t[]", _checked_ids(tokens, n_vocab))


def _checked_ids(tokens: abc.Sequence[int], n_vocab: int) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"tokens: need a list of integers, got {ids.dtype} {list(ids.shape)}")
    if ids.size and (ids.min() < 0 or ids.max() >= n_vocab):
        bad = next(int(x) for x in ids if not 0 <= x < n_vocab)
        raise Error(f"token id {bad} is outside the vocabulary of {n_vocab}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def nodes_of(values: abc.Sequence[int], what: str) -> NDArray[np.int32]:
    """Node numbers as C wants them; which of them make sense is for the core to say."""
    nodes = np.asarray(values)
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"{what}: need a list of integers, got {nodes.dtype} {list(nodes.shape)}")
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(nodes, limits.min, limits.max), dtype=np.int32)
