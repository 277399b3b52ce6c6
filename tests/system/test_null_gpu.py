"""Counters of the null GPU, and what ggml asks of it if GGML_BACKEND_PATH names a CUDA module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import null_gpu

GIB = 1 << 30
CHILD = """
import ctypes, json, sys
sys.path[:0] = sys.argv[1:2]
from gpu import null_gpu
assert null_gpu.counts() is None
runtime = ctypes.CDLL(sys.argv[2])
found = {}
def note(name, status=0):
    found[name] = {**null_gpu.counts(), "status": status}
a, b, host = (ctypes.c_void_p() for _ in range(3))
kernel = ctypes.c_char(b"k")
mangled = b"_Z9mul_mat_qIL9ggml_type12ELi8EEvPKvi"
runtime.__cudaRegisterFunction(None, ctypes.byref(kernel), None, mangled, 0, *[None] * 5)
note("before")
note("taken", runtime.cudaMalloc(ctypes.byref(a), ctypes.c_size_t(20 << 30)))
note("refused", runtime.cudaMalloc(ctypes.byref(b), ctypes.c_size_t(5 << 30)))
runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(64), 0)
runtime.cudaMemcpyAsync(host, a, ctypes.c_size_t(64), 2, None)  # to the host
found["words"] = list((ctypes.c_int32 * 16).from_address(host.value))
runtime.cudaStreamBeginCapture(None, 0)
runtime.cudaLaunchKernelExC(None, ctypes.byref(kernel), None)
graph = ctypes.c_void_p()
runtime.cudaStreamEndCapture(None, ctypes.byref(graph))
note("captured")
runtime.cudaLaunchKernelExC(None, None, None)
runtime.cudaGraphLaunch(graph, None)
runtime.cudaGraphLaunch(graph, None)
note("launched")
found["kernels"] = null_gpu.launches()
runtime.cudaFree(a)
runtime.cudaFreeHost(host)
note("freed")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return null_gpu.build(tmp_path_factory.mktemp("null"), "86")
    except SystemExit as missing:
        pytest.skip(str(missing))


def test_it_counts_what_is_asked_of_it(libraries: Path) -> None:
    (runtime,) = libraries.glob("libcudart.so.*")
    scripts = Path(null_gpu.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(scripts), str(runtime)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not any(found["before"].values())
    assert found["taken"]["used_bytes"] == found["taken"]["peak_bytes"] == 20 * GIB
    assert found["taken"]["status"] == 0
    assert found["refused"]["status"] == 2
    assert found["refused"]["used_bytes"] == 20 * GIB
    assert found["words"] == list(range(1, 17))
    captured, launched, freed = found["captured"], found["launched"], found["freed"]
    assert (captured["captures"], captured["captured_kernels"], captured["kernels"]) == (1, 1, 0)
    assert (launched["graph_launches"], launched["kernels"]) == (2, 1)
    assert found["kernels"] == {"mul_mat_q<(ggml_type)12, 8>": 2, "unregistered kernel": 1}
    assert (launched["copies_to_host"], launched["bytes_to_host"]) == (1, 64)
    assert launched["pinned_bytes"] == 64
    assert (freed["used_bytes"], freed["pinned_bytes"], freed["allocations"]) == (0, 0, 1)


@pytest.mark.usefixtures("libraries")
def test_a_round_waits_once_for_each_result(tmp_path: Path) -> None:
    module = os.environ.get("GGML_BACKEND_PATH", "")
    if "cuda" not in module:
        pytest.skip("GGML_BACKEND_PATH names no CUDA module")
    script = Path(null_gpu.__file__).parents[1] / "bench" / "counts.py"
    flags = ["--backend-module", module, "--null-gpu", "90", "--folder", str(tmp_path)]
    command = [sys.executable, str(script), "tiny-qwen35", *flags, "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["cpu_operations"] == [] for line in lines if "cpu_operations" in line)
    found = {(x["round"], x["rows"], x["phase"]): x for x in lines if "phase" in x}
    for rows in (8, 9, 16):
        verify = found["chain", rows, "verify"]
        product = "mul_mat_vec_q<q4_K, 8" if rows == 8 else "mul_mat_q<q4_K, 16"
        assert any(name.startswith(product) for name in verify["kernels_by_name"])
    assert {x["phase"]: x["graph_launches"] for x in found.values() if x["round"] != "tree"} == {
        "step": 1,
        "draft": 2,
        "verify": 1,
        "commit": 1,
    }
    waits = {x["phase"]: x["synchronizations"] for x in found.values()}
    assert waits == {"step": 1, "draft": 2, "verify": 1, "commit": 1}
    assert {x["phase"]: x["copies_to_host"] for x in found.values()} == {
        "step": 1,
        "draft": 1,
        "verify": 1,
        "commit": 0,
    }
