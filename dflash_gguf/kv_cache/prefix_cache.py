"""What answers left behind for others that begin alike: a tree of prefixes, bounded in bytes.

    begin    a sequence starts with the longest prefix that is known of its tokens
    keep     what a sequence holds is known from now on, until others want its place
    rest     a sequence that nobody uses holds what it held, until others want its cells

Who goes on with what a resting sequence holds does so in place, without a copy. On a CPU the
attention rows of a prefix are in cells that sequences share; when these are wanted, the longest
unused go to main memory, and from there to nowhere. Elsewhere they lie in cells of the sequence
that computed them, and go to main memory when it gives them up.

A model with recurrent layers or windows can begin only where all of its state was kept, so that is
done at places where later prompts may part: `PrefixHit.snapshot_positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..native import Prefix

PAGE = 64
"""Cells that a sequence takes at a time, and tokens whose rows prefixes share."""
SNAPSHOT_INTERVAL = 4096
"""Tokens of a long prompt between two places where all of its state is kept."""
MIN_BRANCH = 32
"""Tokens after the last such place from which one is worth it where two prompts part."""

Tokens = NDArray[np.int32]


class EngineLike(Protocol):
    """What prefixes lie in: a `native.Engine`."""

    partial_prefix_ok: bool

    @property
    def n_free_cells(self) -> int:
        """Cells that neither a sequence nor a prefix has."""

    @property
    def prefix_bytes(self) -> int:
        """What prefixes take of main memory."""

    def offload(self, n_cells: int, n_bytes: int, pinned: Prefix | None = None) -> bool:
        """Frees cells that only prefixes hold; False where that takes more of main memory."""


class SequenceLike(Protocol):
    """A `native.Sequence`."""

    @property
    def position(self) -> int:
        """Tokens it holds."""

    @property
    def tokens(self) -> Tokens:
        """These."""

    def cells_needed(self, n: int) -> int:
        """How many free cells n more tokens take."""

    def snapshot(self) -> Prefix:
        """What it holds."""

    def snapshot_bytes(self) -> int:
        """Bytes of main memory that `keep` takes."""

    def attach(self, prefix: Prefix, n: int) -> None:
        """Begins with n tokens of a prefix, or goes back to them."""

    def reset(self) -> None:
        """Forgets all."""


AnySequence = TypeVar("AnySequence", bound=SequenceLike)


class PrefixHit(NamedTuple):
    """How a sequence begins."""

    n_cached: int = 0
    """Tokens that it holds now."""
    n_draft_context: int = 0
    """The last of them, that the drafter remembers too."""
    snapshot_positions: tuple[int, ...] = ()
    """Positions after which `keep` is to be called, while the others are computed."""

    def with_snapshot(self, position: int) -> PrefixHit:
        """With one more of these, where there are some."""
        if not self.snapshot_positions or position in self.snapshot_positions:
            return self
        return self._replace(snapshot_positions=tuple(sorted((*self.snapshot_positions, position))))

    def next_snapshot(self, position: int, end: int) -> int:
        """Where tokens that are computed from a position on are to be cut."""
        return next((stop for stop in self.snapshot_positions if stop > position), end)


class _Node:
    """Where texts part, or a prefix ends."""

    __slots__ = ("children", "edge", "n_verified_finite", "parent", "prefix")

    def __init__(self, parent: _Node | None, edge: Tokens) -> None:
        """edge: tokens from the parent's end on."""
        self.parent = parent
        self.edge = edge
        self.children: dict[int, _Node] = {}
        self.prefix: Prefix | None = None
        self.n_verified_finite = 0


class _Match(NamedTuple):
    """What the tree knows of a text."""

    node: _Node | None
    """Whose prefix is to be begun with."""
    n: int
    n_common: int
    """Tokens that some prefix begins with, though it may be of no use."""


