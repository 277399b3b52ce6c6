"""CUDA's runtime, driver and cuBLAS of the software GPU, as a compiled program calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from soft_gpu import FOLDER, VERSION, cuda_libraries

from dflash_gguf import Error

PTX = (
    VERSION
    + """
.visible .entry scale(.param .u64 values, .param .f32 factor, .param .u32 shift)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 %f<4>;
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [values]; ld.param.f32 %f1, [factor];
    ld.param.u32 %r2, [shift]; add.u32 %r1, %r1, %r2;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3]; mul.f32 %f3, %f2, %f1; st.global.f32 [%rd3], %f3; ret;
}
.visible .entry increase(.param .u64 values)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 %f<4>;
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [values];
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3]; add.f32 %f3, %f2, 0f3F800000; st.global.f32 [%rd3], %f3; ret;
}
"""
)
START = """
import json, sys
from ctypes import *
from pathlib import Path
import numpy as np
from soft_gpu_runtime import *
gpu = Runtime(Path(sys.argv[1]), sys.argv[2])
stream, other = gpu.stream(), gpu.stream()
at = gpu.allocate(128)
one_to_32 = np.arange(1, 33, dtype=np.float32)
found = {}
def scale(factor, shift=0, where=None):
    gpu.launch("scale", [at, np.float32(factor), np.uint32(shift)], 1, 32, where or stream)
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return cuda_libraries()
    except Error as missing:
        pytest.skip(str(missing))


def child(folder: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(x for x in sys.path if x)
    return subprocess.run(
        [sys.executable, "-c", START + body + "\nprint(json.dumps(found))", str(folder), PTX],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **variables},
    )


def told(folder: Path, body: str, **variables: str) -> dict[str, Any]:
    done = child(folder, body, **variables)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


ONE_TO_32 = list(range(1, 33))
GRAPHS = """
found["fresh"] = [bytes(np.float32(x)).hex() for x in gpu.read(at, 2, stream)]
gpu.copy(at, one_to_32, 128, TO_GPU, stream)
scale(2)
found["scaled"] = gpu.read(at, 32, stream)

gpu.begin_capture(stream)
scale(10)
event = c_void_p()
gpu.call("cudaEventCreateWithFlags", byref(event), 2)
gpu.call("cudaEventRecord", event, c_void_p(stream))
gpu.call("cudaStreamWaitEvent", c_void_p(other), event, 0)
gpu.launch("increase", [at], 1, 32, other)
status = c_int()
gpu.call("cudaStreamIsCapturing", c_void_p(other), byref(status))
found["other_captures"] = status.value
graph = gpu.end_capture(stream)
gpu.call("cudaStreamIsCapturing", c_void_p(other), byref(status))
found["other_captures_still"] = status.value
found["captured"] = gpu.read(at, 2, stream)
executable = c_void_p()
gpu.call("cudaGraphInstantiate", byref(executable), graph, c_ulonglong(0))
gpu.call("cudaGraphDestroy", graph)
gpu.call("cudaGraphLaunch", executable, c_void_p(stream))
gpu.call("cudaGraphLaunch", executable, c_void_p(stream))
found["replayed"] = gpu.read(at, 2, stream)

info = create_string_buffer(64)
gpu.begin_capture(stream)
scale(0)
gpu.launch("increase", [at], 1, 32, stream)
updated = gpu.end_capture(stream)
gpu.call("cudaGraphExecUpdate", executable, updated, info)
gpu.call("cudaGraphLaunch", executable, c_void_p(stream))
found["updated"] = gpu.read(at, 2, stream)
gpu.begin_capture(stream)
scale(0)
refused = gpu.cuda.cudaGraphExecUpdate(executable, gpu.end_capture(stream), info)
found["refused"] = refused
"""


def test_kernels_copies_and_graphs(folder: Path) -> None:
    for variables in ({}, {"SOFT_GPU_LATE": "1"}, {"SOFT_GPU_CHECK": "1"}):
        found = told(folder, GRAPHS, **variables)
        assert found["fresh"] == ["ffffffff"] * 2
        assert found["scaled"] == [2 * x for x in ONE_TO_32]
        assert (found["other_captures"], found["other_captures_still"]) == (1, 0)
        assert found["captured"] == [2, 4]
        assert found["replayed"] == [(2 * 10 + 1) * 10 + 1, (4 * 10 + 1) * 10 + 1]
        assert found["updated"] == [1, 1]
        assert found["refused"] != 0


