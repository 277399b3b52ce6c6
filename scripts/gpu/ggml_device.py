"""Calls ggml's library directly: copy bandwidth of a device, and captured graphs in its log."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from typing import Any

from dflash_gguf import native
from dflash_gguf.native._ffi import ggml_library

GRAPH_LINES = {
    "CUDA graph warmup complete": "captured",
    "reused": "replayed",
    "CUDA graph warmup reset": "changed",
    "CUDA graph update failed": "failed",
    "disabling CUDA graphs": "disabled",
}
"""Report fields by texts in ggml's log about captured CUDA graphs (ggml-cuda.cu, 0.25.3)."""

TYPE_F32 = 0  # value of GGML_TYPE_F32
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class InitParams(ctypes.Structure):
    """ggml's struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def library() -> Any:
    """Returns ggml's library with the types of the functions that several modules call."""
    library = ctypes.CDLL(str(ggml_library()))
    pointers = (
        "ggml_init ggml_new_tensor_1d ggml_backend_dev_by_name "
        "ggml_backend_dev_init ggml_backend_alloc_ctx_tensors"
    )
    for name in pointers.split():
        getattr(library, name).restype = ctypes.c_void_p
    library.ggml_new_tensor_1d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    library.ggml_init.argtypes = [InitParams]
    library.ggml_log_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def copied_gb_per_s(device: str, n_bytes: int, n_runs: int = 9) -> float:
    """Returns a device's copy bandwidth in GB/s, read plus written: the best of n_runs copies.

    Copies outside a graph, because as a node of a graph an H200 copied 2.8 TB/s, PyTorch 4.3 TB/s.
    """
    lib = library()
    pointer = ctypes.c_void_p
    context = pointer(lib.ggml_init(InitParams(1 << 20, None, True)))
    backend = pointer(
        lib.ggml_backend_dev_init(pointer(lib.ggml_backend_dev_by_name(device.encode())), None)
    )
    a, b = (pointer(lib.ggml_new_tensor_1d(context, TYPE_F32, n_bytes // 4)) for _ in range(2))
    buffer = pointer(lib.ggml_backend_alloc_ctx_tensors(context, backend))
    try:
        if not buffer:
            raise native.Error(f"{device}: no memory for a copy of {n_bytes} bytes")
        lib.ggml_backend_buffer_clear(buffer, 0)
        seconds = []
        for _ in range(n_runs + 2):
            started = time.perf_counter()
            lib.ggml_backend_tensor_copy_async(backend, backend, a, b)
            lib.ggml_backend_synchronize(backend)
            seconds.append(time.perf_counter() - started)
    finally:
        lib.ggml_backend_buffer_free(buffer)
        lib.ggml_backend_free(backend)
        lib.ggml_free(context)
    return 2 * n_bytes / min(seconds[2:]) / 1e9  # the first two runs warm up


class GraphCounter:
    """Counts ggml's log lines about captured graphs in a with block, by the report's fields."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._library = library()
        self._callback = _LOG(self._line)

    def _line(self, _level: int, text: bytes, _user: object) -> None:
        for part, name in GRAPH_LINES.items():
            if part.encode() in text:
                self.counts[name] += 1

    def __enter__(self) -> Counter[str]:
        old, data = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.ggml_log_get(ctypes.byref(old), ctypes.byref(data))
        self._before = old, data
        self._library.ggml_log_set(ctypes.cast(self._callback, ctypes.c_void_p), None)
        return self.counts

    def __exit__(self, *_: object) -> None:
        self._library.ggml_log_set(*self._before)
