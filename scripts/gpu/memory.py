"""Measures a long, filled context: the memory plan, the allocated memory, and rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from plan import anonymous_bytes

from dflash_gguf import native
from dflash_gguf.memory.plan import Planner, plan_of
from gpu.facts import used_bytes
from gpu.files import OUTTYPE, write_pair
from gpu.ggml_device import copied_gb_per_s
from gpu.setting import Figures, Setting
from gpu.speed import (
    Driver,
    close_pair,
    measure_rounds,
    most_tokens,
    open_pair,
    random_tokens,
)

CACHE_TYPE = "q4_0"
KINDS = (("plain", 0), ("chain", 15), ("tree", 22))
N_WARM, N_ROUNDS = 4, 8
MOST_ROWS = 23
N_PIECES = 8
KERNELS_OF = "tiny-qwen35"


def measure(setting: Setting) -> Iterator[Figures]:
    """Yields the plan, the prefill's speed, plain and drafted rounds, and the allocated memory.

    context_bytes: GPU memory that the driver takes for this process. held_bytes: drop of free GPU
    memory since kernels were loaded; on the CPU, growth of the process.
    """
    sizes = replace(setting.sizes, n_warm=N_WARM, n_rounds=N_ROUNDS)
    at_first = used_bytes(setting.device or "CUDA0")
    device = setting.found_device()
    bandwidth = copied_gb_per_s(device.name, sizes.copied_bytes)
    config = setting.load_config(
        n_ctx=sizes.n_long, cache_type_k=CACHE_TYPE, cache_type_v=CACHE_TYPE
    )
    plan = Planner(setting.target, setting.drafter, config).plan(verify_rows=MOST_ROWS)
    yield {"planned_bytes": plan.needed_bytes, "items": _items(plan.items)}
    used = used_bytes(device.name)
    _load_kernels(setting)
    known = at_first is not None and used is not None
    yield {"context_bytes": used - at_first if known else None}
    before = _Held(device)
    sequence = open_pair(setting, sizes.n_long, CACHE_TYPE)
    sequence.engine.reserve_verify(MOST_ROWS)
    yield {"loaded_bytes": before.more()}
    yield from _fill(sequence, sizes.n_long - most_tokens(sizes) * len(KINDS) - MOST_ROWS)
    for kind, size in KINDS:
        yield measure_rounds(Driver(sequence, kind, size), sizes, bandwidth)
    held = before.more()
    real = plan_of(sequence.engine, config, plan.free_bytes)
    yield {
        "position": sequence.position,
        "n_ctx": sequence.n_ctx,
        "cache_type": CACHE_TYPE,
        "allocated_bytes": real.needed_bytes,
        "held_bytes": held,
        "held_gib": round(held / (1 << 30), 3),
        "planned_over_held": round(plan.needed_bytes / held, 4) if held else None,
    }


def _load_kernels(setting: Setting) -> None:
    """Runs rounds of a small model, so that the driver loads kernels before memory is measured."""
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_pair(Path(folder), KERNELS_OF, OUTTYPE)
        small = replace(setting, target_file=target, drafter_file=drafter)
        sequence = open_pair(small, 1024, CACHE_TYPE)
        sequence.prefill(random_tokens(sequence, 600, seed=1))
        for kind, size in KINDS:
            Driver(sequence, kind, size).run(3)
        close_pair(sequence)


class _Held:
    """Measures the growth of a GPU's used memory, or of this process's memory on a CPU."""

    def __init__(self, device: native.Device) -> None:
        self._device = device
        self._at_first = self._held()

    def _held(self) -> int:
        if self._device.type == "cpu":
            return anonymous_bytes()
        return -next(x.free_bytes for x in native.devices() if x.name == self._device.name)

    def more(self) -> int:
        """Returns the growth of used memory in bytes since this object was created."""
        return self._held() - self._at_first


def _items(items: object) -> dict[str, int]:
    return {f"{x.name} ({x.where})": x.bytes for x in items}  # type: ignore[attr-defined]


def _fill(sequence: native.Sequence, n: int) -> Iterator[Figures]:
    """Prefills n random tokens in N_PIECES chunks, and yields the speed of each chunk."""
    tokens = random_tokens(sequence, n, seed=1)
    piece = -(-n // N_PIECES)
    for start in range(0, n, piece):
        part = tokens[start : start + piece]
        started = perf_counter()
        sequence.prefill(part)
        seconds = perf_counter() - started
        yield {
            "position": sequence.position,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(len(part) / seconds, 1),
        }
