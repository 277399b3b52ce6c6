"""Short runs of the scripts that compare a real model with llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import convert
from smollm2 import make_smollm2

pytestmark = pytest.mark.model
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def run(name: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in f16, because engines quantise activations differently for other types."""
    folder: Path = tmp_path_factory.mktemp("smollm2")
    return convert(make_smollm2(folder / "hf"), folder / "smollm2.gguf", "f16")


def test_distributions_and_greedy_text_are_those_of_llama_cpp(f16: Path) -> None:
    short = ("--prompts", "3", "--greedy", "1", "--tokens", "16", "-t", "1")
    (found,) = run("logits.py", str(f16), *short)["results"]
    assert (found["float"], found["positions"]) == (True, 96)
    assert found["kl_mean"] <= 1e-4


def test_a_quantised_cache_loses_no_more_than_in_llama_cpp(f16: Path) -> None:
    """Divergence by q4_0 K/V is at most llama.cpp's plus 4 standard errors over positions.

    Without rotation llama.cpp's divergence is 10 standard errors above ours.
    """
    short = ("--pairs", "q4_0/q4_0", "--chunks", "1", "-t", "1")
    (found,) = run("kv_loss.py", str(f16), *short)["results"]
    assert found["ours"]["kl_mean"] > 1e-3
    difference, error = found["kl_difference"]
    assert difference < 4 * error


def test_bad_arguments_are_one_sentence(tmp_path: Path) -> None:
    for name in ("logits.py", "kv_loss.py"):
        command = [sys.executable, str(SCRIPTS / name), str(tmp_path / "absent.gguf")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
