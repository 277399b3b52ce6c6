"""Compiles ggml's CUDA backend to PTX text, for tests on machines without a GPU.

A GPU in software (tests/soft_gpu) executes the module's kernels, and a driver compiles them for a
real GPU. Only the kernels are compiled that tests of small models launch; the others end the
process when they are called. Object files stay in the cache folder, so an interrupted build goes on
where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .._run_module import module_command
from .build import run
from .kernels import PATCHED, kernel_folder, kernel_sources, write_patched
from .sources import DEFAULT_CACHE, fetch, installed_version

CAPABILITY = 86
"""Compute capability of the kernels: an RTX 3090's."""
FLAGS = (
    *("-std=c++17", "-O2", "-use_fast_math", "-extended-lambda", "-compress-mode=none"),
    *("-gencode", f"arch=compute_{CAPABILITY},code=compute_{CAPABILITY}", "-Xcompiler", "-fPIC"),
    *("-DNDEBUG", "-DGGML_CUDA_USE_GRAPHS", "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128"),
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"),
    *('-DGGML_VERSION="tests"', '-DGGML_COMMIT="tests"'),
)
TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
)
"""NVIDIA's packages with nvcc, its headers and its libraries: 100 MB."""
KV_TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types of K and V that ggml has attention kernels for."""
SOURCES = (
    *("add-id", "argmax", "argsort", "binbcast", "clamp", "concat", "convert", "cpy", "cumsum"),
    *("fattn", "fill", "fwht", "gated_delta_net", "getrows", "mmf", "mmid", "mmq"),
    *("mmvf", "mmvq", "moe-weighted-reduction", "norm", "pad", "quantize", "rope", "scale"),
    *("set-rows", "softcap", "softmax", "solve_tri", "ssm-conv", "sum", "sumrows", "top-k"),
    *("topk-moe", "tri", "unary"),
)
"""Files of ggml's CUDA backend, without the suffix."""
Instances = dict[str, tuple[str, Sequence[str]]]
"""Files to write, by name: a header of ggml's and instances of its templates."""


def _attention(head: int, n_heads: int, columns: Iterable[int] = (8, 16, 32, 64)) -> Instances:
    """Returns attention by tensor cores: columns of a tile, n_heads of them heads of one K/V."""
    cases = [f"DECL_FATTN_MMA_F16_CASE({head}, {head}, {n // n_heads}, {n_heads})" for n in columns]
    return {f"attention-{head}-{n_heads}": ("fattn-mma-f16.cuh", cases)}


def _rows(heads: Iterable[int], types: Iterable[str]) -> Instances:
    """Returns attention of one or two rows over K and V of one type each."""
    return {
        f"attention-{head}-{kind}": (
            "fattn-vec.cuh",
            [f"DECL_FATTN_VEC_CASE({head}, GGML_TYPE_{kind}, GGML_TYPE_{kind})"],
        )
        for head in heads
        for kind in types
    }


def _products(types: Iterable[str], columns: Iterable[int]) -> Instances:
    """Returns products of quantised weights by type, and of floats by columns."""
    quantised: Instances = {
        f"product-{kind}": ("mmq.cuh", [f"DECL_MMQ_CASE(GGML_TYPE_{kind})"]) for kind in types
    }
    return quantised | {f"product-{n}": ("mmf.cuh", [f"DECL_MMF_CASE({n})"]) for n in columns}


FEW: Instances = {
    **_attention(64, 1),
    **_attention(64, 2),
    **_attention(256, 1),
    **_attention(256, 2),
    **_attention(256, 8),
    **_attention(512, 2),
    **_rows((64, 256), ("F16", "Q8_0")),
    **_rows((64,), ("Q4_0", "Q5_1")),
    **_products(("Q8_0", "MXFP4"), (8, 16)),
}
"""Templates that CI compiles: those of each architecture with Q8_0 weights."""
ALL: Instances = {
    **FEW,
    **_attention(128, 1),
    **_attention(128, 4),
    **_rows((128,), ("F16", "Q8_0")),
    **_rows((128, 256), ("Q4_0",)),
    **_products(("Q4_0", "Q4_K", "Q6_K"), range(2, 17)),
}
SETS = {"few": FEW, "all": ALL}
LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcuda.so.1")
"""Libraries that the module asks for: the real ones, or those of a GPU in software."""
CUBLAS = Path(__file__).parent / "include"
LEFT_OUT = "error: the module for tests was built without"


def toolkit(cache: Path = DEFAULT_CACHE) -> Path:
    """Returns a CUDA folder with nvcc; installs TOOLKIT into the cache on first use.

    A folder of its own, because other packages of an environment may need other versions. Error if
    the packages cannot be had.
    """
    home = cache / TOOLKIT[0].replace("==", "-")
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as folder:
            pip = [*module_command("pip"), "--disable-pip-version-check", "install", "--quiet"]
            run([*pip, "--no-deps", "--target", folder, *TOOLKIT])
            try:
                (Path(folder) / "nvidia" / "cu13").rename(home)
            except OSError:
                if not home.is_dir():  # else another process was faster
                    raise
    return home


