"""K/V caches of every type: loss of precision, and rotation as in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from device import placement
from gguf_files import Parts, edited, make_gguf
from llama import llama_logits
from numpy.typing import NDArray

from dflash_gguf.config import CACHE_TYPES, LoadConfig
from dflash_gguf.native import Engine, Model, Sequence

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 60).tolist()
# Limits of the RMS error of the logits, relative to their RMS. Observed, in this order: 0.001,
# 0.004, 0.012, 0.075, 0.083, 0.14, 0.16, 0.14.
LOSSES = {"f16": 5e-3, "bf16": 2e-2, "q8_0": 2e-2, "q5_1": 0.1, "q5_0": 0.15, "q4_1": 0.2}
LOSSES |= {"q4_0": 0.25, "iq4_nl": 0.25}


def add_outliers(parts: Parts) -> None:
    """Enlarges one channel of every K and V head, as in trained models."""
    for il in range(2):
        for name in ("attn_k", "attn_v"):
            values = parts.tensors[f"blk.{il}.{name}.weight"][0].copy()
            values[5::64] *= 8
            parts.f32(f"blk.{il}.{name}.weight", values)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with heads of 64 values, the smallest that are rotated."""
    folder: Path = tmp_path_factory.mktemp("kv")
    return edited(make_gguf(folder, "llama", head_dim=64), folder / "x.gguf", add_outliers)


def logits(path: Path, type_k: str, type_v: str) -> NDArray[np.float32]:
    config = LoadConfig(
        n_ctx=64,
        n_ubatch=64,
        n_threads=1,
        **placement(),
        cache_type_k=type_k,
        cache_type_v=type_v,
    )
    return Sequence(Engine(Model(str(path), config))).logits(TOKENS)


def rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.fixture(scope="module")
def exact(model_file: Path) -> NDArray[np.float32]:
    return logits(model_file, "f32", "f32")


@pytest.mark.parametrize("cache_type", LOSSES)
def test_a_type_costs_what_its_bits_say(
    model_file: Path, exact: NDArray[np.float32], cache_type: str
) -> None:
    loss = rms(logits(model_file, cache_type, cache_type) - exact) / rms(exact)
    print(f"{cache_type}: {loss:.1e}")
    assert 0 < loss < LOSSES[cache_type]


def test_k_and_v_may_differ(model_file: Path, exact: NDArray[np.float32]) -> None:
    losses = {
        (k, v): rms(logits(model_file, k, v) - exact)
        for k, v in (("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
    }
    assert min(losses, key=lambda pair: losses[pair]) == ("q8_0", "q8_0")
    assert max(losses, key=lambda pair: losses[pair]) == ("q4_0", "q4_0")


def test_every_type_of_the_config_is_tested() -> None:
    assert {*LOSSES, "f32"} == set(CACHE_TYPES)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_quantised_caches_are_rotated_as_in_llama_cpp(
    model_file: Path,
    exact: NDArray[np.float32],
    cache_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = logits(model_file, cache_type, cache_type)
    theirs = llama_logits(model_file, TOKENS, cache_type)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    unrotated = llama_logits(model_file, TOKENS, cache_type)
    loss, loss_theirs, loss_unrotated = (rms(x - exact) for x in (ours, theirs, unrotated))
    print(f"{cache_type}: {loss:.1e} rotated, {loss_theirs:.1e} theirs, {loss_unrotated:.1e} not")
    # llama.cpp also rounds queries.
    assert loss < 1.05 * loss_theirs
    assert rms(ours - theirs) < loss_theirs
    assert loss < 0.8 * loss_unrotated
