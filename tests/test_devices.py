"""Models on a device beside the CPU, whole and split, where a host access is a crash.

The tests are those of fake_device/on_fake_device.py, in a process of their own: a loaded backend
stays in its process, and would be the first GPU of all other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from peer import llama_cpp_sources

FOLDER = Path(__file__).parent / "fake_device"


def compiled_device(path: Path) -> Path:
    """The backend module."""
    ggml = llama_cpp_sources() / "ggml"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    include = ["-isystem", ggml / "include", "-isystem", ggml / "src"]  # not warned about
    source = str(FOLDER / "fake_device.cpp")
    subprocess.run([*compiler, *include, "-shared", "-fPIC", source, "-o", path], check=True)
    return path


def test_a_device_whose_memory_is_out_of_reach(tmp_path: Path) -> None:
    module = compiled_device(tmp_path / "libggml-fake.so")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "on_fake_device.py"],
        cwd=FOLDER,
        env={**os.environ, "GGML_BACKEND_PATH": str(module)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
