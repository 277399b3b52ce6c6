"""Owns what costs memory: caches, graphs and the drafter's state, for several sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, new, text, value
from .limits import MAX_TOP, MAX_VERIFY
from .load_config import LoadConfig, c_options
from .models import Drafter, Model
from .passes import BatchEntry, Draft, DraftRequest, Rows, SequenceHandle, ids_of, nodes_of
from .prefixes import Prefix
from .progress import Progress, c_callback
from .samplers import SampleRequest


class Memory(NamedTuple):
    """Bytes of one use in one place. Names are those of `dfl_memory` in dflash.h."""

    name: str
    place: str
    """Name of the device."""
    bytes: int


class Engine:
    """Caches and graphs of a model and its drafter. Not for two threads at once."""

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        drafter: Drafter | None = None,
        draft_window: int | None = None,
        config: LoadConfig | None = None,
    ) -> None:
        """Allocates the caches and the compute buffer.

        config: in place of the model's. n_ctx, draft_window: in place of the config's.

        Raises:
            Error: out of memory, or the cache types do not work on the model's device.
        """
        config = self.config = config or model.config
        options = c_options("dfl_engine_params", config)
        options["n_ctx"] = model.n_ctx if n_ctx is None else n_ctx
        drafters = new("dfl_drafter *[]", [] if drafter is None else [drafter.handle])
        options["drafters"], options["n_drafters"] = drafters, len(drafters)
        if draft_window is not None:
            options["draft_window"] = draft_window
        params = new("dfl_engine_params *", options)
        self.model = model
        self.drafter = drafter
        self.max_draft = 0 if drafter is None else min(drafter.block_size, MAX_VERIFY) - 1
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

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._is_closed:
            raise Error("the engine is closed")
        return self._handle

    def close(self) -> None:
        """Gives up this reference; memory goes when the engine's sequences are closed too."""
        self._is_closed = True
        self.count_sequences(0)

    def count_sequences(self, change: int) -> None:
        """Sequences keep the engine; the last one that is closed gives up a closed one."""
        self._n_sequences += change
        if self._is_closed and self._n_sequences == 0:
            self._handle = None

    def info(self) -> Any:
        """The engine's `dfl_engine_info`: sizes and counters."""
        info = new("dfl_engine_info *")
        call("engine_get_info", self.handle, info)
        return info

    def memory(self) -> list[Memory]:
        """Memory by use and place, one use after another."""
        uses = []
        memory = new("dfl_memory *")
        for index in range(self.info().n_memory):
            call("engine_get_memory", self.handle, index, memory)
            uses.append(Memory(text(memory.name), text(memory.place), int(memory.bytes)))
        return uses

    def bytes_of(self, name: str) -> int:
        """Memory of one use in all places."""
        return sum(use.bytes for use in self.memory() if use.name == name)

    @property
    def largest_graph(self) -> str:
        """The kind of graph that decides the arena's size: "prefill", "verify" or "draft"."""
        return text(self.info().largest_graph)

    @property
    def cpu_operations(self) -> list[str]:
        """Operations that the device lacks and the CPU does, by ggml's names."""
        return [name for name in text(self.info().cpu_operations).split(",") if name]

    @property
    def max_verify(self) -> int:
        """Rows verified or drafted at once at most, of all sequences; see `reserve_verify`.

        A draft of n tokens has n + 1 rows: the last token's is the first.
        """
        return value("engine_verify_rows", self.handle)

    @property
    def max_top_k(self) -> int:
        """Best tokens of a row that `set_top_k` may be asked for."""
        return min(MAX_TOP, self.model.n_vocab)

    def set_top_k(self, k: int) -> bool:
        """Has a device pick the k best (0 to MAX_TOP) of every row in the passes to come.

        They are then all that sampling copies. False where the rows are at hand, on a
        CPU, or where the device cannot; 0 ends it.
        """
        kept = new("int32_t *")
        call("engine_set_top_k", self.handle, k, kept)
        self.n_top = int(kept[0])
        return self.n_top > 0

    @property
    def n_free_cells(self) -> int:
        """K/V rows that no sequence has; see `Sequence.cells_needed`."""
        return value("engine_n_free_cells", self.handle)

    @property
    def prefix_bytes(self) -> int:
        """Bytes of main memory that prefixes take."""
        return value("engine_prefix_bytes", self.handle)

    def offload(self, n_cells: int, n_bytes: int) -> bool:
        """Moves rows of prefixes to the host until n cells are free, or no more can be.

        Rows that a sequence uses or a prefix keeps (`Prefix.keep_in_cells`) stay. Returns False
        where it takes more than n_bytes.
        """
        is_done = new("int32_t *")
        call("engine_offload_prefixes", self.handle, n_cells, n_bytes, is_done)
        return bool(is_done[0])

    def create_prefix(self, tokens: Sequence[int], n_rows: Sequence[int]) -> Prefix:
        """Creates a prefix to be filled in. n_rows: of each cache.

        Raises:
            Error: tokens that the model does not have, or rows that its caches do not.
        """
        ids = ids_of(tokens, self.model.n_vocab)
        rows = new("int64_t[]", list(n_rows))
        args = (self.handle, ids, len(ids), rows, len(rows))
        return Prefix(create("prefix", "prefix_create", *args), len(ids))

    def run(self, items: Sequence[BatchEntry], progress: Progress | None = None) -> list[Rows]:
        """Runs tokens of different sequences in one pass; a list of each one's rows.

        A row has the bits that it has alone. Of an append the last token's row can be read, of a
        verify every row until `commit`, which must follow; rows are gone with the next pass or
        draft. An append that is not finite empties its sequence: `Rows.check`. A single append may
        have any number of tokens, and `progress` is called between its micro-batches.

        Raises:
            Error: bad token ids or parents, more tokens than the context or the pool of cells
            holds, more rows than the pass takes: nothing has run then. A single append that is not
            finite.
            What progress raises; the sequence then ends after the last finished micro-batch.
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
                        f"{len(ids)} tokens and {len(item.parents)} parents do not make a tree"
                    )
                keep.append(ffi.from_buffer("int32_t[]", nodes_of(item.parents, "parents")))
                to.parents = keep[-1]
            if item.all_logits is not None:
                keep.append(ffi.from_buffer("float[]", item.all_logits, True))
                to.all_logits = keep[-1]
        if progress is None:  # nearly always, and a round is short
            call("engine_run", self._handle, params, len(items), ffi.NULL, ffi.NULL)
        else:
            with c_callback(progress) as callback:
                call("engine_run", self._handle, params, len(items), callback, ffi.NULL)
        return [
            Rows(item.sequence, to.first_row, to.n if item.is_verify else int(not item.n_remaining))
            for item, to in zip(items, params, strict=True)
        ]

    def draft(self, requests: Sequence[DraftRequest], k: int = 1) -> list[Draft]:
        """Returns the drafter's candidates for each request, in one pass.

        Where its scores are not finite, it has forgotten that sequence so far.

        Raises:
            Error: no drafter, n_draft outside 1 to block_size - 1, more rows than `max_verify`,
            or no room in the context.
        """
        params = new("dfl_draft_request[]", len(requests))
        n = 0
        for request, to in zip(requests, params, strict=True):
            (to.last_token,) = ids_of([request.last_token], self.model.n_vocab)
            to.sequence, to.n_draft = request.sequence.handle, request.n_draft
            n += max(0, request.n_draft)
        tokens = np.empty((n, max(0, k)), dtype=np.int32)
        logits = np.empty(tokens.shape, dtype=np.float32)
        log_sum_exp = np.empty(n, dtype=np.float32)
        call(
            "engine_draft",
            self._handle,
            0,  # the only drafter
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
        """Draws of the rows of the last pass, in one call; the tokens of each sequence.

        After an append that is one, of an open verify as many as a path down from the root has,
        and one more. Fewer where nothing can be drawn from a row, or it is not finite: reading it
        tells why.

        Raises:
            Error: a sequence without rows, seen tokens that are none.
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
            raise ValueError(f"masks are {list(masks.shape)}, {list(shape)} words are needed")
        return masks

    def commit(self, paths: Sequence[tuple[SequenceHandle, Sequence[int] | int]]) -> None:
        """Appends a path of each sequence's open verify; what else was verified leaves no trace.

        paths: nodes, root first, or how many of the first ones.

        Raises:
            Error: the nodes are not a path down from the root, or one is not finite.
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
        """Makes room to verify up to n rows at once, 1 to MAX_VERIFY; never less than there is.

        Raises:
            Error: n is out of range, a verify waits for its commit, or memory is short.
        """
        call("engine_reserve_verify", self.handle, n)
