"""What ggml itself offers: devices, buffer types, quantisers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ._ffi import call, ffi, lib, new, text

_DEVICE_TYPES = ("cpu", "gpu", "other")


@dataclass(frozen=True, slots=True)
class Device:
    """A ggml device. Memory in bytes, as the backend reports it."""

    name: str
    description: str
    type: str
    free_bytes: int
    total_bytes: int


def ggml_version() -> str:
    """Version of the ggml in this process, for example "0.25.3"."""
    return text(lib().dfl_ggml_version())


def load_backend(path: str) -> None:
    """Loads a ggml backend module; its devices join `devices()`. Loading one twice is harmless.

    Raises:
        Error: no such file, not a backend of this ggml, or one of its libraries is missing.
    """
    call("backend_load", os.fsencode(path))


@lru_cache(maxsize=1)
def load_backend_of_environment() -> None:
    """Loads the module that GGML_BACKEND_PATH names, as ggml's own programs do. Raises Error."""
    if path := os.environ.get("GGML_BACKEND_PATH"):
        load_backend(path)


def devices() -> list[Device]:
    """All devices of the registered ggml backends."""
    load_backend_of_environment()
    all_devices = []
    info = new("dfl_device_info *")
    for index in range(lib().dfl_device_count()):
        call("device_get", index, info)
        all_devices.append(
            Device(
                name=text(info.name),
                description=text(info.description),
                type=_DEVICE_TYPES[info.type],
                free_bytes=info.free_bytes,
                total_bytes=info.total_bytes,
            )
        )
    return all_devices


def quantize(values: NDArray[np.float32], type_name: str, n_threads: int = 0) -> NDArray[np.uint8]:
    """Quantises rows with ggml's reference quantiser.

    Args:
        values: float32 [rows, cols], C-contiguous.
        type_name: ggml's name of the type: "q8_0", "q4_K", "f16", ...
        n_threads: rows are shared out over so many threads; 0: one per core.

    Returns:
        uint8 [rows, row_bytes].

    Raises:
        Error: unknown type, or cols is not a multiple of its block.
    """
    if values.ndim != 2 or values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ValueError(
            f"values: need contiguous float32 [rows, cols], got {values.dtype} {list(values.shape)}"
        )
    rows, cols = values.shape
    size = new("uint64_t *")
    name = type_name.encode()
    call("quantize_row_size", name, cols, size)
    out = np.empty((rows, size[0]), dtype=np.uint8)
    if rows:
        src = ffi.from_buffer("float[]", values)
        dst = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        call("quantize", name, src, rows, cols, dst, out.nbytes, n_threads)
    return out


def _names(function: str) -> list[str]:
    names = new("char[]", 1024)
    call(function, names, 1024)
    return [name for name in text(names).split(",") if name]


def extra_buffer_types() -> list[str]:
    """Names of the CPU's extra weight buffer types."""
    return _names("extra_buffer_types")


def cpu_kernel_sets() -> list[str]:
    """Returns the instruction sets of our own kernels that this CPU runs, best first.

    Errors: Error if the environment variable DFLASH_CPU names none of them.
    """
    return _names("cpu_kernel_sets")


def probe_buffer_type(name: str) -> None:
    """Tries one of the CPU's extra weight buffer types.

    Kernels that cannot run here kill the process: for a child process only.

    Raises:
        Error: there is no such type, or its products are wrong.
    """
    call("probe_buffer_type", name.encode())