def build_for_tests(
    which: str,
    cache: Path = DEFAULT_CACHE,
    *,
    jobs: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Builds the module of PTX text unless it is cached. Returns the module's path.

    which: a key of SETS. jobs: parallel compilers, 0: one per core. tell: called with a message
    before compiling. Error for a missing or failed tool.
    """
    import fcntl  # Windows has no such module

    folder = cache / f"backend-cuda-{installed_version()}-for-tests"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # workers of tests would compile every file twice
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _built(which, cache, folder, jobs, tell)


def _built(which: str, cache: Path, folder: Path, jobs: int, tell: Callable[[str], None]) -> Path:
    ggml = fetch(cache) / "ggml"
    backend = ggml / "src" / "ggml-cuda"
    nvcc = str(toolkit(cache) / "bin" / "nvcc")
    headers = [backend, ggml / "include", ggml / "src", CUBLAS, kernel_folder()]
    kinds = {f"-DGGML_CUDA_FA_{k}_{v}={int(k == v)}" for k in KV_TYPES for v in KV_TYPES}
    flags = [*FLAGS, *sorted(kinds)]
    command = [nvcc, *flags, *(f"-I{path}" for path in headers)]
    sources = [backend / f"{name}.cu" for name in SOURCES]
    sources += [write_patched(ggml, folder), *kernel_sources()]
    for name, (header, cases) in SETS[which].items():
        sources.append(folder / f"{name}.cu")
        text = f'#include "{header}"\n' + "".join(f"{case};\n" for case in cases)
        sources[-1].write_text(text, encoding="utf-8")
    objects = {_object(folder, source, flags): source for source in sources}
    names = hashlib.sha256(" ".join(sorted(x.name for x in objects)).encode()).hexdigest()[:16]
    module = folder / names / "libggml-cuda.so"
    if module.is_file():
        return module
    missing = {made: source for made, source in objects.items() if not made.is_file()}
    tell(f"compiling {len(missing)} files of {module} (interrupted, the same command goes on)")

    def compile_one(made: Path, source: Path) -> None:
        part = made.with_suffix(".part")
        run([*command, "-c", str(source), "-o", str(part)])
        part.replace(made)

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        for _ in pool.map(compile_one, missing, missing.values()):
            pass
    _link(module, sorted(objects))
    return module


def _object(folder: Path, source: Path, flags: Sequence[str]) -> Path:
    """Returns the path of a source's object file; its name has a hash of what it depends on."""
    text = hashlib.sha256("\n".join([*TOOLKIT, *flags]).encode())
    text.update((CUBLAS / "cublas_v2.h").read_bytes())
    if source in kernel_sources() or source.name == PATCHED:
        for header in sorted((kernel_folder() / "cuda").glob("*.*h")):
            text.update(header.read_bytes())
    text.update(source.read_bytes())
    return folder / f"{source.stem}-{text.hexdigest()[:16]}.o"


def _link(module: Path, objects: Sequence[Path]) -> None:
    """Links objects, CUDA's libraries by their names, and stubs for kernels that were left out."""
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC"]
    module.parent.mkdir(parents=True, exist_ok=True)
    libraries = [module.parent / name for name in LIBRARIES]
    for library in libraries:
        run([*compiler, f"-Wl,-soname,{library.name}", "-x", "c", os.devnull, "-o", str(library)])
    stubs = module.parent / "stubs.cpp"
    stubs.write_text(_stubs(objects), encoding="utf-8")
    part = module.with_suffix(".part")
    linked = [*map(str, objects), str(stubs), *map(str, libraries)]
    run([*compiler, "-Wl,--no-as-needed", *linked, "-o", str(part)])
    part.replace(module)


def _stubs(objects: Sequence[Path]) -> str:
    """Returns C++ code that ends the process in functions of ggml's that no object has."""
    lines = subprocess.run(
        ["nm", *map(str, objects)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [line.split()[-2:] for line in lines if len(line.split()) > 1]
    defined = {name for kind, name in found if kind != "U"}
    names = sorted({name for kind, name in found if kind == "U"} - defined)
    code = "#include <cstdio>\n#include <cstdlib>\n"
    for number, name in enumerate(filter(re.compile(r"_Z\w*(ggml|mul_mat|flash)").match, names)):
        code += (
            f'extern "C" void stub_{number}() __asm__("{name}");\nvoid stub_{number}() {{ '
            f'std::fputs("{LEFT_OUT} {name}\\n", stderr); std::_Exit(70); }}\n'
        )
    return code
