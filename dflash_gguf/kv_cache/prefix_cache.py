"""Prefix cache: keeps what earlier requests computed for later ones that begin alike.

    start      attaches the longest cached prefix of its tokens to a sequence
    insert     caches a snapshot of a sequence, until its memory is needed
    park       caches a sequence that no request uses, in place until its cells are needed
    release    caches a sequence and empties it

A request that continues a parked sequence uses its cells in place, without a copy. On a CPU the
attention rows of a prefix are in cells that sequences share; when these are needed, the least
recently used are offloaded to main memory, and dropped from there. On other devices they lie in
cells of the sequence that computed them, and are offloaded when it gives them up.

A model with recurrent layers or windows can start only where a snapshot was taken, so snapshots are
taken at positions where later prompts may diverge: `PrefixHit.snapshot_positions`.
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
"""Tokens of a long prompt between two snapshots."""
MIN_BRANCH = 32
"""Tokens after the last snapshot from which another one pays where two prompts diverge."""

Tokens = NDArray[np.int32]


class EngineLike(Protocol):
    """The part of `native.Engine` that the prefix cache uses."""

    partial_prefix_ok: bool

    @property
    def n_free_cells(self) -> int:
        """Cells that neither a sequence nor a prefix has."""

    @property
    def prefix_bytes(self) -> int:
        """Bytes of main memory that prefixes take."""

    def offload(self, n_cells: int, n_bytes: int, pinned: Prefix | None = None) -> bool:
        """Frees cells that only prefixes hold; False where that takes more of main memory."""


class SequenceLike(Protocol):
    """The part of `native.Sequence` that the prefix cache uses; simulations have it too."""

    @property
    def position(self) -> int:
        """Number of tokens that the sequence holds."""

    @property
    def tokens(self) -> Tokens:
        """The tokens that the sequence holds."""

    def cells_needed(self, n: int) -> int:
        """Returns the number of free cells that n more tokens take."""

    def snapshot(self) -> Prefix:
        """Takes a snapshot of the present position."""

    def snapshot_bytes(self) -> int:
        """Returns the bytes of main memory that `snapshot` takes."""

    def attach(self, prefix: Prefix, n: int) -> None:
        """Attaches the first n tokens of a prefix, or goes back to them."""

    def reset(self) -> None:
        """Empties the sequence."""


AnySequence = TypeVar("AnySequence", bound=SequenceLike)


class PrefixHit(NamedTuple):
    """The cached prefix that was attached to a sequence."""

    n_cached: int = 0
    """Tokens that the sequence holds now."""
    n_draft_context: int = 0
    """The last of them, whose drafter K/V are there too."""
    snapshot_positions: tuple[int, ...] = ()
    """Positions at which the rest of the prompt is cut, for a snapshot at each."""

    def with_snapshot(self, position: int) -> PrefixHit:
        """Adds a position if snapshots are taken at all."""
        if not self.snapshot_positions or position in self.snapshot_positions:
            return self
        return self._replace(snapshot_positions=tuple(sorted((*self.snapshot_positions, position))))

    def next_snapshot(self, position: int, end: int) -> int:
        """Returns the first snapshot position after a position, or `end`."""
        return next((stop for stop in self.snapshot_positions if stop > position), end)


class _Node:
    """A node of the radix tree, where texts diverge or a prefix ends."""

    __slots__ = ("children", "edge", "parent", "prefix")

    def __init__(self, parent: _Node | None, edge: Tokens) -> None:
        """edge: tokens from the parent's end on."""
        self.parent = parent
        self.edge = edge
        self.children: dict[int, _Node] = {}
        self.prefix: Prefix | None = None


class _Match(NamedTuple):
    """The longest cached prefix of a text."""

    node: _Node | None
    """The node whose prefix can be attached."""
    n: int
    n_common: int
    """Tokens that the text shares with some prefix, attachable or not."""


class PrefixMatch(NamedTuple):
    """Shim."""

    ids: Tokens
    tokens: Sequence[int]
    ignore: bool
    n: int


