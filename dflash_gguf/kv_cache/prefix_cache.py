"""Prefix cache: reuses K/V and recurrent states of earlier requests for prompts that begin alike.

    match      finds the longest cached prefix of a text
    start      attaches a match to a sequence
    insert     caches a snapshot of a sequence until the memory is needed
    park       caches a sequence that no request uses, in place until its cells are needed
    release    caches a sequence and empties it

A request that continues a parked sequence uses its cells in place, without a copy. On a CPU,
prefixes share pages of cells; if cells run out, the least recently used prefixes are offloaded to
main memory, and dropped from there. On other devices, prefixes lie in cells of the sequence that
computed them, and are offloaded when the sequence gives up these cells.
Every text has a scope, such as a server's API key, and is found by texts of the same scope alone.
Models with recurrent layers or windows can start only at a snapshot; snapshots are taken at
positions where later prompts may diverge: `PrefixHit.snapshot_positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..native import PAGE, Prefix

SNAPSHOT_INTERVAL = 4096
"""Distance in tokens between two snapshots of a long prompt."""
MIN_BRANCH = 32
"""Minimum tokens after the last snapshot for another snapshot where two prompts diverge."""

Tokens = NDArray[np.int32]


class EngineLike(Protocol):
    """The members of `native.Engine` that the prefix cache uses."""

    partial_prefix_ok: bool

    @property
    def n_free_cells(self) -> int:
        """Number of cells that no sequence and no prefix holds."""

    @property
    def prefix_bytes(self) -> int:
        """Bytes of main memory that all prefixes take."""

    def offload(self, n_cells: int, n_bytes: int) -> bool:
        """Offloads unpinned prefixes until n_cells are free; False if n_bytes do not suffice."""


class SequenceLike(Protocol):
    """The members of `native.Sequence` that the prefix cache uses; simulations have them too."""

    @property
    def position(self) -> int:
        """Number of tokens that the sequence holds."""

    @property
    def tokens(self) -> Tokens:
        """Token ids that the sequence holds."""

    def cells_needed(self, n: int) -> int:
        """Returns the number of free cells that n more tokens take."""

    def snapshot(self) -> Prefix:
        """Takes a snapshot of the sequence at its current position."""

    def snapshot_bytes(self) -> int:
        """Returns the bytes of main memory that a snapshot of the sequence takes."""

    def attach(self, prefix: Prefix, n: int) -> None:
        """Attaches a prefix's first n tokens; cuts a sequence that begins with them after them."""

    def reset(self) -> None:
        """Removes all tokens from the sequence."""


AnySequence = TypeVar("AnySequence", bound=SequenceLike)


class PrefixHit(NamedTuple):
    """The cached prefix that a request starts with."""

    n_cached: int = 0
    """Number of tokens that the sequence already holds."""
    n_draft_context: int = 0
    """Number of the last cached tokens for which the drafter's K/V are cached too."""
    snapshot_positions: tuple[int, ...] = ()
    """Positions in the rest of the prompt where prefill chunks end, for a snapshot at each."""

    def with_snapshot(self, position: int) -> PrefixHit:
        """Returns the prefix hit with one more snapshot position; a hit without any needs none."""
        if not self.snapshot_positions or position in self.snapshot_positions:
            return self
        return self._replace(snapshot_positions=tuple(sorted((*self.snapshot_positions, position))))

    def next_snapshot(self, position: int, end: int) -> int:
        """Returns the first snapshot position after `position`, or `end`."""
        return next((stop for stop in self.snapshot_positions if stop > position), end)


class _Node:
    """A node of the radix tree of cached texts: a branch, or the end of a prefix."""

    __slots__ = ("children", "edge", "parent", "prefix")

    def __init__(self, parent: _Node | None, edge: Tokens) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[int, _Node] = {}
        self.prefix: Prefix | None = None


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a text, as found by a search."""

    ids: Tokens
    """Token ids of the searched text."""
    end: int
    """Maximum tokens of the text that may be attached to a sequence."""
    node: _Node | None
    """The radix tree's node whose prefix can be attached."""
    n: int
    """Number of tokens that can be attached to a sequence."""
    n_common: int
    """Number of tokens that the text shares with a cached text, attachable or not."""
    scope: Hashable = ""
    """The scope that was searched."""

    @property
    def prefix(self) -> Prefix | None:
        """The prefix that can be attached; None also if it was dropped after the search."""
        return None if self.node is None else self.node.prefix


