"""CUDA kernels of our own, executed by the software GPU beside the recurrence in float64."""

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
KERNEL = ROOT / "csrc" / "cuda" / "delta_tree.cu"
TEST = ROOT / "tests" / "cuda" / "delta_tree_test.cu"
REVERSED = {"SOFT_GPU_REVERSE": "1"}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the quick cases of the test with a text of the kernel, in a given order of warps."""
    try:
        libraries = cuda_libraries()
        nvcc = str(toolkit() / "bin" / "nvcc")
    except Error as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("cuda")
    (runtime,) = libraries.glob("libcudart.so.*[0-9]")
    programs: dict[str, Path] = {}

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        command = [nvcc, *FLAGS, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", made]
        subprocess.run(command, check=True)
        return made

    test = compiled(TEST)

    def of(kernel: str, **variables: str) -> subprocess.CompletedProcess[str]:
        if kernel not in programs:
            source = folder / f"kernel-{len(programs)}.cu"
            source.write_text(kernel, encoding="utf-8")
            program = folder / f"test-{len(programs)}"
            libs = ["-cudart=none", f"-L{libraries}", f"-l:{runtime.name}"]
            command = [nvcc, test, compiled(source), *libs, "-o", str(program)]
            subprocess.run(command, check=True)
            programs[kernel] = program
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)} | variables
        command = [str(programs[kernel]), "quick"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return of


@pytest.mark.parametrize("variables", [{}, REVERSED], ids=["in order", "reversed"])
def test_trees_and_promotions_are_right(run: Run, variables: dict[str, str]) -> None:
    done = run(KERNEL.read_text(encoding="utf-8"), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(": right")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        __syncthreads();\n        END_PHASE(5);", "        END_PHASE(5);"),
        ("update_of(tile + j)[work.n_k", "update_of(first - NODES + j)[work.n_k"),
    ],
    ids=["barrier removed", "u of another tile"],
)
def test_a_fault_of_the_kernel_is_found(run: Run, right: str, wrong: str) -> None:
    text = KERNEL.read_text(encoding="utf-8")
    assert text.count(right) == 1
    faulty = text.replace(right, wrong)
    runs = (run(faulty, **variables).stdout for variables in ({}, REVERSED))
    assert any("WRONG" in output for output in runs)
