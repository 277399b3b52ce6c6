"""The choice of types, held against llama.cpp's own llama_model_quantize."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from checkpoints import make_drafter, make_target
from dflash_gguf.convert.__main__ import main
from dflash_gguf.convert.conversion import OUTTYPES
from dflash_gguf.convert.plan import TensorPlan
from dflash_gguf.convert.types import BLOCKS, FILE_TYPES, TYPE_IDS, choose_types

MIXTURES = tuple(t for t in OUTTYPES if t not in ("f32", "f16", "bf16", "auto"))

# Rows of 256 take K-quants; 96 and 80 force the fallbacks; eight experts have rules of their own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fits": (
        "llama",
        {
            "num_hidden_layers": 9,
            "hidden_size": 256,
            "intermediate_size": 512,
            "tie_word_embeddings": True,
        },
    ),
    "falls back": (
        "qwen3",
        {"num_hidden_layers": 3, "hidden_size": 80, "intermediate_size": 288},
    ),
    "eight experts": (
        "qwen3moe",
        {
            "hidden_size": 256,
            "num_experts": 8,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 3,
        },
    ),
    "hybrid": ("qwen35", {"num_hidden_layers": 8, "hidden_size": 256, "mtp": True}),
}


def arguments(directory: Path, out: Path, outtype: str, pre: str) -> list[str]:
    return [str(directory), "--outfile", str(out), "--outtype", outtype, "--pre", pre]


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `hf` and its f32 conversion."""
    kind, options = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp("types")
    make_target(folder / "hf", kind, **options)
    assert main(arguments(folder / "hf", folder / "f32.gguf", "f32", "qwen2")) == 0
    return folder


def quantised_by_llama_cpp(source: Path, out: Path, outtype: str) -> dict[str, gguf.ReaderTensor]:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[outtype], 1
    names = (str(source).encode(), str(out).encode())
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters)) == 0
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}


@pytest.mark.parametrize("outtype", MIXTURES)
def test_types_and_bytes_are_those_of_llama_quantize(
    source: Path, outtype: str, tmp_path: Path
) -> None:
    theirs = quantised_by_llama_cpp(source / "f32.gguf", tmp_path / "theirs.gguf", outtype)
    assert main(arguments(source / "hf", tmp_path / "ours.gguf", outtype, "qwen2")) == 0
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "ours.gguf").tensors}
    assert {n: t.tensor_type.name for n, t in ours.items()} == {
        n: t.tensor_type.name for n, t in theirs.items()
    }
    for name, tensor in ours.items():
        assert np.array_equal(tensor.data, theirs[name].data), name


def test_a_drafter_gets_the_types_of_llama_quantize(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama", hidden_size=256)
    drafter = make_drafter(tmp_path / "drafter", target, intermediate_size=256)
    more = ["--target-model-dir", str(target)]
    assert main(arguments(drafter, tmp_path / "f32.gguf", "f32", "llama-bpe") + more) == 0
    theirs = quantised_by_llama_cpp(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", "q4_k_m")
    assert main(arguments(drafter, tmp_path / "ours.gguf", "q4_k_m", "llama-bpe") + more) == 0
    ours = gguf.GGUFReader(tmp_path / "ours.gguf").tensors
    assert {t.name: t.tensor_type for t in ours} == {
        name: t.tensor_type for name, t in theirs.items()
    }


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
