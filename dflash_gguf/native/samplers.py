"""CoreSampler: samples tokens from rows of logits, in the core."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, create, ffi, new, value
from .passes import SequenceHandle

Floats = NDArray[np.float32]


class SamplerOptions(NamedTuple):
    """Settings of `dfl_sampler_params` in dflash.h; seed and sequence are taken modulo 2^64."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat: float
    presence: float
    frequency: float
    repeat_last_n: int
    seed: int
    sequence: int


class CoreSampler:
    """Sampler that keeps no state between rows, so that drafts do not change samples."""

    def __init__(
        self,
        options: SamplerOptions,
        biases: abc.Mapping[int, float] | None = None,
        banned: abc.Iterable[int] = (),
    ) -> None:
        """biases: numbers to add to logits, by token. banned: tokens that are never sampled."""
        self.options = options
        self.biases = dict(biases or {})
        self.banned = frozenset(banned)
        values = options._asdict()
        for name in ("seed", "sequence"):
            values[name] &= (1 << 64) - 1
        keep = [
            ffi.new("int32_t[]", list(self.biases)),
            ffi.new("float[]", list(self.biases.values())),
            ffi.new("int32_t[]", list(self.banned)),
        ]
        values |= {"biased": keep[0], "biases": keep[1], "n_biased": len(self.biases)}
        values |= {"banned": keep[2], "n_banned": len(keep[2])}
        self.handle = create("sampler", "sampler_create", new("dfl_sampler_params *", values))
        self.n_best = value("sampler_n_best", self.handle)

    def sample(
        self,
        logits: Floats,
        history: abc.Sequence[int],
        position: int,
        ids: NDArray[np.int32] | None = None,
    ) -> tuple[int, float]:
        """Samples a position's token. Returns the token and its margin over the second best score.

        logits: float32 [n], contiguous. history: prompt and answer so far, for penalties. ids: None
        if logits are a whole row; else the tokens of these best logits, int32 [n].
        Errors: Error for NaN or +inf in the row, no token to sample, or a bad id in the history.
        """
        token, margin = new("int32_t *"), new("double *")
        among = ffi.NULL if ids is None else ffi.from_buffer("int32_t[]", ids)
        row = ffi.from_buffer("float[]", logits)
        before = ffi.new("int32_t[]", history)
        n = (len(logits), before, len(history), position)
        call("sampler_sample", self.handle, row, among, *n, token, margin)
        return int(token[0]), float(margin[0])

    def filter(
        self, logits: Floats, history: abc.Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns the tokens that can be sampled and their logits, best first; see `sample`.

        The order is that of the row if top-k, top-p and min-p are off.
        """
        ids = np.empty(len(logits), dtype=np.int32)
        values = np.empty(len(logits), dtype=np.float32)
        n = new("int64_t *")
        before = ffi.new("int32_t[]", history)
        into = ffi.from_buffer("int32_t[]", ids), ffi.from_buffer("float[]", values)
        row = ffi.from_buffer("float[]", logits)
        call("sampler_filter", self.handle, row, len(logits), before, len(history), *into, n)
        return ids[: n[0]], values[: n[0]]


class SampleRequest(NamedTuple):
    """A request to sample along a sequence's rows of the last pass: `Engine.sample`."""

    sequence: SequenceHandle
    sampler: CoreSampler
    history: abc.Sequence[int]
    """Prompt and answer so far; may be empty if the sampler has no penalties."""
    position: int
    """Position of the first sampled token: the length of prompt and answer."""
    n_rows: int
    """Rows to sample from: 1 after an append, all nodes of a verify."""
    masks: NDArray[np.uint32] | None = None
    """Bit masks of allowed tokens, [n_rows, (n_vocab + 31) // 32]; None allows all tokens."""
