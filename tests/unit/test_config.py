"""Defaults of the configurations, and the error of every refused value."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_gguf.config import MAX_TREE_BUDGET, DecodeConfig, LoadConfig
from dflash_gguf.native import MAX_TOP, MAX_VERIFY, OPTIONS
from dflash_gguf.native._ffi import ffi, fields_of, text
from dflash_gguf.native.limits import MAX_PARALLEL, MAX_THREADS
from dflash_gguf.native.load_config import c_options

DECODE_REFUSALS = [
    ({"max_tokens": -1}, "max_tokens is -1, must be at least 0"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5, must be an integer"),
    ({"max_tokens": True}, "max_tokens is True, must be an integer"),
    ({"temperature": -0.1}, "temperature is -0.1, must be at least 0"),
    ({"temperature": math.nan}, "temperature is nan, must be finite"),
    ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
    ({"top_k": 2**31}, "top_k is 2147483648, must be at most 2147483647"),
    ({"top_p": 1.01}, "top_p is 1.01, must be at most 1"),
    ({"min_p": -1}, "min_p is -1, must be at least 0"),
    ({"repeat_penalty": 0}, "repeat_penalty is 0, must be greater than 0"),
    ({"repeat_penalty": -2}, "repeat_penalty is -2, must be at least 1e-28"),
    ({"presence_penalty": math.inf}, "presence_penalty is inf, must be finite"),
    ({"frequency_penalty": None}, "frequency_penalty is None, must be a number"),
    ({"repeat_last_n": -1}, "repeat_last_n is -1, must be at least 0"),
    ({"seed": 2**64}, "seed is 18446744073709551616, must be at most 18446744073709551615"),
    ({"seed": "x"}, "seed is 'x', must be an integer"),
    ({"stop": ""}, "stop holds an empty text"),
    ({"stop": ["a", 3]}, "stop holds 3, must hold texts only"),
    ({"stop": 3}, "stop is 3, must be a text or several texts"),
    ({"stop_token_ids": "11"}, "stop_token_ids is '11', must be a list of token ids"),
    ({"stop_token_ids": [-1]}, "a token of stop_token_ids is -1, must be at least 0"),
    ({"ignore_eos": 1}, "ignore_eos is 1, must be True or False"),
    ({"logit_bias": [1]}, "logit_bias is [1], must map token ids to numbers"),
    ({"logit_bias": {-1: 2.0}}, "a token of logit_bias is -1, must be at least 0"),
    ({"logit_bias": {1: math.inf}}, "logit_bias is inf, must be finite"),
    ({"logit_bias": {1: "x"}}, "logit_bias is 'x', must be a number"),
    ({"logit_bias": {1: 1e308}}, "logit_bias is 1e+308, must be at most 1e+28"),
    ({"frequency_penalty": -1e308}, "frequency_penalty is -1e+308, must be at least -1e+28"),
    ({"repeat_penalty": 1e-300}, "repeat_penalty is 1e-300, must be at least 1e-28"),
    ({"n_probs": -1}, "n_probs is -1, must be at least 0"),
    ({"post_sampling_probs": 1}, "post_sampling_probs is 1, must be True or False"),
    ({"draft": "magic"}, "draft is 'magic', must be one of none, chain, tree, auto"),
    ({"draft_max": 0}, "draft_max is 0, must be at least 1"),
    ({"draft_max": 2.0}, "draft_max is 2.0, must be an integer"),
    ({"draft_min": -1}, "draft_min is -1, must be at least 0"),
    ({"draft_min": 5, "draft_max": 4}, "draft_min is 5, must be at most draft_max, 4"),
    ({"tree_budget": 0}, "tree_budget is 0, must be at least 1"),
    ({"tree_budget": 256}, "tree_budget is 256, must be at most 255"),
    ({"tree_budget": "all"}, "tree_budget is 'all', must be an integer"),
    ({"tree_main_chain": 1}, "tree_main_chain is 1, must be True or False"),
]

LOAD_REFUSALS = [
    ({"n_ctx": 0}, "n_ctx is 0, must be at least 1"),
    ({"n_ctx": 2**40}, "n_ctx is 1099511627776, must be at most 16777216"),
    ({"cache_type_k": "q3"}, "cache_type_k is 'q3', must be one of f32, f16"),
    ({"cache_type_v": None}, "cache_type_v is None, must be one of f32, f16"),
    ({"n_threads": 0}, "n_threads is 0, must be at least 1"),
    ({"n_gpu_layers": -1}, "n_gpu_layers is -1, must be at least 0"),
    ({"n_ubatch": 0}, "n_ubatch is 0, must be at least 1"),
    ({"repack": 1}, "repack is 1, must be True or False"),
    ({"draft_window": 0}, "draft_window is 0, must be at least 1"),
    ({"n_threads": 513}, "n_threads is 513, must be at most 512"),
    ({"device": 1}, "device is 1, must be a text"),
]


@pytest.mark.parametrize(
    ("config", "values", "sentence"),
    [
        *((DecodeConfig, *case) for case in DECODE_REFUSALS),
        *((LoadConfig, *case) for case in LOAD_REFUSALS),
    ],
)
def test_bad_values_are_named(config: type[Any], values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        config(**values)
    assert str(caught.value).startswith(sentence)


def test_retired_names_are_taken_as_before() -> None:
    config = DecodeConfig(tree_spine=True, draft_type="copy,dflash")  # type: ignore[call-arg]
    assert config == DecodeConfig(tree_main_chain=True, draft_type=("suffix", "dflash"))
    assert config.tree_spine  # type: ignore[attr-defined]
    assert not dataclasses.replace(config, tree_spine=False).tree_main_chain
    assert dataclasses.replace(config, seed=1).tree_main_chain
    with pytest.raises(TypeError, match="tree_trunk"):
        DecodeConfig(tree_trunk=True)  # type: ignore[call-arg]


def test_the_least_and_the_most_are_taken() -> None:
    DecodeConfig(repeat_penalty=1e-28, presence_penalty=-1e28, logit_bias={1: 1e28})


def test_the_core_has_a_place_for_every_option() -> None:
    known = fields_of("dfl_model_params") | fields_of("dfl_engine_params")
    # backend_module is loaded by another call; cache_ram limits Python's prefix cache; mtp decides
    # if a drafter is loaded.
    assert OPTIONS.keys() - known == {"backend_module", "cache_ram", "mtp"}
    found = c_options("dfl_model_params", LoadConfig(n_gpu_layers=3, n_cpu_moe=2, device="CUDA1"))
    assert (found["n_gpu_layers"], found["n_cpu_moe"], text(found["device"])) == (3, 2, "CUDA1")
    found = c_options("dfl_model_params", LoadConfig())
    assert (found["n_gpu_layers"], found["n_threads"], found["repack"]) == (-1, 0, 1)
    assert found["device"] == ffi.NULL


def test_limits_are_those_of_the_header() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "dflash.h").read_text(encoding="utf-8")
    limits = {name: int(n) for name, n in re.findall(r"DFL_(MAX_\w+) = (\d+)", header)}
    assert limits == {
        "MAX_TOP": MAX_TOP,
        "MAX_VERIFY": MAX_VERIFY,
        "MAX_THREADS": MAX_THREADS,
        "MAX_PARALLEL": MAX_PARALLEL,
    }
    assert MAX_TREE_BUDGET == MAX_VERIFY - 1


def test_help_names_every_option() -> None:
    for name, option in OPTIONS.items():
        assert f"    {name}: {option.about}" in (LoadConfig.__doc__ or "")


def test_a_file_may_be_a_path() -> None:
    assert LoadConfig(backend_module=Path("m.so")).backend_module == "m.so"


def test_unknown_names_are_errors() -> None:
    with pytest.raises(TypeError):
        DecodeConfig(temprature=1.0)  # type: ignore[call-arg]


def test_configs_are_frozen_and_slotted() -> None:
    config = DecodeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]
    assert not hasattr(config, "__dict__")
    assert not hasattr(LoadConfig(), "__dict__")


def test_defaults_are_those_of_llama_cpp_but_greedy() -> None:
    config = DecodeConfig()
    assert (config.top_k, config.top_p, config.min_p) == (40, 0.95, 0.05)
    assert (config.repeat_penalty, config.presence_penalty, config.frequency_penalty) == (1, 0, 0)
    assert config.repeat_last_n == 64
    assert config.temperature == 0.0


def test_numpy_scalars_and_single_stop_text_are_taken() -> None:
    config = DecodeConfig(max_tokens=np.int32(3), temperature=np.float32(0.5), stop="end")
    assert config.max_tokens == 3
    assert type(config.max_tokens) is int
    assert config.temperature == 0.5
    assert config.stop_texts == ("end",)
    assert DecodeConfig(stop=iter(["a", "b"])).stop_texts == ("a", "b")


def test_penalties_are_off_by_default_and_without_a_window() -> None:
    assert not DecodeConfig().has_penalties
    assert DecodeConfig(repeat_penalty=1.1).has_penalties
    assert DecodeConfig(presence_penalty=-0.1).has_penalties
    assert not DecodeConfig(repeat_penalty=1.1, repeat_last_n=0).has_penalties
