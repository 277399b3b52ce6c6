"""Engine: caches, graphs and drafter state of a loaded model, for several sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, new, text, value
from .limits import MAX_TOP
from .load_config import LoadConfig, c_options
from .models import Drafter, Model
from .passes import BatchEntry, Draft, DraftRequest, Rows, SequenceHandle, ids_of, nodes_of
from .prefixes import Prefix
from .progress import Progress, c_callback
from .samplers import SampleRequest


class Memory(NamedTuple):
    """Bytes of one use ("kv", "arena", ...: see `dfl_memory` in dflash.h) on one device."""

    name: str
    place: str
    bytes: int


class Engine:
    """Caches and graphs of a model and its drafters. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        drafter: Drafter | Sequence[Drafter] | None = None,
        draft_window: int | None = None,
        config: LoadConfig | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """Allocates the caches and the compute buffer.

        config replaces the model's; n_ctx and draft_window replace the config's. taps: hidden
        states that `BatchEntry.all_features` gets. Error if memory is short, the device cannot
        combine the K/V types, or a tap is out of range.
        """
        config = self.config = config or model.config
        options = c_options("dfl_engine_params", config)
        options["n_ctx"] = model.n_ctx if n_ctx is None else n_ctx
        self.drafters = (drafter,) if isinstance(drafter, Drafter) else tuple(drafter or ())
        handles = new("dfl_drafter *[]", [x.handle for x in self.drafters if x.max_draft])
        options["drafters"], options["n_drafters"] = handles, len(handles)
        if draft_window is not None:
            options["draft_window"] = draft_window
        self.taps = tuple(taps)
        options["taps"], options["n_taps"] = new("int32_t[]", self.taps), len(self.taps)
        params = new("dfl_engine_params *", options)
        self.model = model
        self.max_draft = max([x.max_draft for x in self.drafters], default=0)
        self.n_top = 0
        self._handle = create("engine", "engine_create", model.handle, params)
        self._n_sequences = 0
        self._is_closed = False
        info = self.info()
        self.n_ctx = int(info.n_ctx)
        self.n_parallel = int(info.n_parallel)
        self.cell_bytes = int(info.cell_bytes)
        self.partial_prefix_ok = bool(info.partial_prefix_ok)
        self.n_threads = int(info.n_threads)
        self.max_verify = value("engine_verify_rows", self.handle)
        """Largest number of rows of a verify or draft: n drafted tokens take n + 1 rows."""

    @property
    def handle(self) -> Any:
        """The engine's C handle; raises Error after `close`."""
        if self._is_closed:
            raise Error("the engine is closed")
        return self._handle

    def close(self) -> None:
        """Closes the engine; its memory is freed once its sequences are closed too."""
        self._is_closed = True
        self.count_sequences(0)

    def count_sequences(self, change: int) -> None:
        """Counts open sequences, which keep a closed engine alive. change: +1 or -1."""
        self._n_sequences += change
        if self._is_closed and self._n_sequences == 0:
            self._handle = None

    def info(self) -> Any:
        """Returns sizes and counters, a `dfl_engine_info` of dflash.h."""
        info = new("dfl_engine_info *")
        call("engine_get_info", self.handle, info)
        return info

    def memory(self) -> list[Memory]:
        """Returns the bytes of memory by use and device."""
        uses = []
        memory = new("dfl_memory *")
        for index in range(self.info().n_memory):
            call("engine_get_memory", self.handle, index, memory)
            uses.append(Memory(text(memory.name), text(memory.place), int(memory.bytes)))
        return uses

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of memory that one use takes on all devices."""
        return sum(use.bytes for use in self.memory() if use.name == name)

    @property
    def largest_graph(self) -> str:
        """The kind of graph that determines the arena's size: "prefill", "verify" or "draft"."""
        return text(self.info().largest_graph)

    @property
    def cpu_operations(self) -> list[str]:
        """Operations that the CPU runs because the device lacks them, by ggml's names."""
        return [name for name in text(self.info().cpu_operations).split(",") if name]

    @property
    def max_top_k(self) -> int:
        """Largest k of `set_top_k`."""
        return min(MAX_TOP, self.model.n_vocab)

    def set_top_k(self, k: int) -> bool:
        """Makes later passes copy each row's k best tokens from the device instead of the row.

        k: 0 to `max_top_k`; 0 copies rows. Returns False on a CPU or if the device cannot select.
        """
        kept = new("int32_t *")
        call("engine_set_top_k", self.handle, k, kept)
        self.n_top = int(kept[0])
        return self.n_top > 0

    @property
    def n_free_cells(self) -> int:
        """K/V cells in pages that neither a sequence nor a prefix holds."""
        return value("engine_n_free_cells", self.handle)

    @property
    def prefix_bytes(self) -> int:
        """Bytes of main memory that all prefixes take."""
        return value("engine_prefix_bytes", self.handle)

    def offload(self, n_cells: int, n_bytes: int) -> bool:
        """Moves K/V of prefixes from cells to main memory, until n_cells more cells are free.

        Cells that a sequence uses or `Prefix.keep_in_cells` protects stay. Returns False if n_bytes
        of main memory did not suffice.
        """
        is_done = new("int32_t *")
        call("engine_offload_prefixes", self.handle, n_cells, n_bytes, is_done)
        return bool(is_done[0])

    def create_prefix(
        self, tokens: Sequence[int], n_rows: Sequence[int], base: Prefix | None = None
    ) -> Prefix:
        """Creates a prefix in main memory, to be filled by `Prefix.write`.

        n_rows: rows in each cache, as from `Prefix.n_rows`. base: a longer prefix of the same text,
        whose K/V blocks the new prefix shares. Error for a bad token id, n_rows or base.
        """
        ids = ids_of(tokens, self.model.n_vocab)
        rows = new("int64_t[]", list(n_rows))
        of_base = ffi.NULL if base is None else base.handle
        args = (self.handle, ids, len(ids), rows, len(rows), of_base)
        return Prefix(create("prefix", "prefix_create", *args), len(ids))

    def run(self, items: Sequence[BatchEntry], progress: Progress | None = None) -> list[Rows]:
        """Runs the entries of different sequences in one pass. Returns the rows of each entry.

        Rows are batch-invariant. An append has one row, of its last token. A verify has a row for
        each node, and `commit` must follow. An append with non-finite logits empties its sequence,
        and `Rows.check` then raises Error. progress: for a single append, which may be longer than
        a pass; called with (tokens done, tokens in all) after each micro-batch. If progress
        raises, the finished micro-batches stay.
        Errors: ValueError for tokens or parents of a wrong shape; Error for bad token ids or
            parents, or too many tokens for the context, the free cells or one pass: nothing has run
            then. Error also for a single append with non-finite logits.
        """
        n_vocab = self.model.n_vocab
        params = new("dfl_batch_entry[]", len(items))
        keep: list[Any] = []
        for item, to in zip(items, params, strict=True):
            ids = ids_of(item.tokens, n_vocab)
            keep.append(ids)
            to.sequence, to.tokens, to.n = item.sequence.handle, ids, len(ids)
            if item.is_verify:
                to.is_verify = True
            if item.n_remaining:
                to.n_remaining = item.n_remaining
            if item.parents is not None:
                if len(item.parents) != len(ids):
                    raise ValueError(
                        f"parents has {len(item.parents)} nodes, must have {len(ids)}: one a token"
                    )
                keep.append(ffi.from_buffer("int32_t[]", nodes_of(item.parents, "parents")))
                to.parents = keep[-1]
            if item.all_logits is not None:
                keep.append(ffi.from_buffer("float[]", item.all_logits, True))
                to.all_logits = keep[-1]
            if item.all_features is not None:
                keep.append(ffi.from_buffer("float[]", item.all_features, True))
                to.all_features = keep[-1]
        if progress is None:  # creating a C callback for nothing slows down rounds
            call("engine_run", self._handle, params, len(items), ffi.NULL, ffi.NULL)
        else:
            with c_callback(progress) as callback:
                call("engine_run", self._handle, params, len(items), callback, ffi.NULL)
        return [
            Rows(item.sequence, to.first_row, to.n if item.is_verify else int(not item.n_remaining))
            for item, to in zip(items, params, strict=True)
        ]

    def set_draft_scale(self, scale: float, drafter: int = 0) -> None:
        """Sets the factor of token embeddings in later drafts of a drafter, named by its index.

        Errors: Error if there is no such drafter.
        """
        call("engine_set_draft_scale", self._handle, drafter, scale)

    def draft(self, requests: Sequence[DraftRequest], k: int = 1, drafter: int = 0) -> list[Draft]:
        """Runs a drafter once for all requests. Returns the k best tokens of each position.

        drafter: index among the drafters with a pass.
        If logits of a request are not finite, its log_sum_exp are NaN, and the drafter K/V of its
        sequence are cleared.
        Errors: Error without a drafter, for n_draft outside 1 to block_size - 1, more rows than
            `max_verify`, or no room in the context.
        """
        params = new("dfl_draft_request[]", len(requests))
        n = 0
        for request, to in zip(requests, params, strict=True):
            (to.last_token,) = ids_of([request.last_token], self.model.n_vocab)
            to.sequence, to.n_draft = request.sequence.handle, request.n_draft
            if request.sampler is not None:
                to.sampler = request.sampler.handle
            n += max(0, request.n_draft)
        tokens = np.empty((n, max(0, k)), dtype=np.int32)
        logits = np.empty(tokens.shape, dtype=np.float32)
        log_sum_exp = np.empty(n, dtype=np.float32)
        call(
            "engine_draft",
            self._handle,
            drafter,
            params,
            len(requests),
            k,
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("float[]", logits),
            ffi.from_buffer("float[]", log_sum_exp),
        )
        if len(requests) == 1:
            return [Draft(tokens, logits, log_sum_exp)]
        ends = [0, *itertools.accumulate(request.n_draft for request in requests)]
        return [
            Draft(tokens[a:b], logits[a:b], log_sum_exp[a:b]) for a, b in itertools.pairwise(ends)
        ]

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[int]]:
        """Samples from rows of the last pass. Returns the sampled tokens of each request.

        An append gives one token, a verify those of the accepted nodes and one more. Sampling stops
        before a row that is not finite or has no token to sample.
        Errors: ValueError for masks of a wrong shape; Error for a sequence without rows or a bad
            token id in a history.
        """
        params = new("dfl_sample_request[]", len(requests))
        drawn = [ffi.new("int32_t[]", walk.n_rows) for walk in requests]
        keep: list[Any] = []
        for walk, tokens, to in zip(requests, drawn, params, strict=True):
            to.sequence, to.sampler = walk.sequence.handle, walk.sampler.handle
            to.position, to.sampled = walk.position, tokens
            if walk.masks is not None:
                masks = self._masks(walk)
                keep.append(ffi.from_buffer("uint32_t[]", masks))
                to.masks = keep[-1]
            if walk.history:
                keep.append(ffi.new("int32_t[]", walk.history))
                to.history, to.n_history = keep[-1], len(walk.history)
        call("engine_sample", self._handle, params, len(requests))
        return [ffi.unpack(tokens, to.n_sampled) for tokens, to in zip(drawn, params, strict=True)]

    def _masks(self, request: SampleRequest) -> NDArray[np.uint32]:
        masks = np.ascontiguousarray(request.masks, dtype=np.uint32)
        shape = request.n_rows, (self.model.n_vocab + 31) // 32
        if masks.shape != shape:
            raise ValueError(f"masks have the shape {list(masks.shape)}, must have {list(shape)}")
        return masks

    def commit(self, paths: Sequence[tuple[SequenceHandle, Sequence[int] | int]]) -> None:
        """Appends accepted paths of pending verifies to their sequences and drops other nodes.

        paths: nodes, root first, or the number of first nodes to append. Error for nodes that are
        no path down from the root, or that have non-finite logits (which empties the sequence).
        """
        params = new("dfl_path[]", len(paths))
        keep: list[Any] = []
        for (sequence, nodes), to in zip(paths, params, strict=True):
            to.sequence = sequence.handle
            if isinstance(nodes, (int, np.integer)):
                to.n = nodes
            else:
                path = nodes_of(nodes, "nodes")
                keep.append(ffi.from_buffer("int32_t[]", path))
                to.nodes, to.n = keep[-1], path.size
        call("engine_commit", self._handle, params, len(paths))

    def reserve_verify(self, n: int) -> None:
        """Raises `max_verify` to n, at most MAX_VERIFY; Error if a verify is pending."""
        call("engine_reserve_verify", self.handle, n)
        self.max_verify = value("engine_verify_rows", self.handle)
