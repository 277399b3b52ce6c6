"""A batch: the rows of several requests that one pass of the target computes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..native import BatchEntry
from ..native import Sequence as KvSequence
from ..sampling.sampler import masked
from ..speculative.cost_model import Round
from ..speculative.speculator import Speculator
from ..speculative.tree import Tree
from .request import RequestState
from .stats import Phase


class ScheduledEntry:
    """A request's part of a batch: its rows, and the tokens sampled from them.

    is_decoding: True if the rows are the last token and its candidates, False for a prefill chunk.
    samples: True if a token is sampled from the last row. sequence: KV sequence of the rows, kept
    even if the request loses it. position, n_tokens: lengths of the sequence and of the answer
    before the batch. masks: bit masks of the tokens that the constraint allows after each sampled
    row, uint32 [n_rows, n_words]; None if the answer is free. path: accepted nodes of the tree,
    root first. n_accepted: accepted candidates.
    """

    __slots__ = (
        "is_decoding",
        "masks",
        "n_accepted",
        "n_tokens",
        "path",
        "position",
        "rows",
        "samples",
        "sequence",
        "state",
        "tree",
    )

    def __init__(
        self,
        state: RequestState,
        rows: BatchEntry,
        tree: Tree | None = None,
        *,
        is_decoding: bool = True,
        samples: bool = True,
    ) -> None:
        """Creates a batch entry. tree: the candidate tree if `rows` is a verify, else None."""
        self.state, self.rows, self.tree = state, rows, tree
        self.is_decoding, self.samples = is_decoding, samples
        self.sequence: KvSequence = state.sequence
        self.position: int = self.sequence.position
        self.n_tokens = len(state.output.tokens)
        self.masks: NDArray[np.uint32] | None = None
        self.path: list[int] = []
        self.n_accepted = 0

    @property
    def cells_needed(self) -> int:
        """Number of free K/V cells that this request's rows in the pass will take."""
        return int(self.sequence.cells_needed(len(self.rows.tokens)))

    @property
    def end(self) -> int:
        """Length of the sequence after an append of the entry's rows."""
        return self.position + len(self.rows.tokens)

    @property
    def tokens(self) -> list[int]:
        """Tokens that the batch added to the answer of this entry's request."""
        return self.state.output.tokens[self.n_tokens :]

    def allowed(self, row: NDArray[np.float32], index: int) -> NDArray[np.float32]:
        """Returns the logits of row `index`, with -inf for tokens that the constraint forbids."""
        return row if self.masks is None else masked(row, self.masks[index])


class Batch:
    """The entries of one pass, the drafts made for it, its times, and newly admitted requests."""

    def __init__(self) -> None:
        self.admitted: list[RequestState] = []
        self.entries: list[ScheduledEntry] = []
        self.drafts: list[tuple[Speculator, Round]] = []
        self.n_decoding = self.n_prefilled = 0
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds of the batch by phase."""

    @property
    def verifies(self) -> bool:
        """True if any entry of the batch verifies candidates."""
        return any(entry.tree is not None for entry in self.entries)

    def phase(self, name: str) -> Phase:
        """Returns a context manager that adds its duration to a phase of the batch."""
        return Phase(self.seconds, name)


def decode_entry(state: RequestState, *, verifies: bool) -> ScheduledEntry:
    """Builds a request's entry: a verify if it has a tree or verifies is True, else an append."""
    tree = state.tree
    if tree is None and not verifies:
        return ScheduledEntry(state, BatchEntry(state.sequence, state.history[-1:]))
    tree = tree or Tree.of(state.history[-1:])
    parents: Sequence[int] | None = None if tree.is_chain else tree.parents
    return ScheduledEntry(state, BatchEntry(state.sequence, tree.tokens, True, parents), tree)
