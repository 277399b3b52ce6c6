"""Proposes text that followed earlier occurrences of the current suffix: no weights, any target.

With an n-gram table it also proposes what followed in the target's answers to other prompts.

The search, and the probabilities learned from outcomes, are in csrc/speculative/suffix_index.h.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...native import MAX_VERIFY, Drafter, Error, Proposals, SuffixIndex
from ...text.stream import n_common
from ..calibration import sampling_class_of
from ..tree import Tree
from .proposer import Proposer, SpeculativeState

MAX_REMEMBERED = 1 << 17
"""Maximum tokens that a suffix index remembers; each takes about 100 bytes."""

_NO_CANDIDATES = Tree.of([-1])


class _Memory:
    """The suffix index of a sequence. n: tokens of `history` that are in the index."""

    def __init__(self, index: SuffixIndex, scope: Hashable) -> None:
        self.index = index
        self.scope = scope
        self.history: Sequence[int] = []
        self.n = 0
        self.sampling_class = ""


class SuffixProposer(Proposer):
    """Proposes continuations from a suffix index for each sequence of an engine."""

    name = "suffix"
    needs_forward = False
    max_draft = MAX_VERIFY - 1

    def __init__(self, max_tokens: int = MAX_REMEMBERED, ngrams: Drafter | None = None) -> None:
        """Creates the proposer. max_tokens: size of an index; a full one drops its older half."""
        self._max_tokens, self._ngrams = max_tokens, ngrams
        self._proposals = Proposals()
        self._memories: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()
        self._outcomes: dict[str, list[list[float]]] = {}

    def start(self, request: SpeculativeState) -> None:
        """Appends the prompt to the sequence's suffix index, except tokens already in the index.

        The index of a request with another scope is dropped.
        """
        memory = self._memories.get(request.sequence)
        if memory is None or memory.scope != request.scope:
            self.forget(request.sequence)
            index = SuffixIndex(self._max_tokens, self._ngrams)
            memory = self._memories[request.sequence] = _Memory(index, request.scope)
        before, now = list(memory.history[: memory.n]), list(request.history)
        n = n_common(before, now)
        if n < len(before):
            memory.index.separate()
        memory.index.append(now[n:])
        memory.history, memory.n = request.history, len(now)
        sampling_class = sampling_class_of(request.scorer.config)
        if memory.sampling_class != sampling_class:
            if memory.sampling_class:
                self._outcomes[memory.sampling_class] = memory.index.outcomes.tolist()
            if sampling_class in self._outcomes:
                memory.index.outcomes = np.array(self._outcomes[sampling_class])
            memory.sampling_class = sampling_class
        request.notes[self.name] = memory

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        """Returns a tree for each request: continuations of earlier occurrences of its suffix."""
        texts, chosen, n_positions, n_nodes = [], [], [], []
        for request in requests:
            memory: _Memory = request.notes[self.name]
            texts.append(memory.index)
            chosen.append(request.history[memory.n :])
            n_positions.append(request.n_positions)
            n_nodes.append(request.n_nodes)
        proposals = self._proposals.propose(
            texts, chosen, n_positions, n_nodes, requests[0].break_even
        )
        # Tokens of a call that was interrupted are appended again: the root of a tree is the
        # index's last token, so a missing token would make the answer wrong, and a repeated one
        # only the draft.
        for request in requests:
            request.notes[self.name].n = len(request.history)
        if proposals is None:
            return [_NO_CANDIDATES] * len(requests)
        return [Tree(*tree) if tree else _NO_CANDIDATES for tree in proposals]

    def forget(self, sequence: Any) -> None:
        """Drops the remembered text of a sequence, but keeps its acceptance counts."""
        memory = self._memories.pop(sequence, None)
        if memory is not None:
            self._outcomes[memory.sampling_class] = memory.index.outcomes.tolist()

    def to_dict(self) -> dict[str, Any]:
        """Returns counts of tried and accepted guesses, by sampling class."""
        for memory in self._memories.values():
            self._outcomes[memory.sampling_class] = memory.index.outcomes.tolist()
        return {"outcomes": self._outcomes}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Restores the counts of tried and accepted guesses from an earlier process."""
        probe, outcomes_by_class = SuffixIndex(2), {}
        for sampling_class, outcomes in stored["outcomes"].items():
            try:
                probe.outcomes = np.array(outcomes, dtype=np.float64)
            except Error as error:
                raise ValueError(str(error)) from None
            outcomes_by_class[sampling_class] = outcomes
        self._outcomes = outcomes_by_class