class PrefixCache:
    """The prefixes of an engine. Not for two threads at once."""

    def __init__(self, engine: EngineLike, limit: int) -> None:
        """limit: bytes of main memory."""
        self._engine = engine
        self.limit = limit
        self.parked: Callable[[], Sequence[SequenceLike]] = list
        """Returns the sequences that no request uses, the least recently used first."""
        self._root = _Node(None, np.empty(0, dtype=np.int32))
        self._used: dict[_Node, None] = {}  # those with a prefix, the least recently used first

    def __len__(self) -> int:
        return len(self._used)

    # ---- for those who run sequences

    def match(self, tokens: Sequence[int], *, ignore: bool = False) -> PrefixMatch:
        """Shim."""
        ids = np.asarray(tokens, dtype=np.int32)
        return PrefixMatch(ids, tokens, ignore, self._match(ids[: 0 if ignore else -1]).n)

    def start(
        self,
        sequence: SequenceLike,
        m: PrefixMatch,
        turn_boundaries: Sequence[int] = (),
    ) -> PrefixHit:
        """Attaches the longest cached prefix, at most len(tokens) - 1, to a sequence.

        Its previous content is cached first; tokens that both have in common stay in place.
        turn_boundaries: positions where a later prompt may diverge. ignore_prefix_cache: attaches
        nothing.
        """
        tokens, ignore_prefix_cache = m.tokens, m.ignore
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

    def nearest(self, sequences: Sequence[AnySequence], m: PrefixMatch) -> AnySequence | None:
        """Returns the sequence that holds the prefix `start` would attach, else an empty one."""
        ids, n = m.ids, m.n
        empty = None
        for sequence in sequences:
            if not sequence.position:
                empty = sequence
            elif n and _holds(sequence, ids[:n]):
                return sequence
        return empty

    def release(self, sequence: SequenceLike) -> None:
        """Caches a sequence and empties it."""
        if sequence.position:
            self.insert(sequence)
            sequence.reset()

    def park(self, sequence: SequenceLike) -> None:
        """Caches a sequence that no request uses, and empties it unless it is cached in place."""
        if sequence.position:
            self.insert(sequence)
            if self.find(sequence.tokens) is None:
                sequence.reset()

    def insert(self, sequence: SequenceLike) -> None:
        """Caches a snapshot of a sequence if there is room; may invalidate its last rows."""
        ids = np.asarray(sequence.tokens, dtype=np.int32)
        if not len(ids):
            return
        match = self._match(ids)
        if match.node is not None and match.n == len(ids):
            self._touch(match.node)
            return
        while self._engine.prefix_bytes + (cost := sequence.snapshot_bytes()) > self.limit:
            if not self._used or cost > self.limit:
                return
            self._drop(next(iter(self._used)))
        self._add(ids, sequence.snapshot())

    def n_known(self, tokens: Sequence[int]) -> int:
        """Returns the length of the prefix that `start` would attach."""
        return self._match(np.asarray(tokens[:-1], dtype=np.int32)).n

    def reserve(
        self,
        sequence: SequenceLike,
        m: PrefixMatch,
        headroom: int = 0,
    ) -> bool:
        """Frees cells for a sequence to start with these tokens, and headroom cells beside.

        Returns False if there is no room.
        """
        tokens, ignore_prefix_cache = m.tokens, m.ignore
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
        """Frees n_cells cells, the least recently used first; False if there are not so many.

        pinned: a node whose prefix stays in its cells. claimed: a parked sequence that a request is
        about to use.
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
        """Drops all prefixes."""
        while self._used:
            self._drop(next(iter(self._used)))

    def forget_text(self, tokens: Sequence[int]) -> bool:
        """Drops the prefixes that only this text begins with; False if there are none."""
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
        """Returns the prefix of exactly these tokens, or None."""
        match = self._match(np.asarray(tokens, dtype=np.int32))
        prefix = match.node.prefix if match.node is not None else None
        return prefix if prefix is not None and prefix.n_tokens == len(tokens) else None

    def make_host_room(self, n_bytes: int) -> bool:
        """Drops the least recently used until n_bytes fit in the limit; False if they cannot."""
        while self._used and n_bytes <= self.limit < self._engine.prefix_bytes + n_bytes:
            self._drop(next(iter(self._used)))
        return self._engine.prefix_bytes + n_bytes <= self.limit

    def add(self, tokens: Sequence[int], prefix: Prefix) -> None:
        """Caches a prefix that `make_host_room` made room for."""
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
                best, n_best = below, at
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
        node.prefix = prefix
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
