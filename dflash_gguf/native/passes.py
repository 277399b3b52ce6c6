"""Arguments and results of an engine's passes: batch entries, drafts, rows of logits."""

from __future__ import annotations

from collections import abc
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, ffi, new


class SequenceHandle(Protocol):
    """The attributes of a `Sequence` that passes use."""

    engine: Any

    @property
    def handle(self) -> Any:
        """The sequence's C handle; raises Error once the sequence is closed."""


class BatchEntry(NamedTuple):
    """Tokens of one sequence in a pass: an append, or candidates to verify."""

    sequence: SequenceHandle
    tokens: abc.Sequence[int]
    is_verify: bool = False
    parents: abc.Sequence[int] | None = None
    """Parents of a verify's nodes, None for a chain. Node 0, the root, has the parent -1."""
    n_remaining: int = 0
    """Tokens of the prompt left to later passes; above 0 an append has no row."""
    all_logits: NDArray[np.float32] | None = None
    """Output array for the logits of each token of an append, float32 [n, n_vocab]."""
    all_features: NDArray[np.float32] | None = None
    """Output array for hidden states of each token of an append, float32 [n, n_taps, n_embd]."""


class SamplerHandle(Protocol):
    """The member of a core sampler that drafts use."""

    handle: Any


class DraftRequest(NamedTuple):
    """A request to draft n_draft positions after last_token, which is sampled but not appended.

    sampler: of the text; a drafter that drafts step by step follows the tokens that it is predicted
    to sample, and returns these first. None: the best tokens.
    """

    sequence: SequenceHandle
    last_token: int
    n_draft: int
    sampler: SamplerHandle | None = None


class Draft(NamedTuple):
    """Candidates of a drafter for n_draft positions: the k best tokens of each, best first.

    With a sampler in the request, the token that the draft follows comes first.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    """Raw logits of `tokens`, [n_draft, k]."""
    log_sum_exp: NDArray[np.float32]
    """Log-sum-exp of each position's raw logits, [n_draft]; logits minus this are log-probs."""


class Rows:
    """The logits of one batch entry: one row of an append, or a row for each node of a verify.

    Reading a row raises Error after the next pass or draft of the engine and after changes of the
    sequence, and ValueError for an index beyond the rows.
    """

    def __init__(self, sequence: SequenceHandle, first: int, n_rows: int) -> None:
        self._sequence, self._first, self._n_rows = sequence, first, n_rows

    def __len__(self) -> int:
        return self._n_rows

    def _checked(self, index: int) -> tuple[Any, int]:
        if not -self._n_rows <= index < self._n_rows:
            raise ValueError(f"row {index} is out of range, there are {self._n_rows} rows")
        return self._sequence.handle, self._first + index % self._n_rows

    def check(self) -> None:
        """Raises Error if the append had non-finite logits, so that its sequence is empty now."""
        call("sequence_check_append", self._sequence.handle)

    def argmax(self, index: int = -1) -> int:
        """Returns the best token of a row, the lowest id on ties; Error for a non-finite row."""
        token = new("int32_t *")
        call("sequence_argmax", *self._checked(index), token)
        return int(token[0])

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Returns a copy of a row, float32 [n_vocab]; Error for a non-finite row."""
        row: NDArray[np.float32] = self.gather([index])[0]
        return row

    def gather(self, indices: abc.Sequence[int]) -> NDArray[np.float32]:
        """Returns a copy of rows, float32 [n, n_vocab], for which a device is waited for once."""
        at = [self._checked(index)[1] for index in indices]
        rows = np.empty((len(at), self._sequence.engine.model.n_vocab), dtype=np.float32)
        into = ffi.from_buffer("float[]", rows)
        call("sequence_logits", self._sequence.handle, new("int64_t[]", at), len(at), into)
        return rows


def ids_of(tokens: abc.Sequence[int], n_vocab: int) -> Any:
    """Converts token ids to int32 for C; ids of lists and tuples are checked by the core."""
    if isinstance(tokens, (list, tuple)):
        try:
            return ffi.new("int32_t[]", tokens)  # cffi is faster than numpy for short lists
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
    """Converts node indices to int32 for C, clipped to int32's range; the core checks them."""
    nodes = np.asarray(values)
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"{what}: need a list of integers, got {nodes.dtype} {list(nodes.shape)}")
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(nodes, limits.min, limits.max), dtype=np.int32)
