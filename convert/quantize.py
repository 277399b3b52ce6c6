"""Encodes the rows of a planned tensor in their GGUF type, in chunks, on several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .errors import ConvertError
from .plan import Array, TensorPlan

CHUNK_ELEMENTS = 1 << 20  # Values per chunk of rows: its 4 MB of float32 stay in cache.
_UNREADY = 3  # Maximum number of chunks in flight per thread.


def n_threads() -> int:
    """Returns the number of threads for quantising, the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode(plan: TensorPlan, type_name: str, pool: ThreadPoolExecutor) -> Iterator[Array]:
    """Yields a tensor's bytes as C-contiguous arrays. Raises ConvertError for NaN or overflow."""
    step = max(1, CHUNK_ELEMENTS // max(1, plan.n_columns))
    window = _UNREADY * n_threads()
    pending: deque[Future[Array]] = deque()
    for start in range(0, plan.n_rows, step):
        stop = min(start + step, plan.n_rows)
        pending.append(pool.submit(_encode_rows, plan, type_name, start, stop))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


_SAME_BITS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def _encode_rows(plan: TensorPlan, type_name: str, start: int, stop: int) -> Array:
    if plan.packed is not None:
        return np.ascontiguousarray(plan.packed.rows(start, stop))
    if plan.is_plain and _SAME_BITS.get(type_name) == plan.parts[0].dtype:
        raw = np.ascontiguousarray(plan.raw(start, stop))
        _check_finite(plan.name, raw)
        return raw
    values = np.ascontiguousarray(plan.read(start, stop))
    _check_finite(plan.name, values)
    if type_name == "f32":
        return values
    if type_name == "bf16":
        rounded = to_bfloat16(values)
        _check_finite(plan.name, rounded)
        return rounded
    if type_name == "f16":
        return _to_float16(plan.name, values)
    return _quantise(values, type_name)


def _check_finite(name: str, values: Array) -> None:
    if values.dtype == np.uint16:
        finite = bool(((values & 0x7F80) != 0x7F80).all())
    else:
        # A finite sum proves all values finite. An infinite sum may be overflow: tests each value.
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.add.reduce(values, axis=None)
        finite = bool(np.isfinite(total)) or bool(np.isfinite(values).all())
    if not finite:
        raise ConvertError(f"{name}: holds NaN or infinite values; the checkpoint is damaged")


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns bfloat16 bits of finite values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _to_float16(name: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if not np.isfinite(result).all():
        raise ConvertError(
            f"{name}: holds {float(np.abs(values).max()):g}, float16 ends at 65504; "
            "choose --outtype bf16 or f32"
        )
    return result


def _quantise(values: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    # Imported here, so that unquantised conversions work without the compiled core.
    from dflash_gguf.native import quantize

    return quantize(values, type_name, 1)