STREAMS = """
pinned = gpu.pinned(32)
pinned[:] = 1
gpu.copy(at, pinned, 128, TO_GPU, stream)
scale(5)
event = c_void_p()
gpu.call("cudaEventCreateWithFlags", byref(event), 2)
gpu.call("cudaEventRecord", event, c_void_p(stream))
WAIT
result = gpu.pinned(32)
gpu.copy(result, at, 128, TO_HOST, other)
pinned[:] = 7
gpu.synchronize(other)
found["result"] = [float(x) if x == x else None for x in result[:2]]
"""


def test_a_missing_wait_between_streams_is_seen_where_streams_are_late(folder: Path) -> None:
    wait = 'gpu.call("cudaStreamWaitEvent", c_void_p(other), event, 0)'
    assert told(folder, STREAMS.replace("WAIT", wait))["result"] == [5, 5]
    assert told(folder, STREAMS.replace("WAIT", ""))["result"] == [5, 5]
    # Pinned memory is read late, when the host has changed it already.
    late = told(folder, STREAMS.replace("WAIT", wait), SOFT_GPU_LATE="1")
    assert late["result"] == [35, 35]
    late = told(folder, STREAMS.replace("WAIT", ""), SOFT_GPU_LATE="1")
    assert late["result"] == [None, None]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("scale(1, 64)", "scale: an address is not mapped: ld.global.f32"),
        ('gpu.call("cudaFree", c_void_p(at)); scale(1)', "an address is not mapped"),
        ('gpu.launch("missing", [at], 1, 32, stream)', "the module has no kernel missing"),
        ('gpu.launch("increase", [at], 1, 2000, stream)', "a block of 2000 threads"),
        ("gpu.begin_capture(stream); gpu.synchronize(stream)", "waited for while it is captured"),
        ('gpu.call("cudaFree", c_void_p(at + 256))', "freed that was not allocated"),
        ('gpu.call("cudaDeviceGetAttribute", byref(c_int()), 9999, 0)', "attribute 9999"),
    ],
)
def test_what_a_gpu_does_not_survive_ends_the_process(folder: Path, body: str, why: str) -> None:
    done = child(folder, body)
    assert done.returncode < 0, done.stdout
    assert "SOFT GPU FAILED" in done.stderr
    assert why in done.stderr


def test_addresses_are_looked_up_if_asked(folder: Path) -> None:
    body = "gpu.launch('increase', [one_to_32.ctypes.data], 1, 32, stream)"
    assert child(folder, body).returncode == 0
    done = child(folder, body, SOFT_GPU_CHECK="1")
    assert "increase: an address is not of the GPU: ld.global.f32" in done.stderr


def test_memory_is_as_limited_as_that_of_a_gpu(folder: Path) -> None:
    body = """
more = c_void_p()
found["too_much"] = gpu.cuda.cudaMalloc(byref(more), c_size_t(24 << 30))
free, total = c_size_t(), c_size_t()
gpu.call("cudaMemGetInfo", byref(free), byref(total))
found["free"] = total.value - free.value
driver = CDLL(str(Path(sys.argv[1]) / "libcuda.so.1"))
start, handle = c_void_p(), c_ulonglong()
driver.cuMemAddressReserve(byref(start), c_size_t(1 << 35), c_size_t(0), c_void_p(), c_ulonglong(0))
driver.cuMemCreate(byref(handle), c_size_t(1 << 21), None, c_ulonglong(0))
driver.cuMemMap(start, c_size_t(1 << 21), c_size_t(0), handle, c_ulonglong(0))
gpu.call("cudaMemsetAsync", start, 0, c_size_t(1 << 21), c_void_p(stream))
gpu.launch("increase", [start.value], 1, 32, stream)
found["mapped"] = gpu.read(start.value, 2, stream)
"""
    found = told(folder, body)
    assert found == {"too_much": 2, "free": 128, "mapped": [1, 1]}


