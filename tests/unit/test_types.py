"""The choice of quantised types by names and shapes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from dflash_gguf.convert.plan import TensorPlan
from dflash_gguf.convert.types import BLOCKS, FILE_TYPES, TYPE_IDS, choose_types


def plan(name: str, *shape: int) -> TensorPlan:
    return TensorPlan(name, shape, (np.zeros((1, shape[-1]), np.float32),))


def test_llama_of_80_layers_spares_attention_values() -> None:
    plans = [plan(f"blk.{i}.attn_v.weight", 256, 256) for i in range(80)]
    chosen = choose_types(plans, "q4_k_m", "llama", 80, 0)
    assert set(chosen.values()) == {"q5_K", "q6_K"}
    assert "q4_K" in choose_types(plans, "q4_k_m", "qwen3", 80, 0).values()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_embd.weight", (7, 64), "q8_0"),
        ("token_embd.weight", (7, 80), "f16"),
        ("blk.0.attn_norm.weight", (64,), "f32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "f32"),
        ("blk.0.ffn_gate_inp_shexp.weight", (1, 64), "f32"),
        ("blk.0.ssm_conv1d.weight", (64, 32), "f32"),
        ("blk.0.attn_conv_base", (2, 2, 64), "f32"),
    ],
)
def test_q8_0_follows_the_converter(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert choose_types([plan(name, *shape)], "q8_0", "llama", 1, 0) == {name: expected}


def test_blocks_and_numbers_are_those_of_ggml() -> None:
    for name, size in BLOCKS.items():
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert gguf.GGML_QUANT_SIZES[kind] == size
        assert TYPE_IDS[name] == kind
    names = {"f32": "ALL_F32"}
    for outtype, number in FILE_TYPES.items():
        assert gguf.LlamaFileType[names.get(outtype, f"MOSTLY_{outtype.upper()}")] == number
