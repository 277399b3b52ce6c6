"""Compiles ggml's CUDA or Vulkan backend as a module for the installed llama-cpp-python.

The module stays in the cache folder. An interrupted build continues where it stopped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ..native import Error
from .kernels import kernel_folder, kernel_sources, write_patched
from .sources import DEFAULT_CACHE, fetch, installed_version

KINDS = ("cuda", "vulkan")
VULKAN_COMPAT = Path(__file__).parent / "vulkan_compat.h"
# A project of our own around ggml's folder: ggml's CMake project needs files that the sdist lacks.
PARENT = """\
cmake_minimum_required(VERSION 3.18)
project(ggml_module C CXX)
add_subdirectory({sources} ggml)
"""
# Adds our kernels to the ggml-cuda target, whose ggml-cuda.cu is replaced by one that calls them.
WITH_KERNELS = """\
get_target_property(sources ggml-cuda SOURCES)
list(FILTER sources EXCLUDE REGEX "/ggml-cuda\\\\.cu$")
set_property(TARGET ggml-cuda PROPERTY SOURCES ${{sources}} {kernels})
target_include_directories(ggml-cuda PRIVATE {sources}/src {folder})
"""
# Pairs of K and V types that get CUDA attention kernels for one or two rows; each pair adds 12 s
# of compiling. K and V of other pairs are converted to float16 at every step.
KV_TYPES = "f16-f16;bf16-bf16;q8_0-q8_0;q8_0-q4_0;q5_1-q5_1;q5_0-q4_0;q4_0-q4_0"
# Functions of libcuda that the CUDA module calls; without a driver a stub with them is linked.
DRIVER_FUNCTIONS = [
    "DeviceGet",
    "DeviceGetAttribute",
    "GetErrorString",
    "MemAddressFree",
    "MemAddressReserve",
    "MemCreate",
    "MemGetAllocationGranularity",
    "MemMap",
    "MemRelease",
    "MemSetAccess",
    "MemUnmap",
]


def module_path(kind: str, cache: Path = DEFAULT_CACHE, arch: str = "") -> Path:
    """Returns a backend module's path, built or not. Error for CUDA without `arch` or a GPU."""
    gpus = f"-{(arch or _architectures()).replace(';', '+')}" if kind == "cuda" else ""
    return cache / f"backend-{kind}-{installed_version()}{gpus}" / f"libggml-{kind}.so"


def built_modules(cache: Path = DEFAULT_CACHE) -> list[Path]:
    """Returns the paths of cached backend modules for the installed llama-cpp-python."""
    return sorted(
        path
        for kind in KINDS
        for path in cache.glob(f"backend-{kind}-{installed_version()}*/libggml-{kind}.so")
    )


