"""A sequence that says a script, its engine, and its answers as run by the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_gguf import native
from dflash_gguf.config import DecodeConfig
from dflash_gguf.engine.request import Request
from dflash_gguf.engine.scheduler import Scheduler
from dflash_gguf.kv_cache.prefix_cache import PrefixCache
from dflash_gguf.native import BatchEntry, Progress, SampleRequest
from dflash_gguf.outputs import Result, Step
from dflash_gguf.speculative.controller import Controller
from dflash_gguf.speculative.proposers.proposer import Proposer
from dflash_gguf.speculative.tree import Tree

N_VOCAB = 300
STOP = 256
N_TOP = 64
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Bytes:
    """A vocabulary: token i < 256 is byte i, others are control tokens; 256 and 257 are EOS."""

    stop_tokens = frozenset({STOP, STOP + 1})
    suppressed_tokens: frozenset[int] = frozenset()

    def piece(self, token: int, *, special: bool = False) -> bytes:  # noqa: ARG002
        return bytes([token]) if token < 256 else b""


class Rows:
    def __init__(self, engine: Engine, rows: Sequence[Floats]) -> None:
        self._engine, self._rows = engine, rows
        self.n_fetched = 0

    def __len__(self) -> int:
        return len(self._rows)

    def check(self) -> None:
        assert np.isfinite(self._rows).all()

    @property
    def has_top(self) -> bool:
        return self._engine.n_top > 0

    def argmax(self, index: int = -1) -> int:
        return int(self._rows[index].argmax())

    def top(self, index: int = -1) -> tuple[Any, Floats]:
        ids = np.argsort(-self._rows[index], kind="stable")[:N_TOP].astype(np.int32)
        return ids, self._rows[index][ids]

    def logits(self, index: int = -1) -> Floats:
        self.n_fetched += 1
        return self._rows[index]

    def gather(self, indices: Sequence[int]) -> Floats:
        return np.stack([self.logits(index) for index in indices])


def drawn_of(rows: Rows, node: int, walk: SampleRequest, seen: list[int], position: int) -> int:
    """Samples from a row, and fetches all its logits only if the engine would have to."""
    sampler, config = walk.sampler, walk.sampler.options
    penalties = (config.repeat, config.presence, config.frequency) != (1.0, 0.0, 0.0)
    changes = bool(sampler.biases) or (penalties and config.repeat_last_n > 0)
    if config.temperature == 0.0 and not changes and rows.argmax(node) not in sampler.banned:
        return rows.argmax(node)
    if rows.has_top:
        ids, logits = rows.top(node)
        with suppress(native.Error):
            return sampler.sample(logits, seen, position, ids)[0]
    return sampler.sample(rows.logits(node), seen, position)[0]


class Engine:
    n_parallel = 1
    partial_prefix_ok = True
    prefix_bytes = 0
    drafter: Any = None
    n_threads = 2

    def __init__(self, sequence: Scripted, model: Any, n_ubatch: int) -> None:
        self._sequence, self.model = sequence, model
        self.config = SimpleNamespace(n_ubatch=n_ubatch)
        self.n_ctx = self.n_free_cells = sequence.n_ctx
        self.max_verify = 256
        self.n_top = 0
        self.max_top_k = 0
        self.cpu_operations: list[str] = []

    def set_top_k(self, k: int) -> bool:
        assert k in (0, self.max_top_k)
        self.n_top = k
        return k > 0

    def offload(self, *_: Any) -> bool:
        return True

    def reserve_verify(self, n: int) -> None:
        assert not self._sequence.open
        self.max_verify = max(self.max_verify, n)

    def run(self, items: Sequence[BatchEntry]) -> list[Rows]:
        (item,) = items
        if item.is_verify:
            return [self._sequence.verify_tree(item.tokens, item.parents)]
        self._sequence.append(item.tokens)
        return [Rows(self, []) if item.n_remaining else self._sequence.last_row()]

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[int]]:
        return [self._walk(walk) for walk in requests]

    def _walk(self, walk: SampleRequest) -> list[int]:
        sequence = self._sequence
        tree = Tree.of(sequence.open, sequence.parents) if sequence.open else Tree.of([-1])
        assert walk.n_rows == len(sequence.rows[-1]) == len(tree)
        seen: list[int] = list(walk.history)
        drawn: list[int] = []

        def choose(node: int) -> int:
            drawn.append(drawn_of(sequence.rows[-1], node, walk, seen, walk.position + len(drawn)))
            return drawn[-1]

        def take(token: int) -> bool:
            seen.append(token)
            return False

        with suppress(native.Error):
            tree.follow(choose, take)
        return drawn

    def commit(self, paths: Sequence[tuple[Any, Sequence[int] | int]]) -> None:
        ((_, nodes),) = paths
        self._sequence.commit_path(range(nodes) if isinstance(nodes, int) else nodes)

    def close(self) -> None:
        pass


class Kept:
    n_draft = 0

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.n_tokens = len(tokens)

    def keep_in_cells(self, _keeps: bool) -> None:
        pass

    def cells_needed(self, n: int) -> int:  # noqa: ARG002
        return 0

    def close(self) -> None:
        self.tokens = []


class Scripted:
    """A sequence that says the bytes of a script, then STOP, whatever its input.

    Logits below the best depend on the whole path. `left` holds the tokens before the last reset.
    """

    def __init__(
        self,
        script: Sequence[int],
        n_ctx: int = 64,
        n_prompt: int = 3,
        model: Any = None,
        n_ubatch: int = 1,
    ) -> None:
        self.script = list(script)
        self.n_ctx = n_ctx
        self.n_prompt = n_prompt
        if model is None:
            model = SimpleNamespace(backend="CPU")
        self.engine = Engine(self, model, n_ubatch)
        self.tokens: list[int] = []
        self.held: list[int] = []
        self.open: list[int] = []
        self.parents: list[int] = []
        self.rows: list[Rows] = []
        self.verified: list[int] = []
        self.n_closed = 0

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def left(self) -> list[int]:
        return self.tokens or self.held

    def row(self, path: Sequence[int]) -> Floats:
        rng = np.random.default_rng(path)
        logits = rng.standard_normal(N_VOCAB).astype(np.float32)
        spoken = len(path) - self.n_prompt
        logits[self.script[spoken] if 0 <= spoken < len(self.script) else STOP] = 9.0
        return logits

    def _rows(self, paths: Sequence[Sequence[int]]) -> Rows:
        self.rows.append(Rows(self.engine, [self.row(path) for path in paths]))
        return self.rows[-1]

    def cells_needed(self, n: int) -> int:  # noqa: ARG002
        return 0

    def snapshot_bytes(self) -> int:
        return 0

    def snapshot(self) -> Kept:
        assert not self.open
        return Kept(self.tokens)

    def attach(self, prefix: Kept, n: int) -> None:
        assert not self.tokens or self.tokens[:n] == prefix.tokens[:n]
        self.tokens = prefix.tokens[:n]

    def reset(self) -> None:
        assert not self.open
        self.held = self.tokens or self.held
        self.tokens = []

    def close(self) -> None:
        self.n_closed += 1

    def append(self, tokens: Sequence[int]) -> None:
        assert not self.open
        assert self.position + len(tokens) <= self.n_ctx
        self.tokens += tokens

    def last_row(self) -> Rows:
        return self._rows([self.tokens])

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int] | None) -> Rows:
        parents = range(-1, len(tokens) - 1) if parents is None else parents
        assert not self.open
        assert len(parents) == len(tokens) <= self.engine.max_verify
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert self.position + len(tokens) <= self.n_ctx
        self.open, self.parents = list(tokens), list(parents)
        self.verified.append(len(tokens))
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else self.tokens), token])
        return self._rows(paths)

    def commit(self, n: int) -> None:
        self.commit_path(range(n))

    def commit_path(self, nodes: Sequence[int]) -> None:
        assert [self.parents[node] for node in nodes] == [-1, *nodes[:-1]][: len(nodes)]
        self.tokens += [self.open[node] for node in nodes]
        self.open = []


class Said:
    """An answer of a scripted sequence: iterate over its steps."""

    def __init__(
        self,
        sequence: Any,
        prompt: Sequence[int],
        config: DecodeConfig,
        *,
        vocabulary: Any = None,
        proposers: Sequence[Proposer] = (),
        controller: Controller | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> None:
        cache = PrefixCache(sequence.engine, 1 << 20)
        self.scheduler = Scheduler(sequence, cache, vocabulary or Bytes())
        request = Request(tuple(prompt), config)
        self.state = self.scheduler.add_request(
            request, proposers, controller, cancelled, on_prefill
        )
        self.history = self.state.history

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        while not self.state.steps:
            if self.state.error is not None:
                raise self.state.error
            if self.state.is_finished:
                raise StopIteration
            self.scheduler.step()
        return self.state.steps.pop(0)

    def close(self) -> None:
        self.scheduler.abort(self.state)

    def result(self) -> Result:
        return self.state.result()
