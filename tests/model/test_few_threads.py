"""Quantising and loading succeed even if the system allows no further threads."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf_files import make_gguf

from dflash_gguf.native import quantize

# The limit of threads does not apply to root, so the child drops its privileges first.
CHILD = """
import os, resource, sys, threading
import numpy as np
from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Model, quantize

def load():
    return Model("model.gguf", LoadConfig(n_ctx=64, n_threads=4, n_gpu_layers=0)).kernels

os.chdir(sys.argv[1])
expected = load()
values = np.random.default_rng(3).standard_normal((512, 1024), dtype=np.float32)
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    threading.Thread(target=int).start()
    sys.exit("the limit does not hold")
except RuntimeError:
    pass
np.save(sys.stdout.buffer, quantize(values, "q8_0", 4))
assert load() == expected
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A world-readable folder with a model that several threads repack."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as name:
        make_gguf(Path(name), "llama", outtype="q8_0", **sizes)
        Path(name).chmod(0o755)
        yield Path(name)


def test_no_thread_to_be_had(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found = np.frombuffer(done.stdout[-quantized().nbytes :], np.uint8)
    np.testing.assert_array_equal(found.reshape(quantized().shape), quantized())


def quantized() -> np.ndarray:
    values = np.random.default_rng(3).standard_normal((512, 1024), dtype=np.float32)
    return quantize(values, "q8_0", 1)
