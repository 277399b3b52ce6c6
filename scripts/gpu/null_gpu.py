"""Builds the null GPU, CUDA libraries that compute nothing, and reads its counters.

ggml's CUDA backend runs on it unmodified: it allocates memory, captures graphs and launches them.
Allocated bytes, calls and host time are real; results and GPU time are not.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from dflash_gguf import Error
from dflash_gguf.backend_build.build import cuda_homes, first_of

SOURCE = Path(__file__).with_suffix(".cpp")
DRIVER = "libcuda.so.1"
COUNTS = (
    "used_bytes",
    "peak_bytes",
    "allocations",
    "pinned_bytes",
    "kernels",
    "captured_kernels",
    "captures",
    "graph_launches",
    "graph_updates",
    "cublas_calls",
    "synchronizations",
    "copies_to_gpu",
    "bytes_to_gpu",
    "copies_to_host",
    "bytes_to_host",
)
"""Names of the null GPU's counters, in the order of Counts in cuda_common.h."""
CALLS = (
    "allocations",
    "kernels",
    "captures",
    "graph_launches",
    "synchronizations",
    "copies_to_gpu",
    "bytes_to_gpu",
    "copies_to_host",
    "bytes_to_host",
)
"""Counters that `calls_a_round` reports."""


def build(cache: Path, capability: str) -> Path:
    """Compiles the null GPU's libraries if needed; returns their folder, for LD_LIBRARY_PATH.

    capability: compute capability like "86", for which the backend module was compiled. Raises
    SystemExit with a message if the capability is invalid, or CUDA's headers or the compiler fail.
    """
    if not capability.isdigit():
        raise SystemExit(f"--null-gpu {capability!r}: name a compute capability like 86")
    try:
        header = first_of(cuda_homes(), "nvidia-cuda-runtime", "include/cuda_runtime_api.h")
    except Error as error:
        raise SystemExit(str(error)) from None
    version = re.search(r"define CUDART_VERSION\s+(\d+)", header.read_text(encoding="utf-8"))
    major = int(version[1]) // 1000 if version else 13
    folder = cache / f"null-gpu-{capability}-cuda{major}"
    libraries = {
        "DRIVER": DRIVER,
        "RUNTIME": f"libcudart.so.{major}",
        "CUBLAS": f"libcublas.so.{major}",
    }
    last = folder / libraries["CUBLAS"]
    newest = max(x.stat().st_mtime for x in [SOURCE, *SOURCE.parent.glob("*.h")])
    if last.is_file() and last.stat().st_mtime > newest:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in libraries.items():
        flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"]
        flags += ["-isystem", str(header.parent), f"-Wl,-soname,{name}"]
        flags += [f"-DNULL_GPU_{part}", f"-DNULL_GPU_CAPABILITY={capability}"]
        linked = []
        if part != "DRIVER":  # the real runtime and cuBLAS have symbol versions
            versions = folder / f"{part}.map"
            versions.write_text(f"{name} {{ *; }};\n", encoding="utf-8")
            flags += [f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN"]
            linked = [f"-L{folder}", f"-l:{DRIVER}"]
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, *flags, str(SOURCE), *linked, "-o", str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{compiler} failed on {SOURCE.name}: {done.stderr[-4000:]}")
    return folder


def restart(cache: Path, capability: str, module: Path) -> None:
    """Restarts this process on the null GPU and ends with its status, unless it runs there."""
    folder = str(build(cache.resolve(), capability))
    paths = os.environ.get("LD_LIBRARY_PATH", "")
    if folder not in paths:
        again = {**os.environ, "LD_LIBRARY_PATH": f"{folder}{os.pathsep}{paths}"}
        again["GGML_BACKEND_PATH"] = str(module.resolve())
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=again, check=False).returncode)


def counts() -> dict[str, int] | None:
    """Returns the null GPU's counters by name, or None if this process has no null GPU."""
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        found = driver.null_gpu_counts
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.POINTER(ctypes.c_int64 * len(COUNTS))
    return dict(zip(COUNTS, found().contents, strict=True))


def launches() -> Counter[str]:
    """Returns the launches of each kernel of the null GPU by name with template arguments."""
    driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    text = ctypes.create_string_buffer(1 << 20)
    driver.null_gpu_write_launches(text, ctypes.c_size_t(len(text)))
    found: Counter[str] = Counter()
    for line in text.value.decode().splitlines():
        n, name = line.split(" ", 1)  # of a C++ function with its arguments
        end = name.find(">(") + 1 or name.find("(")
        found[name[: end if end > 0 else None].removeprefix("void ")] += int(n)
    return found


def calls_a_round(
    before: dict[str, int] | None, after: dict[str, int] | None, n_rounds: int
) -> dict[str, dict[str, float]]:
    """Returns {"calls_a_round": mean growth of each counter a round}, or {} without a null GPU."""
    if before is None or after is None:
        return {}
    return {"calls_a_round": {x: round((after[x] - before[x]) / n_rounds, 2) for x in CALLS}}


def kernels_a_graph(
    before: dict[str, int] | None, after: dict[str, int] | None
) -> dict[str, float]:
    """Returns {"kernels_a_graph": mean kernels of captured graphs}, or {} if none was captured."""
    if before is None or after is None or after["captures"] == before["captures"]:
        return {}
    n_graphs = after["captures"] - before["captures"]
    return {"kernels_a_graph": (after["captured_kernels"] - before["captured_kernels"]) / n_graphs}
