"""Models on a device beside the CPU, whole and split, where a host access is a crash.

The device is fake_device.cpp: it computes with the CPU's kernels, so the tests of the CPU hold for
it to the last bit. They run in processes of their own, as a loaded backend stays in its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peer import llama_cpp_sources

HERE = Path(__file__).parent
PLACES: dict[str, dict[str, str]] = {
    "whole": {},
    "the head": {"DFLASH_TEST_LAYERS": "1"},
    "the last layer": {"DFLASH_TEST_LAYERS": "2"},
    "all but the first layer": {"DFLASH_TEST_LAYERS": "4"},
    "all but the experts": {"DFLASH_TEST_CPU_MOE": "1"},
    "whole, lacking operations": {
        "FAKE_DEVICE_LACKS": "GATED_DELTA_NET,SOLVE_TRI,TOP_K,ARGMAX,SSM_CONV,GLU"
    },
}
TESTS = {
    "test_arch.py": "micro_batches",
    "test_tree_core.py": "sees_its_path or sees_the_accepted",
    "test_lossless.py": "chains_give or state_after or checkpoint_among",
    "test_drafter.py": "test_logits and (five_taps or five or multimodal)",
}


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled device."""
    ggml = llama_cpp_sources() / "ggml"
    path = tmp_path_factory.mktemp("device") / "libggml-fake.so"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    source = HERE / "fake_device" / "fake_device.cpp"
    subprocess.run(
        [*compiler, *include, "-shared", "-fPIC", str(source), "-o", str(path)], check=True
    )
    return path


def child(module: Path, arguments: list[str], **variables: str) -> str:
    """Output of a Python process that has the device."""
    environment = {**os.environ, "GGML_BACKEND_PATH": str(module), **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=HERE
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("place", PLACES)
def test_what_holds_on_the_cpu_holds_there(module: Path, place: str) -> None:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    select = " or ".join(f"({Path(name).stem} and ({tests}))" for name, tests in TESTS.items())
    out = child(
        module, [*command, *TESTS, "-k", select], DFLASH_TEST_DEVICE="Fake0", **PLACES[place]
    )
    assert " passed" in out
    assert "failed" not in out


EQUAL = """
import sys
import numpy as np
from dflash_gguf.config import LoadConfig
from dflash_gguf.core import Model, Session

def logits(**place):
    with_f32 = {"cache_type_k": "f32", "cache_type_v": "f32"}
    config = LoadConfig(n_ctx=64, n_ubatch=4, n_threads=1, **with_f32, **place)
    model = Model(sys.argv[1], config)
    session = Session(model)
    return session.logits(range(3, 14)), model, session

expected, on_cpu, _ = logits(n_gpu_layers=0)
bytes_on_device = []
for n in range(1, on_cpu.n_layer + 3):
    found, model, _ = logits(n_gpu_layers=n)
    assert model.backend == "Fake0"
    assert np.array_equal(found, expected), n
    bytes_on_device.append(model.copied_bytes)
assert sorted(bytes_on_device) == bytes_on_device and bytes_on_device[-1] > bytes_on_device[0]
print(on_cpu.n_layer)
"""


@pytest.mark.parametrize("kind", ["llama", "qwen35moe"])
def test_every_split_gives_the_same_logits(module: Path, tiny_gguf, kind: str) -> None:  # type: ignore[no-untyped-def]
    assert int(child(module, ["-c", EQUAL, str(tiny_gguf(kind))])) > 1


SENTENCE = """
import sys
from dflash_gguf.config import LoadConfig
from dflash_gguf.core import Error, Model, Session
try:
    session = Session(Model(sys.argv[1], LoadConfig(n_ctx=64, n_threads=1)))
    print("lacks:", session.cpu_operations)
except Error as error:
    print(error)
"""


def test_what_a_device_lacks_is_said(module: Path, tiny_gguf) -> None:  # type: ignore[no-untyped-def]
    command = ["-c", SENTENCE, str(tiny_gguf("llama"))]
    assert child(module, command) == "lacks: []\n"
    assert child(module, command, FAKE_DEVICE_LACKS="GLU,ARGMAX") == "lacks: ['ARGMAX', 'SWIGLU']\n"
    out = child(module, command, FAKE_DEVICE_LACKS="SET_ROWS")
    assert "do not work on Fake0" in out
    out = child(module, command, FAKE_DEVICE_LACKS="MUL_MAT")
    assert "device Fake0 cannot multiply with tensor" in out
    out = child(module, command, FAKE_DEVICE_MIB="0")
    assert "MiB, Fake0 has 0 MiB free" in out
