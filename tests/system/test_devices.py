"""Runs fake_device/on_fake_device.py in a child process: host access to device memory crashes it.

A loaded backend stays in its process, and would be the first GPU of all other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fake_backend import FOLDER, compiled_device


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
