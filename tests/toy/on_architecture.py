"""A made-up architecture needs one file and one table row on each side; compared with NumPy.

ctest runs this with toy_core.cpp, the core with that row; the test adds the converter's row.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import dflash_gguf.convert.arch as rows
import numpy as np
import pytest
import toy_convert
from gguf_files import convert
from toy_model import make_toy, reference_logits

LIMIT = 1e-4  # largest error relative to the range of the logits; observed: 1e-6
N_TOKENS = 50  # exceeds the window of 8, and fills three micro-batches


def test_a_made_up_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows.Architecture(("ToyForCausalLM",), toy_convert.metadata, toy_convert.tensors)
    monkeypatch.setattr(rows, "ARCHITECTURES", (*rows.ARCHITECTURES, row))
    directory, tensors = make_toy(tmp_path / "checkpoint")
    path = convert(directory, tmp_path / "toy.gguf", pre="llama-bpe")
    tokens = np.random.default_rng(3).integers(0, 400, N_TOKENS).tolist()
    out = tmp_path / "logits"
    command = [os.environ["DFLASH_TOY_CORE"], path, out, *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = reference_logits(tensors, tokens)
    at_once, by_steps = np.fromfile(out, dtype=np.float32).reshape(2, N_TOKENS, -1)
    for found in (at_once, by_steps):
        np.testing.assert_allclose(found, expected, atol=LIMIT * np.ptp(expected), rtol=0)
