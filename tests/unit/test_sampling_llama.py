"""Kept tokens and probabilities equal those of llama.cpp's samplers.

top_p stays below 0.98: llama.cpp's float32 sum decides differently in the far tail.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.sampling.sampler import Sampler

llama_cpp = pytest.importorskip("llama_cpp")


def llama_distribution(
    row: np.ndarray[Any, Any], seen: list[int], config: DecodeConfig
) -> dict[int, float]:
    """Applies the active samplers of llama.cpp's common/sampling.cpp to one row."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    try:
        for sampler in (
            llama_cpp.llama_sampler_init_penalties(
                len(row),
                config.repeat_last_n,
                config.repeat_penalty,
                config.frequency_penalty,
                config.presence_penalty,
            ),
            llama_cpp.llama_sampler_init_top_k(config.top_k),
            llama_cpp.llama_sampler_init_top_p(config.top_p, 0),
            llama_cpp.llama_sampler_init_min_p(config.min_p, 0),
            llama_cpp.llama_sampler_init_temp(config.temperature),
        ):
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        for token in seen:
            llama_cpp.llama_sampler_accept(chain, token)
        data = (llama_cpp.llama_token_data * len(row))(
            *((token, float(value), 0.0) for token, value in enumerate(row))
        )
        array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
    finally:
        llama_cpp.llama_sampler_free(chain)
    values = np.array([logit for _, logit in kept], dtype=np.float64)
    weights = np.exp(values - values.max())
    return dict(zip([token for token, _ in kept], weights / weights.sum(), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 0.97, "min_p": 0.0},
        {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.02},
        {"temperature": 0.6, "top_k": 0},
        {"temperature": 1.0, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.9, "repeat_penalty": 1.4, "repeat_last_n": 8},
        {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.9, "repeat_penalty": 1.2, "frequency_penalty": -0.4, "top_k": 0},
        {"temperature": 0.9, "top_k": 1, "repeat_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_chain_equals_llama_cpp(settings: dict[str, Any], spread: float) -> None:
    config = DecodeConfig(seed=0, **settings)
    for trial in range(3):
        rng = np.random.default_rng(trial)
        row = (rng.standard_normal(2000) * spread).astype(np.float32)
        seen = rng.integers(0, 40, 30).tolist()
        row[:40] += spread * 2
        kept, probabilities = Sampler(config).distribution(row, seen)
        expected = llama_distribution(row, seen, config)
        assert set(kept.tolist()) == set(expected)
        assert probabilities == pytest.approx([expected[t] for t in kept.tolist()], rel=1e-4)
