"""Repacked weights for our own CPU kernels give the logits of the file's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_gguf.bundled import DRAFTER, TARGET
from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Drafter, Engine, Error, Model, Sequence

TOKENS = np.random.default_rng(3).integers(0, 1000, 96).tolist()


def load(path: Path = TARGET, **settings: Any) -> Model:
    return Model(str(path), LoadConfig(**{"n_ctx": 256, "n_threads": 2, **settings}))


@pytest.fixture(scope="module")
def packed() -> Model:
    model = load()
    if not any(name.startswith("q8_0 ") for name in model.kernels):
        pytest.skip("this CPU has no kernels of ours")
    return model


def serial_logits(model: Model, tokens: list[int]) -> np.ndarray:
    sequence = Sequence(Engine(model))
    sequence.prefill(tokens[:1])
    return np.stack([sequence.decode(token).logits() for token in tokens[1:]])


def test_a_load_tells_which_kernels_serve_which_bytes(packed: Model) -> None:
    name = next(name for name in packed.kernels if name.startswith("q8_0 "))
    assert packed.kernels[name] > 0.9 * sum(packed.kernels.values())
    assert list(packed.kernels.values()) == sorted(packed.kernels.values(), reverse=True)
    assert sum(packed.kernels.values()) == packed.mapped_bytes + packed.copied_bytes
    drafter = Drafter(str(DRAFTER), packed)
    assert name in drafter.kernels


def test_without_repacking_weights_stay_in_the_file() -> None:
    model = load(repack=False)
    assert model.copied_bytes == 0
    assert "q8_0 ggml" in model.kernels
    assert set(Drafter(str(DRAFTER), model).kernels) == set(model.kernels)


def test_packed_weights_are_those_of_the_file(packed: Model) -> None:
    ours, plain = (serial_logits(model, TOKENS[:24]) for model in (packed, load(repack=False)))
    # Both kernels quantise inputs to 8 bits; one different rounding changes all later values (seen:
    # 1 % of the range). A misplaced row would change a logit by the whole range.
    assert np.abs(ours - plain).max() <= 0.03 * np.ptp(plain)


def test_a_placement_that_is_not_there_is_an_error(packed: Model) -> None:
    from dflash_gguf.native._ffi import call, new

    n = len(packed.kernels)
    with pytest.raises(Error, match=f"placement {n} is out of range, the weights have {n}"):
        call("model_get_placement", packed.handle, n, new("dfl_placement *"))
