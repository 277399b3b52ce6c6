"""The bundled pairs: drafting changes no text, and llama.cpp computes the same target."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate import margins_at_differences
from llama import llama_logits
from small_models import retyped
from train.python_prompts import from_python

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.bench.prompts import Prompt

N_PROMPTS, N_TOKENS = {"python-tiny": 6, "smollm2": 2}, {"python-tiny": 64, "smollm2": 48}
INSTRUCTION = {"python-tiny": None, "smollm2": "Complete the following Python function."}
NOISE = 0.15  # effect, in logits, of the batch shape with 8-bit weights and F16 K/V
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


@pytest.fixture(scope="module", params=list(N_PROMPTS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def decoder(model: str) -> Iterator[dflash_gguf.Decoder]:
    found = bundled.find(model)
    with dflash_gguf.load(found.target, drafter=found.drafter, n_ctx=512, n_threads=1) as loaded:
        yield loaded


def test_load_takes_the_name_of_a_pair() -> None:
    with dflash_gguf.load("python-tiny", n_ctx=64, n_threads=1) as decoder:
        assert decoder.generate("def f(", max_tokens=2).drafter == bundled.DRAFTER.name
    with pytest.raises(ValueError, match=r"'tiny' is neither a file .* \(python-tiny, smollm2\)"):
        dflash_gguf.load("tiny")


@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_nothing(decoder: dflash_gguf.Decoder, model: str, name: str) -> None:
    """Prompts come from modules that no drafter was trained on."""
    plain = dflash_gguf.DecodeConfig(
        max_tokens=N_TOKENS[model], seed=3, draft="none", **SETTINGS[name]
    )
    _, held_out = from_python(seed=1)
    rounds = tokens = 0
    for text in held_out[: N_PROMPTS[model]]:
        prompt = Prompt("", text).ids(decoder, INSTRUCTION[model])
        for kind in ("chain", "tree", "auto"):
            margins, result = margins_at_differences(decoder, prompt, plain, draft=kind)
            assert all(margin < NOISE for margin in margins), margins
            if kind == "chain":
                rounds += result.rounds
                tokens += result.n_decoded
    assert tokens > 1.2 * rounds


def test_llama_cpp_computes_the_same_target(tmp_path: Path) -> None:
    """The target is stored as f32, so that neither engine rounds activations."""
    target = retyped(bundled.TARGET, tmp_path / "target.gguf", "f32")
    settings = {"n_ctx": 64, "n_threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
    with dflash_gguf.load(target, **settings) as decoder:
        tokens = decoder.tokenize(
            "def quicksort(items):\n    if len(items) < 2:\n        return items\n"
        )
        found = decoder.logits(tokens)
    # Observed: 3e-6. A wrong layer changes logits by more than 1.
    np.testing.assert_allclose(found, llama_logits(target, tokens), atol=1e-3)


def test_dflash_run_needs_no_model() -> None:
    command = [sys.executable, "-m", "dflash_gguf", "-p", "def quicksort(items):", "-n", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    first, context, figures = done.stderr.splitlines()
    assert context == "context: 2048 tokens, all the model was trained for"
    assert first.startswith(f"{bundled.TARGET.name} with {bundled.DRAFTER.name}: ")
    assert "tokens a round" in figures


def test_the_package_stays_small_and_says_what_it_holds() -> None:
    beside = ("__init__.py", "__pycache__")
    paths = (path for path in bundled.FOLDER.iterdir() if path.name not in beside)
    files = {path.name: path.stat().st_size for path in paths}
    drafters = {drafter.name for _, drafter in bundled.PACKAGES.values()}
    assert set(files) == {bundled.TARGET.name, bundled.DRAFTER.name, "README.md", *drafters}
    assert files[bundled.TARGET.name] + files[bundled.DRAFTER.name] < 30e6
    assert all(files[name] < 25e6 for name in drafters)
