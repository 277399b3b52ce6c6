"""Access to ggml: devices, backends, buffer types, quantisers."""

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
    """A ggml device: type "cpu", "gpu" or "other", and memory sizes that its backend reports."""

    name: str
    description: str
    type: str
    free_bytes: int
    total_bytes: int


def ggml_version() -> str:
    """Returns the version of the ggml in this process, for example "0.25.3"."""
    return text(lib().dfl_ggml_version())


def load_backend(path: str) -> None:
    """Loads a ggml backend module, whose devices `devices()` lists; Error for any other file."""
    call("backend_load", os.fsencode(path))


@lru_cache(maxsize=1)
def load_backend_of_environment() -> None:
    """Loads the backend module that GGML_BACKEND_PATH names, as ggml's own programs do."""
    if path := os.environ.get("GGML_BACKEND_PATH"):
        load_backend(path)


def devices() -> list[Device]:
    """Returns the devices of all ggml backends, also of the one that GGML_BACKEND_PATH names."""
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
    """Quantises rows with ggml's reference quantiser. Returns uint8 [rows, row_bytes].

    values: float32 [rows, cols], C-contiguous; ValueError for others. type_name: ggml's name of the
    type, such as "q4_K". n_threads: 0: one per usable core. Error for an unknown type, a type that
    needs an importance matrix, or cols that are no multiple of its block.
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
    """Returns the names of the CPU's extra weight buffer types, such as "AMX"."""
    return _names("extra_buffer_types")


def cpu_kernel_sets() -> list[str]:
    """Returns our kernels' instruction sets on this CPU, best first; Error for a bad DFLASH_CPU."""
    return _names("cpu_kernel_sets")


def probe_buffer_type(name: str) -> None:
    """Tests the matrix products of an extra CPU weight buffer type; Error if they are wrong.

    Call this in a child process: kernels with unsupported instructions kill the process.
    """
    call("probe_buffer_type", name.encode())
