"""What costs memory: caches, graphs, a drafter's state. Timelines in it are `Sequence`s."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._ffi import Error, call, create, ffi, new, text
from .limits import MAX_TOP, MAX_VERIFY
from .load_config import LoadConfig, c_options
from .models import Drafter, Model


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
        config = config or model.config
        options = c_options("dfl_engine_params", config)
        options["n_ctx"] = model.n_ctx if n_ctx is None else n_ctx
        options["drafter"] = ffi.NULL if drafter is None else drafter.handle
        if draft_window is not None:
            options["draft_window"] = draft_window
        params = new("dfl_engine_params *", options)
        self.model = model
        self.drafter = drafter
        self.max_draft = 0 if drafter is None else min(drafter.block_size, MAX_VERIFY) - 1
        self.n_top = 0
        self._max_verify: int | None = None
        self._handle = create("engine", "engine_create", model.handle, params)
        info = self.info()
        self.n_ctx = int(info.n_ctx)
        self.n_threads = int(info.n_threads)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the engine is closed")
        return self._handle

    def close(self) -> None:
        """Gives up this reference; memory goes when the engine's sequence is closed too."""
        self._handle = None

    def info(self) -> Any:
        """The engine's `dfl_engine_info`: sizes and counters."""
        info = new("dfl_engine_info *")
        call("engine_get_info", self.handle, info)
        return info

    def memory(self) -> list[Memory]:
        """What memory is used for and where, one use after another."""
        found = []
        memory = new("dfl_memory *")
        for index in range(self.info().n_memory):
            call("engine_get_memory", self.handle, index, memory)
            found.append(Memory(text(memory.name), text(memory.place), int(memory.bytes)))
        return found

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
        """Rows of one verify at most; `reserve_verify` makes room for more."""
        if self._max_verify is None:
            self._max_verify = int(self.info().verify_rows)
        return self._max_verify

    @property
    def n_most_top(self) -> int:
        """Best tokens of a row that `keep_top` may be asked for."""
        return min(MAX_TOP, self.model.n_vocab)

    def keep_top(self, k: int) -> bool:
        """Has a device pick the k best (0 to MAX_TOP) of every row in the passes to come.

        They are then all that need be copied: `Rows.top`. False where the rows are at hand, on a
        CPU, or where the device cannot; 0 ends it.
        """
        kept = new("int32_t *")
        call("engine_keep_top", self.handle, k, kept)
        self.n_top = int(kept[0])
        return self.n_top > 0

    def reserve_verify(self, n: int) -> None:
        """Makes room for verifies of up to n rows, 1 to MAX_VERIFY; never less than there is.

        Raises:
            Error: n is out of range, a verify waits for its commit, or memory is short.
        """
        self._max_verify = None
        call("engine_reserve_verify", self.handle, n)
