"""Compares kernels on a GPU with the same kernels in the interpreter of tests/soft_gpu.

Builds the module of `dflash-backend build cuda --for-tests few`, whose PTX the GPU's driver
compiles, or takes --ptx MODULE. Prints a JSON line for each operation of ggml, and for each row of
logits of small models: the share of equal numbers, and the largest difference as a share of the
interpreter's range. scripts/bench_gpu.py runs it as part `ptx`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.backend_build.build import cuda_homes, first_of
from dflash_gguf.backend_build.for_tests import build_for_tests
from dflash_gguf.config import LoadConfig

sys.path += [
    str(Path(__file__).resolve().parents[2] / x)
    for x in ("tests/support", "scripts", "scripts/bench")
]
from gpu import ggml_device
from gpu.child import report
from gpu.files import write_pair
from gpu.setting import Figures, Setting, add_arguments
from soft_gpu import cuda_libraries
from trees import comb, tokens_for

MODELS = ("tiny-llama", "tiny-qwen35")
DEVICE = "CUDA0"
TYPES = {"f32": (0, np.float32), "f16": (1, np.float16), "q8_0": (8, np.uint8)}
"""ggml's number of a type, and the type of its arrays."""
Values = dict[str, NDArray[Any]]
Pointer = ctypes.c_void_p


