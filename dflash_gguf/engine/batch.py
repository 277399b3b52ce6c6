"""One batch: the rows that requests have in one pass of the target."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..native import BatchEntry
from ..native import Sequence as KvSequence
from ..speculative.cost_model import Round
from ..speculative.speculator import Speculator
from ..speculative.tree import Tree
from .request import RequestState
from .stats import Phase


class ScheduledEntry:
    """One request's part of a batch: its rows, and what was sampled from them.

    is_decoding: the rows are the last token and its candidates; else a prefill. samples: a token is
    sampled from the last row. sequence: also where the state has given it up. position,
    n_tokens: lengths of the sequence and of the answer before the batch. path: accepted nodes of
    the tree, root first. n_accepted: accepted candidates.
    """

    __slots__ = (
        "is_decoding",
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
        """tree: nodes to verify, as rows has them; None for an append."""
        self.state, self.rows, self.tree = state, rows, tree
        self.is_decoding, self.samples = is_decoding, samples
        self.sequence: KvSequence = state.sequence
        self.position: int = self.sequence.position
        self.n_tokens = len(state.output.tokens)
        self.path: list[int] = []
        self.n_accepted = 0

    @property
    def cells_needed(self) -> int:
        """Free cells that its rows take."""
        return int(self.sequence.cells_needed(len(self.rows.tokens)))

    @property
    def end(self) -> int:
        """Length of the sequence after an append."""
        return self.position + len(self.rows.tokens)

    @property
    def tokens(self) -> list[int]:
        """Sampled tokens that joined the answer."""
        return self.state.output.tokens[self.n_tokens :]


class Batch:
    """Entries of one pass, the drafts made for it, and its clock.

    admitted: requests that got a sequence for it.
    """

    def __init__(self) -> None:
        self.admitted: list[RequestState] = []
        self.entries: list[ScheduledEntry] = []
        self.drafts: list[tuple[Speculator, Round]] = []
        self.n_decoding = self.n_prefilled = 0
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""

    @property
    def verifies(self) -> bool:
        """True if the pass has rows to verify."""
        return any(entry.tree is not None for entry in self.entries)

    def phase(self, name: str) -> Phase:
        """Adds the time of a with block to a phase."""
        return Phase(self.seconds, name)


def decode_entry(state: RequestState, *, verifies: bool) -> ScheduledEntry:
    """The next round of a decoding request; verifies: verify its last token even without a tree."""
    tree = state.tree
    if tree is None and not verifies:
        return ScheduledEntry(state, BatchEntry(state.sequence, state.history[-1:]))
    tree = tree or Tree.of(state.history[-1:])
    parents: Sequence[int] | None = None if tree.is_chain else tree.parents
    return ScheduledEntry(state, BatchEntry(state.sequence, tree.tokens, True, parents), tree)
