"""Calls CUDA's runtime as a program does that nvcc compiled. Used by children of the tests."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path

import numpy as np

TO_GPU, TO_HOST = 1, 2
HEADER_BYTES = 64


class Dim3(ctypes.Structure):
    _fields_ = (("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


class FatBinary(ctypes.Structure):
    _fields_ = (
        ("magic", c_uint32),
        ("version", c_uint32),
        ("data", c_void_p),
        ("unused", c_void_p),
    )


def fat_binary(ptx: str) -> bytes:
    """A header of 16 bytes, and one image: PTX that is not compressed."""
    text = ptx.encode() + b"\0"
    sizes = np.array([HEADER_BYTES, len(text)], np.uint32)
    image = np.array([1, 0x0101], np.uint16).tobytes() + sizes[:1].tobytes()
    image += np.array([len(text)], np.uint64).tobytes()
    image = image.ljust(HEADER_BYTES, b"\0") + text
    header = np.array([0xBA55ED50], np.uint32).tobytes() + np.array([1, 16], np.uint16).tobytes()
    return header + np.array([len(image)], np.uint64).tobytes() + image


class Runtime:
    """The libraries of a folder, with a module of PTX text."""

    def __init__(self, folder: Path, ptx: str = "") -> None:
        (library,) = folder.glob("libcudart.so.*[0-9]")
        self.cuda = ctypes.CDLL(str(library))
        (library,) = folder.glob("libcublas.so.*[0-9]")
        self.cublas = ctypes.CDLL(str(library))
        self._handles = itertools.count(1)
        self._kernels: dict[str, int] = {}
        getattr(self.cuda, "__cudaRegisterFatBinary").restype = c_void_p
        if ptx:
            self._data = ctypes.create_string_buffer(fat_binary(ptx))
            address = ctypes.cast(self._data, c_void_p)
            self._wrapper = FatBinary(0x466243B1, 1, address, None)
            register = getattr(self.cuda, "__cudaRegisterFatBinary")
            self._module = c_void_p(register(byref(self._wrapper)))

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cuda, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def allocate(self, n_bytes: int) -> int:
        at = c_void_p()
        self.call("cudaMalloc", byref(at), c_size_t(n_bytes))
        assert at.value is not None
        return at.value

    def pinned(self, n: int) -> np.ndarray:
        """Returns n pinned floats."""
        at = c_void_p()
        self.call("cudaHostAlloc", byref(at), c_size_t(4 * n), 0)
        return np.ctypeslib.as_array(ctypes.cast(at, POINTER(ctypes.c_float)), (n,))

    def stream(self) -> int:
        at = c_void_p()
        self.call("cudaStreamCreateWithFlags", byref(at), 1)
        assert at.value is not None
        return at.value

    def copy(self, to: object, source: object, n_bytes: int, kind: int, stream: int) -> None:
        def pointer(x: object) -> c_void_p:
            return c_void_p(x.ctypes.data if isinstance(x, np.ndarray) else x)  # type: ignore

        self.call(
            "cudaMemcpyAsync",
            pointer(to),
            pointer(source),
            c_size_t(n_bytes),
            kind,
            c_void_p(stream),
        )

    def read(self, at: int, n: int, stream: int) -> list[float]:
        """Returns n floats of the GPU's memory."""
        found = np.zeros(n, np.float32)
        self.copy(found, at, 4 * n, TO_HOST, stream)
        return found.tolist()

    def launch(
        self, name: str, arguments: list[int | np.generic], n_blocks: int, n: int, stream: int
    ) -> None:
        """Enqueues a kernel. Integers are addresses."""
        if name not in self._kernels:
            self._kernels[name] = next(self._handles)
            register = getattr(self.cuda, "__cudaRegisterFunction")
            register(self._module, c_void_p(self._kernels[name]), None, c_char_p(name.encode()))
        values = [np.asarray(np.uint64(x) if isinstance(x, int) else x) for x in arguments]
        pointers = (c_void_p * len(values))(*(x.ctypes.data for x in values))
        sizes = Dim3(n_blocks, 1, 1), Dim3(n, 1, 1)
        kernel = c_void_p(self._kernels[name])
        self.call("__cudaLaunchKernel", kernel, *sizes, pointers, c_size_t(0), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self.call("cudaStreamSynchronize", c_void_p(stream))

    def begin_capture(self, stream: int) -> None:
        self.call("cudaStreamBeginCapture", c_void_p(stream), c_int(2))

    def end_capture(self, stream: int) -> c_void_p:
        graph = c_void_p()
        self.call("cudaStreamEndCapture", c_void_p(stream), byref(graph))
        return graph