class Operations:
    """Runs single operations of ggml on a device with random inputs."""

    def __init__(self) -> None:
        self._library = library = ggml_device.library()
        for name in ("ggml_new_tensor_4d", "ggml_new_graph"):
            getattr(library, name).restype = Pointer
        library.ggml_new_tensor_4d.argtypes = [Pointer, ctypes.c_int, *[ctypes.c_int64] * 4]
        library.ggml_nbytes.restype = ctypes.c_size_t
        device = Pointer(library.ggml_backend_dev_by_name(DEVICE.encode()))
        self._backend = Pointer(library.ggml_backend_dev_init(device, None))
        self._random = np.random.default_rng(0)
        self.found: Values = {}

    def random(self, kind: str, *shape: int) -> tuple[str, NDArray[Any], tuple[int, ...]]:
        """Returns random values of a type; shape: as ggml counts, columns first."""
        values = self._random.standard_normal(shape[::-1], np.float32)
        if kind == "q8_0":
            rows = values.reshape(-1, shape[0])
            blocks = np.zeros(rows.size // 32 * 34, np.uint8)
            self._library.ggml_quantize_chunk(
                TYPES[kind][0],
                Pointer(rows.ctypes.data),
                Pointer(blocks.ctypes.data),
                *(ctypes.c_int64(n) for n in (0, *rows.shape)),
                None,
            )
            return kind, blocks, shape
        return kind, values.astype(TYPES[kind][1]), shape

    def run(self, name: str, function: str, inputs: list[Any], *arguments: Any) -> None:
        """Runs ggml's `function` of inputs and arguments; keeps the result by `name`."""
        lib = self._library
        context = Pointer(lib.ggml_init(ggml_device.InitParams(1 << 20, None, True)))
        tensors = [
            Pointer(lib.ggml_new_tensor_4d(context, TYPES[kind][0], *(*shape, 1, 1, 1)[:4]))
            for kind, _, shape in inputs
        ]
        build = getattr(lib, function)
        build.restype = Pointer
        result = Pointer(build(context, *tensors, *arguments))
        graph = Pointer(lib.ggml_new_graph(context))
        lib.ggml_build_forward_expand(graph, result)
        buffer = Pointer(lib.ggml_backend_alloc_ctx_tensors(context, self._backend))
        for tensor, (_, values, _) in zip(tensors, inputs, strict=True):
            span = ctypes.c_size_t(0), ctypes.c_size_t(values.nbytes)
            lib.ggml_backend_tensor_set(tensor, Pointer(values.ctypes.data), *span)
        if lib.ggml_backend_graph_compute(self._backend, graph):
            raise native.Error(f"{name}: the device failed")
        found = np.zeros(lib.ggml_nbytes(result) // 4, np.float32)
        span = ctypes.c_size_t(0), ctypes.c_size_t(found.nbytes)
        lib.ggml_backend_tensor_get(result, Pointer(found.ctypes.data), *span)
        self.found[name] = found
        lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(context)

    def all(self) -> Values:
        """Runs the operations of our graphs that have kernels of different kinds."""
        real = ctypes.c_float
        for n in (256, 4096):
            self.run(f"rms_norm of {n}", "ggml_rms_norm", [self.random("f32", n, 5)], real(1e-5))
        n_rows = {"q8_0": (1, 2, 8, 9, 16, 24, 64), "f16": (1, 8, 16, 64), "f32": (1, 8, 16, 64)}
        for kind, counts in n_rows.items():
            weights = self.random(kind, 512, 192)
            for n in counts:
                rows = self.random("f32", 512, n)
                self.run(f"{kind} product of {n} rows", "ggml_mul_mat", [weights, rows])
        self.run("sum", "ggml_add", [self.random("f32", 256, 5), self.random("f32", 256)])
        self.run("silu", "ggml_silu", [self.random("f32", 256, 5)])
        for n in (3000, 200000):
            self.run(f"softmax of {n}", "ggml_soft_max", [self.random("f32", n, 2)])
        self.run("order of 1000", "ggml_argsort", [self.random("f32", 1000, 3)], 1)
        for n in (1, 8, 16, 64):
            hidden = self._random.random((n, 256)) < 0.3
            mask = ("f16", np.where(hidden, -np.inf, 0).astype(np.float16), (256, n))
            keys, values = (self.random("f16", 64, 256, 2) for _ in range(2))
            inputs = [self.random("f32", 64, n, 4), keys, values, mask]
            scales = real(64**-0.5), real(0), real(0)
            self.run(f"attention of {n} rows", "ggml_flash_attn_ext", inputs, *scales)
        return self.found


def logits_of(folder: Path) -> Values:
    """Returns logits of small models by "model, pass", float32 [n_rows, n_vocab]."""
    found: Values = {}
    for name in MODELS:
        target, drafter = write_pair(folder, name, "q8_0")
        config = LoadConfig(n_ctx=512, n_ubatch=64, device=DEVICE)
        model = native.Model(str(target), config)
        engine = native.Engine(model, drafter=native.Drafter(str(drafter), model))
        sequence, random = native.Sequence(engine), np.random.default_rng(3)
        tokens = random.integers(0, model.n_vocab, 100).tolist()
        found[f"{name}, prompt"] = sequence.logits(tokens)
        sequence.reset()
        sequence.prefill(tokens)
        for number, token in enumerate(tokens[:4]):
            found[f"{name}, step {number}"] = sequence.decode(token).logits(0)
        found[f"{name}, draft"] = sequence.draft(7, sequence.max_draft, 8).logits
        parents = comb(16)
        rows = sequence.verify_tree(tokens_for(parents, random, model.n_vocab), parents)
        for node in range(len(parents)):
            found[f"{name}, node {node}"] = rows.logits(node)
    return found


def measure(module: Path) -> Iterator[Figures]:
    """Yields a line for each operation and each row of logits."""
    with tempfile.TemporaryDirectory() as folder:
        by_side = []
        for side, libraries in (("interpreter", [cuda_libraries()]), ("gpu", _real_libraries())):
            out = Path(folder) / f"{side}.npz"
            paths = [*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
            environment = os.environ | {
                "LD_LIBRARY_PATH": os.pathsep.join(paths),
                "XDG_CACHE_HOME": folder,
            }
            command = [sys.executable, __file__, "--ptx", str(module), "--save", str(out)]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            by_side.append(np.load(out))
        for name in by_side[0].files:
            expected, found = (values[name] for values in by_side)
            scale = float(np.ptp(expected)) or 1.0
            yield {
                "kernel": name,
                "equal": round(float(np.mean(expected == found)), 4),
                "off": float(np.abs(found - expected).max() / scale),
            }


def _real_libraries() -> list[Path]:
    """Returns the folders of NVIDIA's runtime and cuBLAS, as far as they are found."""
    found = []
    for package, name in (("nvidia-cuda-runtime", "libcudart"), ("nvidia-cublas", "libcublas")):
        with contextlib.suppress(native.Error):
            patterns = (f"{folder}/{name}.so*" for folder in ("lib64", "lib"))
            found.append(first_of(cuda_homes(), package, *patterns).parent)
    return found


def save(module: Path, path: Path) -> None:
    """Runs everything on the device of this process and saves the results."""
    native.load_backend(str(module))
    with tempfile.TemporaryDirectory() as folder:
        np.savez(path, **Operations().all(), **logits_of(Path(folder)))


def main() -> None:
    """Runs the command line and ignores arguments of other parts of bench_gpu.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--child", default="ptx", help=argparse.SUPPRESS)
    parser.add_argument("--ptx", type=Path, metavar="MODULE", help="a module that was built before")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args()
    if args.save is not None:
        save(args.ptx, args.save)
    elif Setting.of(args).has_cuda:
        report(args.child, measure(args.ptx or build_for_tests("few", args.cache)))


if __name__ == "__main__":
    main()
