"""Compiles the software GPU of tests/soft_gpu, and runs kernels of PTX text on numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dflash_gguf.backend_build.for_tests import toolkit

FOLDER = Path(__file__).parents[1] / "soft_gpu"
SHARED = FOLDER.parents[1] / "scripts" / "gpu"
"""Folder of the headers that the null GPU and the software GPU share."""
BUILT = FOLDER.parents[1] / "build" / "soft_gpu"
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fno-math-errno", "-fno-strict-aliasing", "-fwrapv")
FLAGS += ("-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")
INTERPRETER = sorted(FOLDER.glob("*.cpp"))
VERSION = ".version 8.0\n.target sm_86\n.address_size 64\n"
N_PARALLEL = 2
"""Compilers at a time."""

Argument = np.ndarray | np.generic | int


class GpuError(Exception):
    """The software GPU ended a run: its message."""


def _replace(made: Path, command: Sequence[str]) -> None:
    """Runs a compiler into a file, which appears as a whole; earlier versions are removed."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        new = Path(folder) / made.name
        subprocess.run([*command, "-o", str(new)], check=True)
        for old in made.parent.glob(f"{made.name.rpartition('-')[0] or made.name}-*"):
            old.unlink(missing_ok=True)
        new.replace(made)


def compiled(sources: Sequence[Path], flags: Sequence[str] = ()) -> list[Path]:
    """Returns object files of sources, from build/soft_gpu if they have not changed."""
    compiler = os.environ.get("CXX", "c++")
    facts = hashlib.sha256(" ".join([compiler, *FLAGS, *flags]).encode())
    facts.update(subprocess.run([compiler, "--version"], capture_output=True).stdout)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):  # of -march=native
            facts.update(line.encode())
            break
    for header in sorted([*FOLDER.rglob("*.h"), *SHARED.glob("*.h")]):
        facts.update(header.read_bytes())

    def compile_one(source: Path) -> Path:
        text = facts.copy()
        text.update(source.read_bytes())
        made = BUILT / f"{source.stem}-{text.hexdigest()[:16]}.o"
        if not made.is_file():
            _replace(made, [compiler, *FLAGS, *flags, "-c", str(source)])
        return made

    with ThreadPoolExecutor(N_PARALLEL) as pool:
        return list(pool.map(compile_one, sources))


def _hash(objects: Sequence[Path]) -> str:
    """Returns a hash of objects, whose names hold one of their content."""
    return hashlib.sha256(" ".join(x.name for x in objects).encode()).hexdigest()[:16]


def _link(library: Path, objects: Sequence[Path], *flags: str) -> None:
    compiler = os.environ.get("CXX", "c++")
    _replace(library, [compiler, "-shared", "-pthread", *map(str, objects), *flags])


def cuda_libraries() -> Path:
    """Returns a folder with libcuda, libcudart and libcublas of the software GPU.

    Raises dflash_gguf.Error if nvcc's packages cannot be had.
    """
    include = toolkit() / "include"
    names = ("driver", "device_memory", "streams", "runtime", "graphs", "launches", "cublas")
    sources = [FOLDER / "cuda" / f"{name}.cpp" for name in names]
    flags = [f"-I{SHARED}", "-isystem", str(include)]
    cuda = dict(zip(names, compiled(sources, flags), strict=True))
    interpreter = compiled([x for x in INTERPRETER if x.stem != "for_tests"])
    parts = {
        "libcuda.so.1": [*interpreter, cuda["driver"], cuda["device_memory"], cuda["streams"]],
        "libcudart.so.13": [cuda["runtime"], cuda["graphs"], cuda["launches"]],
        "libcublas.so.13": [cuda["cublas"]],
    }
    folder = BUILT / f"cuda-{_hash([*interpreter, *cuda.values()])}"
    for name, objects in parts.items():
        flags = [f"-Wl,-soname,{name}"]
        if name != "libcuda.so.1":  # the real ones have symbol versions
            versions = folder / f"{name}.map"
            versions.write_text(f"{name} {{ *; }};\n", encoding="utf-8")
            flags += [f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN"]
            flags += [f"-L{folder}", "-l:libcuda.so.1"]
        if not (folder / name).is_file():
            _link(folder / name, objects, *flags)
    return folder


@functools.cache
def _library() -> ctypes.CDLL:
    objects = compiled(INTERPRETER)
    path = BUILT / f"interpreter-{_hash(objects)}.so"
    if not path.is_file():
        _link(path, objects)
    library = ctypes.CDLL(str(path))
    library.soft_gpu_free.argtypes = [ctypes.c_void_p]
    return library


def _call(function: str, *arguments: object) -> None:
    error = ctypes.create_string_buffer(512)
    if getattr(_library(), function)(*arguments, error):
        raise GpuError(error.value.decode())


def set_order(*, is_reversed: bool = False, n_threads: int = 1, max_jumps: int = 10**6) -> None:
    """Sets the order of warps, the threads for blocks, and the limit of jumps back of a warp."""
    _library().soft_gpu_set(int(is_reversed), n_threads, ctypes.c_uint64(max_jumps))


class PtxModule:
    """Kernels of a PTX text. A text without its head gets that of sm_86."""

    def __init__(self, text: str) -> None:
        self._module = ctypes.c_void_p()
        whole = text if ".version" in text else VERSION + text
        _call("soft_gpu_load", whole.encode(), ctypes.byref(self._module))

    def __del__(self) -> None:
        if self._module:
            _library().soft_gpu_free(self._module)

    def unknown_instructions(self) -> list[str]:
        """Returns the instructions that the kernels must not reach, with the reasons."""
        text = ctypes.create_string_buffer(1 << 20)
        _call("soft_gpu_unknown", self._module, text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def launch(
        self,
        name: str,
        *arguments: Argument,
        grid: Sequence[int] = (1,),
        block: Sequence[int] = (32,),
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Runs a kernel. Arrays are passed by address, so that it reads and writes them in place.

        Raises GpuError if the software GPU ends the run.
        """
        sizes = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        values = [
            np.array(x.ctypes.data, np.uint64) if isinstance(x, np.ndarray) else np.asarray(x)
            for x in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(x.ctypes.data for x in values))
        _call(
            "soft_gpu_launch",
            self._module,
            name.encode(),
            (ctypes.c_uint32 * 6)(*sizes),
            shared,
            int(cooperative),
            pointers,
            ctypes.c_size_t(len(values)),
        )