class PrefixCache:
    """The cached prefixes of an engine, in a radix tree over tokens. Not thread-safe."""

    def __init__(self, engine: EngineLike, limit: int) -> None:
        """Creates an empty cache. limit: bytes of main memory for prefixes."""
        self._engine = engine
        self.limit = limit
        self.parked: Callable[[], Sequence[SequenceLike]] = list
        """Callback that returns the sequences no request uses, least recently used first."""
        self._roots: dict[Hashable, _Node] = {}
        self._scopes: WeakKeyDictionary[SequenceLike, Hashable] = WeakKeyDictionary()
        # Nodes with a prefix, and nodes whose prefix is pinned in cells; least recently used first.
        self._used: dict[_Node, None] = {}
        self._in_cells: dict[_Node, None] = {}

    def __len__(self) -> int:
        return len(self._used)

    def match(
        self, tokens: Sequence[int] | Tokens, scope: Hashable = "", limit: int | None = None
    ) -> PrefixMatch:
        """Returns the longest prefix that a scope has cached, at most len(tokens) - 1 tokens.

        limit: maximum tokens of the prefix, None for no other limit.
        """
        end = len(tokens) - 1
        return self._match(tokens, end if limit is None else min(limit, end), scope)

    def start(
        self, sequence: SequenceLike, match: PrefixMatch, turn_boundaries: Sequence[int] = ()
    ) -> PrefixHit:
        """Attaches a matched prefix to a sequence, whose previous content is cached first.

        Tokens shared with the match stay. The sequence gets the scope of the match.
        turn_boundaries: where later prompts may diverge.
        """
        is_gone = match.node is not None and match.prefix is None
        if sequence.position and not self._is_cached(sequence):
            self.insert(sequence)
            is_gone = True
        if is_gone:
            match = self._match(match.ids, match.end, match.scope)
        self._scopes[sequence] = match.scope
        n, n_draft = 0, 0
        if match.prefix is None:
            _empty(sequence)
        else:
            n = self._attach(sequence, match, match.prefix)
            n_draft = max(0, match.prefix.n_draft - (match.prefix.n_tokens - n)) if n else 0
        stops = self._snapshot_positions(n, match.n_common, len(match.ids), turn_boundaries)
        return PrefixHit(n, n_draft, stops)

    def nearest(self, sequences: Sequence[AnySequence], match: PrefixMatch) -> AnySequence | None:
        """Returns the sequence that already holds the matched prefix, else an empty one or None."""
        empty = None
        for sequence in sequences:
            if not sequence.position:
                empty = sequence
            elif match.n and _holds(sequence, match.ids[: match.n]):
                return sequence
        return empty

    def release(self, sequence: SequenceLike) -> None:
        """Caches a sequence's content, and empties the sequence."""
        if sequence.position:
            self.insert(sequence)
            sequence.reset()

    def park(self, sequence: SequenceLike) -> None:
        """Caches a sequence that no request uses; if it cannot be cached, empties it."""
        if sequence.position:
            self.insert(sequence)
            if not self._is_cached(sequence):
                sequence.reset()

    def insert(self, sequence: SequenceLike) -> None:
        """Caches a snapshot of a sequence if there is memory; may invalidate its last logits."""
        ids, scope = sequence.tokens, self._scopes.get(sequence, "")
        match = self._match(ids, len(ids), scope)
        if not len(ids):
            return
        if match.node is not None and match.n == len(ids):
            self._touch(match.node)
            return
        while self._engine.prefix_bytes + (cost := sequence.snapshot_bytes()) > self.limit:
            if not self._used or cost > self.limit:
                return
            self._drop(next(iter(self._used)))
        self.add(ids, sequence.snapshot(), scope)

    def reserve(self, sequence: SequenceLike, match: PrefixMatch, headroom: int = 0) -> bool:
        """Frees K/V cells to start a text in a sequence, plus headroom; False if too few."""
        n_tokens = len(match.ids)
        wanted = (-(-n_tokens // PAGE) - -(-match.n // PAGE)) * PAGE + headroom
        if match.node is None or match.prefix is None:
            return self.make_room(wanted)
        self._touch(match.node)
        if _holds(sequence, match.ids[: match.n]):
            goes_back = PAGE if match.n < sequence.position else 0
            more = sequence.cells_needed(max(0, n_tokens - sequence.position))
            if self.make_room(more + goes_back + headroom, match.node, sequence):
                return True
        return self.make_room(match.prefix.cells_needed(match.n) + wanted, match.node)

    def make_room(
        self, n_cells: int, pinned: _Node | None = None, claimed: SequenceLike | None = None
    ) -> bool:
        """Frees n_cells K/V cells, least recently used content first; False if there are too few.

        pinned: a node whose prefix stays in its cells. claimed: a parked sequence about to be used.
        """
        if self._engine.n_free_cells >= n_cells:
            return True
        for sequence in self.parked():
            if sequence is not claimed:
                _empty(sequence)  # copies rows that only this sequence holds to main memory
                if self._engine.n_free_cells >= n_cells:
                    return True
        while (missing := n_cells - self._engine.n_free_cells) > 0:
            room = max(0, self.limit - self._engine.prefix_bytes)
            has_memory = self._engine.offload(missing, room)
            if self._engine.n_free_cells >= n_cells:
                break
            # Let the oldest pinned prefix be offloaded, or without main memory drop the oldest
            # prefix.
            nodes = self._in_cells if has_memory else self._used
            oldest = next((node for node in nodes if node is not pinned), None)
            if oldest is None:
                return False
            if has_memory:
                self._set_in_cells(oldest, False)
            else:
                self._drop(oldest)
        return True

    def forget(self) -> None:
        """Drops all cached prefixes."""
        while self._used:
            self._drop(next(iter(self._used)))

    def forget_scope(self, scope: Hashable) -> None:
        """Drops all cached prefixes of a scope."""
        nodes = [self._roots.pop(scope)] if scope in self._roots else []
        for node in nodes:
            nodes += node.children.values()
            if node.prefix is not None:
                self._close(node)

    def forget_text(self, tokens: Sequence[int], scope: Hashable = "") -> bool:
        """Drops prefixes of a text that no other text of the scope shares; False if none."""
        node, n_before = self._match(tokens, len(tokens), scope).node, len(self._used)
        while node is not None and not node.children and node.parent is not None:
            parent = node.parent
            if node.prefix is not None:
                self._drop(node)
            node = parent
        return len(self._used) < n_before

    def find(self, tokens: Sequence[int] | Tokens, scope: Hashable = "") -> Prefix | None:
        """Returns the prefix of exactly these tokens that a scope has cached, or None."""
        prefix = self._match(tokens, len(tokens), scope).prefix
        return prefix if prefix is not None and prefix.n_tokens == len(tokens) else None

    def _is_cached(self, sequence: SequenceLike) -> bool:
        return self.find(sequence.tokens, self._scopes.get(sequence, "")) is not None

    def snapshots(self, tokens: Sequence[int] | Tokens, scope: Hashable = "") -> list[Prefix]:
        """Returns the cached prefix of these tokens, then the shorter snapshots of the same text.

        Shorter ones are left out if a sequence may start at any token. The list is empty if the
        scope has not cached these tokens.
        """
        node = self._match(tokens, len(tokens), scope).node
        found = []
        while node is not None:
            if node.prefix is not None:
                found.append(node.prefix)
            node = node.parent
        if not found or found[0].n_tokens != len(tokens):
            return []
        return found[:1] if self._engine.partial_prefix_ok else found

    def make_host_room(self, n_bytes: int) -> bool:
        """Drops least recently used prefixes until n_bytes fit the limit; False if they cannot."""
        while self._used and n_bytes <= self.limit < self._engine.prefix_bytes + n_bytes:
            self._drop(next(iter(self._used)))
        return self._engine.prefix_bytes + n_bytes <= self.limit

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

    def _root(self, scope: Hashable) -> _Node:
        return self._roots.setdefault(scope, _Node(None, np.empty(0, dtype=np.int32)))

    def _match(self, tokens: Sequence[int] | Tokens, end: int, scope: Hashable) -> PrefixMatch:
        text = np.asarray(tokens, dtype=np.int32)
        ids = text[: max(0, end)]
        node, at = self._root(scope), 0
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
            if below.prefix is not None:  # an interruption may leave a leaf without a prefix
                best, n_best = below, at
        return PrefixMatch(text, end, best, n_best, at, scope)

    def add(self, tokens: Sequence[int] | Tokens, prefix: Prefix, scope: Hashable = "") -> None:
        """Adds a prefix to a scope; its memory must be reserved by `make_host_room` before."""
        ids = np.asarray(tokens, dtype=np.int32)
        node, at = self._root(scope), 0
        covered: list[_Node] = []
        while at < len(ids):
            if self._engine.partial_prefix_ok and node.prefix is not None:
                covered.append(node)  # the longer new prefix makes this prefix redundant
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
        self._set_in_cells(node, True)

    def _set_in_cells(self, node: _Node, is_in_cells: bool) -> None:
        """Pins a prefix's pages in cells, or lets them be offloaded."""
        assert node.prefix is not None
        self._in_cells.pop(node, None)
        if is_in_cells:
            self._in_cells[node] = None
        node.prefix.keep_in_cells(is_in_cells)

    def _close(self, node: _Node) -> None:
        assert node.prefix is not None
        self._used.pop(node, None)
        self._in_cells.pop(node, None)
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

    def _attach(self, sequence: SequenceLike, match: PrefixMatch, prefix: Prefix) -> int:
        node, n = match.node, match.n
        assert node is not None
        self._touch(node)
        if _holds(sequence, match.ids[:n]):
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
    return sequence.position >= len(ids) and bool((sequence.tokens[: len(ids)] == ids).all())


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split(node: _Node, n: int) -> _Node:
    parent = node.parent
    assert parent is not None
    middle = _Node(parent, node.edge[:n].copy())
    parent.children[int(node.edge[0])] = middle
    middle.children[int(node.edge[n])] = node
    node.parent, node.edge = middle, node.edge[n:].copy()
    return middle


def _join(node: _Node) -> None:
    (child,) = node.children.values()
    parent = node.parent
    assert parent is not None
    child.edge = np.concatenate([node.edge, child.edge])
    child.parent = parent
    parent.children[int(node.edge[0])] = child