def build(
    kind: str,
    cache: Path = DEFAULT_CACHE,
    *,
    jobs: int = 0,
    arch: str = "",
    again: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Builds a backend module unless it is cached. Returns the module's path.

    jobs: parallel compilers, 0: one per core. arch: CUDA architectures, "": those of local GPUs.
    again: True to rebuild a cached module. tell: called with a message before compiling. Error for
    a missing or failed tool.
    """
    module = module_path(kind, cache, arch)
    if module.is_file() and not again:
        return module
    folder = module.parent / "build"
    folder.mkdir(parents=True, exist_ok=True)
    sources = fetch(cache) / "ggml"
    project = PARENT.format(sources=sources)
    if kind == "cuda":
        files = [write_patched(sources, folder), *kernel_sources()]
        kernels = " ".join(map(str, files))
        project += WITH_KERNELS.format(sources=sources, kernels=kernels, folder=kernel_folder())
    (folder / "CMakeLists.txt").write_text(project, encoding="utf-8")
    configure = [
        "cmake",
        "-S",
        str(folder),
        "-B",
        str(folder / "out"),
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    configure += ["-DGGML_BACKEND_DL=ON", "-DGGML_CPU=OFF", "-DGGML_NATIVE=OFF"]
    configure += ["-DGGML_CCACHE=OFF", f"-DGGML_{kind.upper()}=ON"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    if kind == "cuda":
        configure += cuda_options(folder, arch)
    else:
        configure += [f"-DCMAKE_CXX_FLAGS=-include {VULKAN_COMPAT}"]
    target = ["--target", f"ggml-{kind}", "--parallel", str(jobs or os.cpu_count() or 1)]
    run(configure)
    tell(f"compiling {module} (interrupted, the same command goes on where it stopped)")
    run(["cmake", "--build", str(folder / "out"), *target])
    (built,) = (folder / "out").rglob(module.name)
    run(["strip", "--strip-unneeded", str(built)])
    os.replace(built, module)
    shutil.rmtree(folder)
    return module


def cuda_options(folder: Path, arch: str) -> list[str]:
    """Returns CMake's options for CUDA; Error if nvcc or cuBLAS is missing."""
    nvcc = _nvcc()
    homes = cuda_homes()
    headers = first_of(homes, "nvidia-cublas", "include/cublas_v2.h")
    library = first_of(homes, "nvidia-cublas", "lib64/libcublas.so*", "lib/libcublas.so*")
    driver = _driver() or _driver_stub(folder)
    options = [
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        "-DGGML_CUDA_GRAPHS=ON",
        "-DGGML_CUDA_NCCL=OFF",
        f"-DGGML_CUDA_FA_QUANTS={KV_TYPES}",
        f"-DCMAKE_CUDA_FLAGS=-I{headers.parent}",
        f"-DCUDA_cublas_LIBRARY={library}",
        f"-DCUDA_cuda_driver_LIBRARY={driver}",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH={library.parent}:$ORIGIN",
    ]
    return [*options, f"-DCMAKE_CUDA_ARCHITECTURES={arch or _architectures()}"]


def _nvcc() -> str:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise Error("nvcc is not on the PATH: install the CUDA toolkit, or set CUDACXX")
    return nvcc


def cuda_homes() -> list[Path]:
    """Returns CUDA folders (with include/, lib/): nvcc's toolkit, NVIDIA's Python packages."""
    nvcc = _nvcc()
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE)
    homes = [Path(top[1])] if top else [Path(nvcc).resolve().parent.parent]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        homes += sorted(Path(folder).glob("cu[0-9]*"))
        homes += sorted(Path(folder).glob("cublas"))
    return homes


def first_of(homes: list[Path], package: str, *patterns: str) -> Path:
    """Returns the first file that matches a pattern; else an Error names the missing package."""
    for home in homes:
        for pattern in patterns:
            paths = sorted(home.glob(pattern))
            if paths:
                return paths[0]
    raise Error(f"no {patterns[0]} under {', '.join(map(str, homes))}: install {package}")


def _driver() -> Path | None:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    library = re.search(r"libcuda\.so\.1 .*=> (.+)$", listed, re.MULTILINE)
    return Path(library[1]) if library else None


def _driver_stub(folder: Path) -> Path:
    """Compiles a stub of libcuda to link on machines without a driver; never loads the stub."""
    stub = folder / "libcuda.so"
    source = "".join(f"int cu{name}(void) {{ return 100; }}\n" for name in DRIVER_FUNCTIONS)
    (folder / "stub.c").write_text(source, encoding="utf-8")
    name = "-Wl,-soname,libcuda.so.1"
    run(["cc", "-shared", "-fPIC", name, str(folder / "stub.c"), "-o", str(stub)])
    return stub


def _architectures() -> str:
    """Returns the local GPUs' compute capabilities in CMake's form, "86-real;90-real"."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise Error(
            "no GPU to build for (nvidia-smi is missing): name its architecture, --arch 86"
        ) from None
    if done.returncode:
        raise Error(f"nvidia-smi failed, name the architecture with --arch: {done.stderr}")
    capabilities = sorted({line.replace(".", "") for line in done.stdout.split()})
    return ";".join(f"{capability}-real" for capability in capabilities)


def run(command: Sequence[str]) -> None:
    """Runs a tool of the build; Error with the first error of its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise Error(f"{command[0]} is not on the PATH: install it") from None
    if done.returncode:
        log = done.stdout + done.stderr
        raise Error(f"{command[0]} failed: {first_error(log)}\n{' '.join(command)}\n{log[-8000:]}")


def first_error(log: str) -> str:
    """Returns the first line of a build log with "fatal error", or with "error", or the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if fatal := [line for line in lines if "fatal error" in line]:
        return fatal[0]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if re.search(r"\berror\b", line, re.IGNORECASE):
            return f"{line} {following}" if line.endswith(":") else line
    return lines[-1] if lines else "no output"