class PrefixCache:
    """The prefixes of an engine. Not for two threads at once."""

    def __init__(self, engine: EngineLike, limit: int) -> None:
        """limit: bytes of main memory."""
        self._engine = engine
        self.limit = limit
        self.parked: Callable[[], Sequence[SequenceLike]] = list
        """Gives the sequences that nobody uses, the longest unused first."""
        self._root = _Node(None, np.empty(0, dtype=np.int32))
        self._used: dict[_Node, None] = {}  # those with a prefix, the longest unused first

    def __len__(self) -> int:
        return len(self._used)

    # ---- for those who run sequences

    def start(
        self,
        sequence: SequenceLike,
        tokens: Sequence[int],
        turn_boundaries: Sequence[int] = (),
        *,
        ignore_prefix_cache: bool = False,
    ) -> PrefixHit:
        """A sequence begins with what is known of tokens, all but the last of them at most.

        What it held is kept; of that, what these tokens begin with stays where it is.
        turn_boundaries: positions where a later text may part from this one. ignore_prefix_cache:
        it begins with nothing.
        """
        if sequence.position and self.find(sequence.tokens) is None:
            self.insert(sequence)
        ids = np.asarray(tokens, dtype=np.int32)
        match = self._match(ids[: 0 if ignore_prefix_cache else -1])
        n, n_draft = 0, 0
        if match.node is None or match.node.prefix is None:
            _empty(sequence)
        else:
            self._touch(match.node)
            n = self._begin_with(sequence, match.node, match.node.prefix, ids[: match.n])
            info = match.node.prefix.info()
            n_draft = max(0, int(info.n_draft) - (int(info.n_tokens) - n)) if n else 0
        return PrefixHit(
            n, n_draft, self._snapshot_positions(n, match.n_common, len(ids), turn_boundaries)
        )

    def nearest(
        self, sequences: Sequence[AnySequence], tokens: Sequence[int]
    ) -> AnySequence | None:
        """Of some sequences that which holds what `begin` would begin with, else an empty one."""
        ids = np.asarray(tokens[:-1], dtype=np.int32)
        n = self._match(ids).n
        empty = None
        for sequence in sequences:
            if not sequence.position:
                empty = sequence
            elif n and _holds(sequence, ids[:n]):
                return sequence
        return empty

    def release(self, sequence: SequenceLike) -> None:
        """Keeps what a sequence holds, and empties it."""
        if sequence.position:
            self.insert(sequence)
            sequence.reset()

    def park(self, sequence: SequenceLike) -> None:
        """Keeps what a sequence holds, which nobody uses now: where it is, if it is known there."""
        if sequence.position:
            self.insert(sequence)
            if self.find(sequence.tokens) is None:
                sequence.reset()

    def insert(self, sequence: SequenceLike) -> None:
        """Keeps what a sequence holds, if there is room; rows of its last pass may be gone."""
        ids = np.asarray(sequence.tokens, dtype=np.int32)
        if not len(ids):
            return
        match = self._match(ids)
        if match.node is not None and match.n == len(ids) <= match.node.n_verified_finite:
            self._touch(match.node)
            return
        while self._engine.prefix_bytes + (cost := sequence.snapshot_bytes()) > self.limit:
            if not self._used or cost > self.limit:
                return
            self._drop(next(iter(self._used)))
        self._add(ids, sequence.snapshot())

    def n_known(self, tokens: Sequence[int]) -> int:
        """How many of these a sequence would begin with."""
        return self._match(np.asarray(tokens[:-1], dtype=np.int32)).n

    def reserve(
        self,
        sequence: SequenceLike,
        tokens: Sequence[int],
        headroom: int = 0,
        *,
        ignore_prefix_cache: bool = False,
    ) -> bool:
        """Makes room for a sequence to hold all of these from `begin` on, and spare cells beside.

        Whether there is.
        """
        ids = np.asarray(tokens, dtype=np.int32)
        match = self._match(ids[: 0 if ignore_prefix_cache else -1])
        if match.n and _holds(sequence, ids[: match.n]):
            goes_back = PAGE if match.n < sequence.position else 0
            more = sequence.cells_needed(max(0, len(ids) - sequence.position))
            if self.make_room(more + goes_back + headroom, match.node, sequence):
                return True
        wanted = (-(-len(tokens) // PAGE) - -(-match.n // PAGE)) * PAGE + headroom
        if match.node is None or match.node.prefix is None:
            return self.make_room(wanted)
        self._touch(match.node)
        return self.make_room(match.node.prefix.cells_needed(match.n) + wanted, match.node)

    def make_room(
        self, n_cells: int, pinned: _Node | None = None, claimed: SequenceLike | None = None
    ) -> bool:
        """Frees cells, the longest unused first, until there are so many; whether there are.

        pinned: stays where it is. claimed: a resting sequence that somebody is about to use.
        """
        if self._engine.n_free_cells >= n_cells:
            return True
        for sequence in self.parked():
            if sequence is not claimed:
                _empty(sequence)  # what is kept of it moves, where it is in nobody's cells else
                if self._engine.n_free_cells >= n_cells:
                    return True
        stays = None if pinned is None else pinned.prefix
        while (missing := n_cells - self._engine.n_free_cells) > 0:
            room = max(0, self.limit - self._engine.prefix_bytes)
            if self._engine.offload(missing, room, stays):
                break
            oldest = next((node for node in self._used if node is not pinned), None)
            if oldest is None:
                break
            self._drop(oldest)  # for its memory, or its cells
        return self._engine.n_free_cells >= n_cells

    def forget(self) -> None:
        """Forgets all."""
        while self._used:
            self._drop(next(iter(self._used)))

    def forget_unverified(self) -> None:
        """Forgets those that nothing finite was computed after, as one that was not has been."""
        for node in list(self._used):
            if node.prefix is not None and node.n_verified_finite < node.prefix.n_tokens:
                self._drop(node)

    def forget_text(self, tokens: Sequence[int]) -> bool:
        """Forgets the prefixes that a text begins with, where no others do; whether there were."""
        match = self._match(np.asarray(tokens, dtype=np.int32))
        node, n_before = match.node, len(self._used)
        while node is not None and not node.children and node.parent is not None:
            parent = node.parent
            if node.prefix is not None:
                self._drop(node)
            node = parent
        return len(self._used) < n_before

    # ---- for those who save and load

    def find(self, tokens: Sequence[int] | Tokens) -> Prefix | None:
        """The prefix of just these tokens."""
        match = self._match(np.asarray(tokens, dtype=np.int32))
        prefix = match.node.prefix if match.node is not None else None
        return prefix if prefix is not None and prefix.n_tokens == len(tokens) else None

    def make_host_room(self, n_bytes: int) -> bool:
        """Forgets the longest unused until so many bytes may be taken; whether they may."""
        while self._used and n_bytes <= self.limit < self._engine.prefix_bytes + n_bytes:
            self._drop(next(iter(self._used)))
        return self._engine.prefix_bytes + n_bytes <= self.limit

    def add(self, tokens: Sequence[int], prefix: Prefix) -> None:
        """Takes in a prefix that room was made for."""
        self._add(np.asarray(tokens, dtype=np.int32), prefix)

    # ---- places where all of a state is kept

    def _snapshot_positions(
        self, n: int, n_common: int, end: int, turn_boundaries: Sequence[int]
    ) -> tuple[int, ...]:
        if self._engine.partial_prefix_ok:
            return ()
        wanted = {
            end - 1,
            *turn_boundaries,
            *range(n + SNAPSHOT_INTERVAL, end - MIN_BRANCH, SNAPSHOT_INTERVAL),
        }
        if n_common >= n + MIN_BRANCH:
            wanted.add(n_common)
        return tuple(sorted(stop for stop in wanted if n < stop < end))

    # ---- the tree

    def _match(self, ids: Tokens) -> _Match:
        """The longest prefix that can be begun with."""
        node, at = self._root, 0
        best, n_best = None, 0
        below = None
        while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
            n = _n_common(child.edge, ids[at:])
            at += n
            below = child
            if n < len(child.edge):
                break
            node = child
            if node.prefix is not None:
                best, n_best = node, at
        if self._engine.partial_prefix_ok and below is not None and at > n_best:
            while below.prefix is None and below.children:
                below = below.children[next(reversed(below.children))]
            if below.prefix is not None:  # an interruption may leave a leaf without one
                n = at if at in (below.prefix.n_tokens,) else min(at, below.n_verified_finite)
                if n > n_best:
                    best, n_best = below, n
        return _Match(best, n_best, at)

    def _add(self, ids: Tokens, prefix: Prefix) -> None:
        node, at = self._root, 0
        covered: list[_Node] = []
        while at < len(ids):
            if self._engine.partial_prefix_ok and node.prefix is not None:
                covered.append(node)  # the new one can do all that it can
            child = node.children.get(int(ids[at]))
            if child is None:
                child = _Node(node, ids[at:].copy())
                node.children[int(ids[at])] = child
            n = _n_common(child.edge, ids[at:])
            if n < len(child.edge):
                child = _split(child, n)
            node, at = child, at + n
        if node.prefix is not None:
            self._close(node)
        node.prefix, node.n_verified_finite = prefix, int(prefix.info().n_verified_finite)
        self._touch(node)
        for node in covered:
            self._drop(node)

    def _touch(self, node: _Node) -> None:
        self._used.pop(node, None)
        self._used[node] = None

    def _close(self, node: _Node) -> None:
        assert node.prefix is not None
        self._used.pop(node, None)
        node.prefix.close()
        node.prefix = None

    def _drop(self, node: _Node) -> None:
        self._close(node)
        while node.parent is not None and node.prefix is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and node.prefix is None and len(node.children) == 1:
            _join(node)

    # ---- cells

    def _begin_with(self, sequence: SequenceLike, node: _Node, prefix: Prefix, ids: Tokens) -> int:
        """As many of these, which a prefix begins with, as there are cells for."""
        n = len(ids)
        if _holds(sequence, ids):
            goes_back = PAGE if n < sequence.position else 0
            if self.make_room(goes_back, node, sequence):
                sequence.attach(prefix, n)
                return n
        _empty(sequence)
        ends = (n, n - n % PAGE) if self._engine.partial_prefix_ok else (n,)
        for end in ends:
            if end and self.make_room(prefix.cells_needed(end), node, sequence):
                sequence.attach(prefix, end)
                return end
        return 0

    def __iter__(self) -> Iterator[Prefix]:
        return (node.prefix for node in self._used if node.prefix is not None)


def _empty(sequence: SequenceLike) -> None:
    if sequence.position:
        sequence.reset()


def _holds(sequence: SequenceLike, ids: Tokens) -> bool:
    """Whether a sequence begins with these."""
    return sequence.position >= len(ids) and bool((sequence.tokens[: len(ids)] == ids).all())


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split(node: _Node, n: int) -> _Node:
    """A new node after n tokens of a node's edge, in its place."""
    parent = node.parent
    assert parent is not None
    middle = _Node(parent, node.edge[:n].copy())
    parent.children[int(node.edge[0])] = middle
    middle.children[int(node.edge[n])] = node
    node.parent, node.edge = middle, node.edge[n:].copy()
    return middle


def _join(node: _Node) -> None:
    """Makes a node's only child reach up to its parent."""
    (child,) = node.children.values()
    parent = node.parent
    assert parent is not None
    child.edge = np.concatenate([node.edge, child.edge])
    child.parent = parent
    parent.children[int(node.edge[0])] = child