PRODUCTS = """
rng = np.random.default_rng(0)
def on_gpu(values):
    to = gpu.allocate(values.nbytes)
    gpu.copy(to, values, values.nbytes, TO_GPU, stream)
    return to
handle, precise = c_void_p(), c_void_p()
for each in (handle, precise):
    gpu.cublas.cublasCreate_v2(byref(each))
    gpu.cublas.cublasSetStream_v2(each, c_void_p(stream))
gpu.cublas.cublasSetMathMode(handle, 3)
m, n, k = 5, 3, 7
a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((k, m), (k, n), (m, n)))
one, half = byref(c_float(1)), byref(c_float(0.5))
# Columns are adjacent in cuBLAS: the arrays are given as their transposes.
pa, pb, pc = on_gpu(a), on_gpu(b.T.copy()), on_gpu(c.T.copy())
gpu.cublas.cublasSgemm_v2(precise, 0, 0, m, n, k, one, c_void_p(pa), m, c_void_p(pb), k, half,
                          c_void_p(pc), m)
expected = a.T @ b + 0.5 * c
found["plain"] = float(np.abs(np.array(gpu.read(pc, m * n, stream)).reshape(n, m).T
                              - expected).max())
ha = on_gpu(a.T.astype(np.float16).copy())
gpu.cublas.cublasGemmEx(handle, 1, 0, m, n, k, one, c_void_p(ha), 2, k, c_void_p(pb), 0, k,
                        byref(c_float(0)), c_void_p(pc), 0, m, 68, 0)
error = np.array(gpu.read(pc, m * n, stream)).reshape(n, m).T - a.T @ b
found["half"] = float(np.abs(error).max())
# op(A) X = B of lower triangles
size = 4
lower = np.tril(rng.standard_normal((size, size))).astype(np.float32) + 3 * np.eye(size, dtype="f4")
right = rng.standard_normal((size, 2)).astype(np.float32)
pl, pr = on_gpu(lower.T.copy()), on_gpu(right.T.copy())
pointers = on_gpu(np.array([pl, pr], np.uint64))
gpu.cublas.cublasStrsmBatched(handle, 0, 0, 0, 0, size, 2, one, c_void_p(pointers), size,
                              c_void_p(pointers + 8), size, 1)
solved = np.array(gpu.read(pr, 2 * size, stream)).reshape(2, size).T
found["solved"] = float(np.abs(lower @ solved - right).max())
"""


def test_products_of_cublas(folder: Path) -> None:
    found = told(folder, PRODUCTS)
    assert found["plain"] < 1e-6
    assert 1e-5 < found["half"] < 1e-2  # float16 and TF32 keep 10 bits
    assert found["solved"] < 1e-6


def test_a_program_of_nvcc_runs(folder: Path, tmp_path: Path) -> None:
    flags = ["-std=c++17", "-gencode", "arch=compute_86,code=compute_86", "-compress-mode=none"]
    (runtime,) = folder.glob("libcudart.so.*[0-9]")
    flags += ["-cudart=none", f"-L{folder}", f"-l:{runtime.name}", "-Xlinker", f"-rpath,{folder}"]
    program = tmp_path / "sample"
    nvcc = os.environ.get("CUDACXX", "nvcc")
    subprocess.run([nvcc, *flags, str(FOLDER / "sample.cu"), "-o", str(program)], check=True)
    for variables in ({}, {"SOFT_GPU_CHECK": "1"}, {"SOFT_GPU_LATE": "1", "SOFT_GPU_REVERSE": "1"}):
        done = subprocess.run(
            [program], capture_output=True, text=True, env={**os.environ, **variables}
        )
        assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_counters_are_those_of_the_null_gpu(folder: Path) -> None:
    body = """
from gpu import null_gpu
null_gpu.DRIVER = str(Path(sys.argv[1]) / "libcuda.so.1")
scale(1)
gpu.synchronize(stream)
found = null_gpu.counts()
"""
    found = told(folder, body)
    assert (found["used_bytes"], found["kernels"], found["synchronizations"]) == (128, 1, 1)
    assert np.sum(list(found.values())) == 128 + 128 + 1 + 1 + 1
