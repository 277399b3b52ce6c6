"""The memory plan: bytes that a target and its drafter take, item by item, before the load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from .._files import AnyPath, AnyPaths, listed_paths
from ..config import LoadConfig
from ..native import Drafter, Engine, Error, Model, Progress, devices, load_backend
from .speed import rounded, tokens_per_s

MAX_PREFIX_BYTES = 8 << 30
"""Default limit of the prefix cache in bytes of main memory."""
KEPT = "earlier answers, at most"
CONTEXT_BYTES = 512 << 20
"""Estimated bytes of the driver and ggml's kernels on a GPU that is not in this machine."""


@dataclass(frozen=True, slots=True)
class PlanItem:
    """A use of memory. where: "device", "host" or "file" (mapped; the system may drop pages)."""

    name: str
    bytes: int
    where: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that an engine takes, with its weights.

    device: name of the accelerator, or of the host without one. verify_rows: maximum rows of a
    verify. free_bytes: free bytes of the device; all bytes of a hypothetical GPU. host_free_bytes:
    free main memory beside a real accelerator, else None. prefix_bytes: limit of the prefix cache
    in main memory: cache_ram, which is an item of the plan, or else part of the unplanned memory.
    tokens_per_s: predicted speed of one answer, see `speed.tokens_per_s`.
    """

    device: str
    on_gpu: bool
    free_bytes: int
    n_ctx: int
    cache_type_k: str
    cache_type_v: str
    n_ubatch: int
    draft_window: int
    verify_rows: int
    items: tuple[PlanItem, ...]
    host_free_bytes: int | None = None
    prefix_bytes: int = 0
    tokens_per_s: float | None = None

    def total(self, where: str) -> int:
        """Returns the bytes of all items of the plan in one place of memory."""
        return sum(item.bytes for item in self.items if item.where == where)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the plan needs on its device."""
        return self.total("device" if self.on_gpu else "host")

    @property
    def missing_bytes(self) -> int:
        """Bytes that the plan needs beyond the free memory; 0 if the plan fits."""
        return sum(max(0, needed - free) for _, needed, free in self.places)

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """Name, needed bytes and free bytes of each place of memory."""
        places = [(self.device, self.needed_bytes, self.free_bytes)]
        if self.host_free_bytes is not None:
            places.append(("main memory", self.total("host"), self.host_free_bytes))
        return places

    @property
    def tightest(self) -> tuple[str, int, int]:
        """The first place that is short of memory, else the device."""
        return next((x for x in self.places if x[1] > x[2]), self.places[0])

    def to_json(self) -> str:
        """Returns the plan's fields, needed bytes and missing bytes as JSON."""
        sums = {"needed_bytes": self.needed_bytes, "missing_bytes": self.missing_bytes}
        return json.dumps(asdict(self) | sums)

    def table(self) -> str:
        """Returns a table of the items in MiB, with a column for each place of memory."""
        places = [x for x in ("device", "host", "file") if self.total(x)]
        rows = [("MiB", *(self._heading(place) for place in places))]
        for name in dict.fromkeys(item.name for item in self.items):
            cells = {item.where: _mib(item.bytes) for item in self.items if item.name == name}
            rows.append((name, *(cells.get(place, "") for place in places)))
        rows.append(("in all", *(_mib(self.total(place)) for place in places)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(places) + 1)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(-1, "-" * max(map(len, lines)))
        return "\n".join([self._settings(), *lines, self._verdict()])

    def _heading(self, place: str) -> str:
        return {"device": "GPU", "host": "memory", "file": "mapped file"}[place]

    def _settings(self) -> str:
        drafts = f", {self.verify_rows} rows a verify, window {self.draft_window}"
        return (
            f"{self.device}: context {self.n_ctx}, K/V {self.cache_type_k}/{self.cache_type_v}, "
            f"micro-batch {self.n_ubatch}{drafts if self.verify_rows else ''}"
        )

    def _verdict(self) -> str:
        name, needed, free = self.tightest
        amounts = f"needs {gib(needed)}, {gib(free)} are free"
        if self.missing_bytes:
            place = f"{name} " if name != self.device else ""
            return f"does not fit: {place}{amounts}, {gib(needed - free)} short"
        kept = "" if any(item.name == KEPT for item in self.items) else self._kept()
        speed = self.tokens_per_s
        speed_line = "" if speed is None else f"\nabout {rounded(speed)} tokens/s of one answer"
        return f"fits: {amounts}{kept}{speed_line}"

    def _kept(self) -> str:
        return f"; earlier answers are kept in up to {gib(self.prefix_bytes)} of main memory"


def _mib(n: int) -> str:
    return f"{n / (1 << 20):.1f}"


def gib(n: int) -> str:
    """Formats a number of bytes in GiB."""
    return f"{n / (1 << 30):.2f} GiB"


class Planner:
    """Plans the memory of a target and its drafters by the headers of their files."""

    def __init__(
        self,
        path: AnyPath,
        drafter: AnyPaths,
        config: LoadConfig,
        vram: int | None = None,
    ) -> None:
        """Reads model headers. vram: bytes of the GPU to plan for. Error for unloadable files."""
        self._vram = vram
        self.config = config
        hypothetical = vram is not None and not has_gpu(config)
        self.model = Model(os.fspath(path), config, dry_run="cuda" if hypothetical else "device")
        self._drafters = load_drafters(self.model, drafter)

    @property
    def block_size(self) -> int:
        """Number of rows in the largest block of a drafter; 0 without a drafter."""
        return max([drafter.block_size for drafter in self._drafters], default=0)

    def plan(self, config: LoadConfig | None = None, verify_rows: int = 0) -> Plan:
        """Plans a config (None: the planner's); layers stay on the devices of the planner's config.

        verify_rows: rows of a verify, at least the drafter's block. Errors: Error for K/V types
        that the device does not support.
        """
        config = config or self.config
        engine = Engine(
            self.model, config.n_ctx, self._drafters, config.draft_window, config=config
        )
        if self._drafters and verify_rows > engine.max_verify:
            engine.reserve_verify(verify_rows)
        plan = plan_of(engine, config, self.capacity)
        if self.model.on_gpu and not self.model.is_hypothetical:
            plan = replace(plan, host_free_bytes=free_bytes("CPU"))
        if config.cache_ram is None:
            left = free_bytes("CPU") - plan.total("host")
            plan = replace(plan, prefix_bytes=min(MAX_PREFIX_BYTES, max(0, left // 4)))
        return plan

    @property
    def capacity(self) -> int:
        """Bytes of the device that the plan may use."""
        free = free_bytes(self.model.backend)
        if not self.model.on_gpu or self._vram is None:
            return free
        return self._vram if self.model.is_hypothetical else min(self._vram, free)


def load_drafters(model: Model, paths: AnyPaths, progress: Progress | None = None) -> list[Drafter]:
    """Loads drafters; without paths the MTP layer of the model's file, unless it is turned off.

    Errors: ValueError for two drafters of one kind.
    """
    files = listed_paths(paths)
    if not files and model.has_drafter and model.config.mtp:
        files = [model.path]
    drafters: dict[str, Drafter] = {}
    for file in files:
        drafter = Drafter(os.fspath(file), model, progress)
        first = drafters.setdefault(drafter.kind, drafter)
        if first is not drafter:
            raise ValueError(
                f"{first.path} and {drafter.path} are both drafters of the kind {drafter.kind}: "
                "give one file of each kind"
            )
    return list(drafters.values())


def has_gpu(config: LoadConfig) -> bool:
    """True if the device of a config is a GPU of this machine."""
    if config.backend_module is not None:
        load_backend(config.backend_module)
    wanted = (config.device or "").lower()
    return any(x.type == "gpu" and wanted in ("", x.name.lower()) for x in devices())


def free_bytes(device: str) -> int:
    """Returns the bytes that can be allocated on a device now; 0 if there is no such device."""
    return next((x.free_bytes for x in devices() if x.name == device), 0)


def plan_of(engine: Engine, config: LoadConfig, free: int) -> Plan:
    """Returns the plan of an engine, real or dry run. free: free bytes of the engine's device."""
    model = engine.model
    kept = PlanItem(KEPT, (config.cache_ram or 0) << 20, "host")
    return Plan(
        device=model.backend,
        on_gpu=model.on_gpu,
        free_bytes=free,
        n_ctx=engine.n_ctx,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        n_ubatch=config.n_ubatch,
        draft_window=config.draft_window,
        verify_rows=engine.max_verify if engine.max_draft else 0,
        items=tuple(item for item in (*_items(engine), kept) if item.bytes),
        prefix_bytes=kept.bytes,
        tokens_per_s=tokens_per_s(model, engine.drafters),
    )


def _items(engine: Engine) -> Iterator[PlanItem]:
    model = engine.model
    place = "device" if model.on_gpu else "host"
    yield PlanItem("target weights", model.device_bytes, place)
    yield PlanItem("target weights", model.cpu_split_bytes, "host")
    yield PlanItem("target weights", model.mapped_bytes, "file")
    yield PlanItem("token embeddings", model.embedding_bytes, "file")
    for drafter in engine.drafters:
        name = f"{drafter.kind} drafter weights" if len(engine.drafters) > 1 else "drafter weights"
        yield PlanItem(name, drafter.copied_bytes - drafter.cpu_split_bytes, place)
        yield PlanItem(name, drafter.cpu_split_bytes, "host")
        yield PlanItem(name, drafter.mapped_bytes, "file")
    memory = engine.memory()
    is_split = any(use.name == "arena" and use.place != model.backend for use in memory)
    at_most = ", at most" if model.is_hypothetical and is_split else ""
    labels = {
        "kv": "K/V cache",
        "recurrent": "recurrent state",
        "trace": f"node updates of {engine.max_verify} rows",
        "mask": "attention masks",
        "draft": "drafter's K/V and features",
        "arena": f"compute buffer ({engine.largest_graph}){at_most}",
        "pool": "CUDA pool and cuBLAS, about",
    }
    for use in memory:
        where = place if use.place == model.backend else "host"
        yield PlanItem(labels[use.name], use.bytes, where)
    if model.is_hypothetical:
        yield PlanItem("driver and kernels, about", CONTEXT_BYTES, place)


def check_fits(plan: Plan) -> None:
    """Raises Error with the missing bytes if the plan does not fit."""
    if plan.missing_bytes:
        name, needed, free = plan.tightest
        raise Error(
            f"{name} has {gib(free)} free, {gib(needed)} are needed, "
            f"{needed - free} bytes short; --plan lists the parts, --fit finds settings that fit"
        )
