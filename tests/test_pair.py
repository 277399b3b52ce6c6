"""The pair that comes with the package: it runs by itself, keeps the law, is llama.cpp's too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gate import margins_at_differences
from llama import llama_logits
from train.prompts import from_python

import dflash_gguf
from dflash_gguf import pair

N_PROMPTS = 6
NOISE = 0.15  # logits: what 8-bit weights and half-precision K/V make of another batch shape
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[dflash_gguf.Decoder]:
    with dflash_gguf.load(pair.TARGET, drafter=pair.DRAFTER, n_ctx=512, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(decoder: dflash_gguf.Decoder) -> list[list[int]]:
    """Beginnings of functions from modules that the pair was not trained on."""
    _, held_out = from_python(seed=1)
    return [decoder.tokenize(text) for text in held_out[:N_PROMPTS]]


@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_nothing(
    decoder: dflash_gguf.Decoder, prompts: list[list[int]], name: str
) -> None:
    plain = dflash_gguf.DecodeConfig(max_tokens=64, seed=3, draft="none", **SETTINGS[name])
    rounds = tokens = 0
    for prompt in prompts:
        for kind in ("chain", "tree", "auto"):
            margins, result = margins_at_differences(decoder, prompt, plain, draft=kind)
            assert all(margin < NOISE for margin in margins), margins
            if kind == "chain":
                rounds += result.rounds
                tokens += result.n_decoded
    assert tokens > 1.2 * rounds  # drafts are accepted, so the law was put to the test


def test_llama_cpp_computes_the_same_target(decoder: dflash_gguf.Decoder) -> None:
    """8-bit weights on other kernels; a wrong layer changes logits by whole units."""
    tokens = decoder.tokenize(
        "def quicksort(items):\n    if len(items) < 2:\n        return items\n"
    )
    expected = llama_logits(pair.TARGET, tokens)
    np.testing.assert_allclose(decoder.logits(tokens), expected, atol=0.3)


def test_dflash_run_needs_no_model() -> None:
    command = [sys.executable, "-m", "dflash_gguf", "-p", "def quicksort(items):", "-n", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    first, figures = done.stderr.splitlines()
    assert first.startswith(f"{pair.TARGET.name} with {pair.DRAFTER.name}: ")
    assert "tokens a round" in figures


def test_the_package_stays_small_and_says_what_it_holds() -> None:
    files = {path.name: path.stat().st_size for path in pair.FOLDER.iterdir()}
    assert set(files) == {pair.TARGET.name, pair.DRAFTER.name, "README.md"}
    assert sum(files.values()) < 30e6
