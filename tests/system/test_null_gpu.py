"""Counters of the null GPU. Testing it under ggml would need a CUDA compiler."""

from __future__ import annotations

import json
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
note("before")
note("taken", runtime.cudaMalloc(ctypes.byref(a), ctypes.c_size_t(20 << 30)))
note("refused", runtime.cudaMalloc(ctypes.byref(b), ctypes.c_size_t(5 << 30)))
runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(64), 0)
runtime.cudaMemcpyAsync(host, a, ctypes.c_size_t(64), 2, None)  # to the host
found["words"] = list((ctypes.c_int32 * 16).from_address(host.value))
runtime.cudaStreamBeginCapture(None, 0)
runtime.cudaLaunchKernelExC(None, None, None)
waits_in_capture = runtime.cudaStreamSynchronize(None)
graph = ctypes.c_void_p()
runtime.cudaStreamEndCapture(None, ctypes.byref(graph))
note("captured", waits_in_capture)
runtime.cudaLaunchKernelExC(None, None, None)
runtime.cudaGraphLaunch(graph, None)
note("launched")
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
    assert captured["status"] != 0
    assert (captured["captures"], captured["captured_kernels"], captured["kernels"]) == (1, 1, 0)
    assert (launched["graph_launches"], launched["kernels"]) == (1, 1)
    assert (launched["copies_to_host"], launched["bytes_to_host"]) == (1, 64)
    assert launched["pinned_bytes"] == 64
    assert (freed["used_bytes"], freed["pinned_bytes"], freed["allocations"]) == (0, 0, 1)
