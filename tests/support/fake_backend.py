"""Compiles the ggml backend of tests/fake_device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from peer import llama_cpp_sources

FOLDER = Path(__file__).parents[1] / "fake_device"


def compiled_device(path: Path) -> Path:
    ggml = llama_cpp_sources() / "ggml"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    include = ["-isystem", ggml / "include", "-isystem", ggml / "src"]  # silences ggml's headers
    source = str(FOLDER / "fake_device.cpp")
    subprocess.run([*compiler, *include, "-shared", "-fPIC", source, "-o", path], check=True)
    return path
