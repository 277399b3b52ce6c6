"""Types and bytes of quantised files equal those of llama.cpp's llama_model_quantize."""

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
from dflash_gguf.convert.types import FILE_TYPES

MIXTURES = tuple(t for t in OUTTYPES if t not in ("f32", "f16", "bf16", "auto"))

# Rows of 256 fit K-quants; rows of 96 and 80 need fallback types; 8 experts have special rules.
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
