"""CUDA kernels of our own, executed by the software GPU beside references in float64."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_gpu import cuda_libraries

from dflash_gguf import Error
from dflash_gguf.backend_build.for_tests import FLAGS, toolkit

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "cuda"
TESTS = {
    "delta_tree": ("delta_tree", "delta_promote"),
    "delta_convolve": ("delta_convolve",),
}
"""Kernels that each test program calls."""
REVERSED = {"SOFT_GPU_REVERSE": "1"}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a test program, with texts of kernels, in a given order of warps."""
    try:
        libraries = cuda_libraries()
        nvcc = str(toolkit() / "bin" / "nvcc")
    except Error as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("cuda")
    (runtime,) = libraries.glob("libcudart.so.*[0-9]")
    made: dict[tuple[str, ...], str] = {}

    def compiled(text: str, near: Path) -> str:
        if (text,) not in made:
            source, made[text,] = folder / f"{len(made)}.cu", str(folder / f"{len(made)}.o")
            source.write_text(text, encoding="utf-8")
            folders = [f"-I{ROOT / 'csrc'}", f"-I{near}"]
            subprocess.run([nvcc, *FLAGS, *folders, "-c", source, "-o", made[text,]], check=True)
        return made[text,]

    def of(test: str, *kernels: str, **variables: str) -> subprocess.CompletedProcess[str]:
        key = (test, *kernels)
        if key not in made:
            program = made[key] = str(folder / f"test-{len(made)}")
            source = ROOT / "tests" / "cuda" / f"{test}_test.cu"
            objects = [compiled(source.read_text(encoding="utf-8"), source.parent)]
            objects += [compiled(kernel, KERNELS) for kernel in kernels]
            libs = ["-cudart=none", f"-L{libraries}", f"-l:{runtime.name}"]
            subprocess.run([nvcc, *objects, *libs, "-o", program], check=True)
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)} | variables
        command = [made[key], "quick"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return of


def texts(test: str) -> list[str]:
    return [(KERNELS / f"{name}.cu").read_text(encoding="utf-8") for name in TESTS[test]]


@pytest.mark.parametrize("variables", [{}, REVERSED], ids=["in order", "reversed"])
@pytest.mark.parametrize("test", TESTS)
def test_results_are_right(run: Run, test: str, variables: dict[str, str]) -> None:
    done = run(test, *texts(test), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(": right")


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("delta_tree", "        __syncthreads();\n        END_PHASE(5);", "        END_PHASE(5);"),
        ("delta_tree", "update_of(tile + j)[work.n_k", "update_of(first - NODES + j)[work.n_k"),
        ("delta_convolve", "input(work.taps[i * n_nodes + x])", "input(x + i)"),
        ("delta_convolve", "work.update_rows[x] * work", "x * work"),
    ],
    ids=["barrier removed", "u of another tile", "taps of a chain", "another update row"],
)
def test_a_fault_of_a_kernel_is_found(run: Run, test: str, right: str, wrong: str) -> None:
    assert sum(text.count(right) for text in texts(test)) == 1
    faulty = [text.replace(right, wrong) for text in texts(test)]
    runs = (run(test, *faulty, **variables).stdout for variables in ({}, REVERSED))
    assert any("WRONG" in output for output in runs)
