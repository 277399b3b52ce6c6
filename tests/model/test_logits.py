"""Converted files give the logits of transformers in llama.cpp, for every kind and odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    LLAMA3_ROPE,
    ONE,
    PRE_OF_KIND,
    SEVEN,
    VOCAB_SIZE,
    YARN_ROPE,
    heads,
    make_target,
    value_heads,
)
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from llama import llama_logits
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.activations import GELUTanh

PROMPT_LENGTHS = (1, 5, 70)
# Largest error relative to the range of the logits. Observed: 2e-5; a missing transform: over 0.1.
LIMIT = 2e-4

TIED = {"tie_word_embeddings": True}


# Defaults of make_target(): 4 heads of 32, 2 K/V heads, width 96, untied head, vocabulary 421.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, one layer, GQA 1": ("llama", {**TIED, **ONE, **heads(3, 3, 24)}),
    "llama GQA 3, seven layers": ("llama", {**heads(6, 2, 16), **SEVEN}),
    "llama GQA 4": ("llama", heads(8, 2, 16)),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama sharded": ("llama", {"max_shard_size": "100KB"}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, one layer": ("qwen3", {**TIED, **ONE}),
    "qwen3 GQA 3, seven layers": ("qwen3", {**heads(6, 2, 32), **SEVEN}),
    "qwen3 GQA 1": ("qwen3", heads(3, 3, 64)),
    "qwen3 GQA 4, sharded": ("qwen3", {**heads(8, 2, 32), "max_shard_size": "100KB"}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe fused experts, tied": ("qwen3moe", {"fused_experts": True, **TIED}),
    "qwen3moe eight experts, one layer": ("qwen3moe", {"num_experts": 8, **ONE, **heads(3, 1, 32)}),
    "qwen35 two value heads a key head": ("qwen35", {}),
    "qwen35 three value heads a key head": ("qwen35", value_heads(2, 6)),
    "qwen35 equal heads, tied": ("qwen35", {**value_heads(2, 2), **TIED}),
    "qwen35 seven layers, GQA 4": ("qwen35", {**SEVEN, **heads(4, 1, 32), **value_heads(1, 3)}),
    "qwen35 with MTP": ("qwen35", {"mtp": True}),
    "qwen35 multimodal": ("qwen35", {"wrapped": True, **value_heads(2, 6)}),
    "qwen35 sharded": ("qwen35", {"max_shard_size": "100KB"}),
    "qwen35moe": ("qwen35moe", {}),
    "qwen35moe multimodal, fused, MTP": (
        "qwen35moe",
        {"wrapped": True, "fused_experts": True, "mtp": True, **value_heads(2, 6)},
    ),
    "qwen3next": ("qwen3next", {}),
    "qwen3next three value heads, MTP": ("qwen3next", {"mtp": True, **value_heads(2, 6)}),
    # llama.cpp always rounds the bounds of YaRN's ramp, so `truncate` must be true.
    "gpt-oss": ("gpt-oss", {"rope_parameters": {**YARN_ROPE, "truncate": True}}),
    "gpt-oss two of four experts": (
        "gpt-oss",
        {"rope_parameters": {**YARN_ROPE, "truncate": True}, "num_local_experts": 4,
         "num_experts_per_tok": 2, **heads(6, 2, 48)},
    ),
    "qwen2": ("qwen2", {}),
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {}),
    "gemma4 multimodal, values of their own": (
        "gemma4", {"wrapped": True, "attention_k_eq_v": False, **heads(6, 2, 32)}
    ),
    "gemma4 unified": ("gemma4", {"wrapped": True, "unified": True}),
    "gemma4 experts": ("gemma4moe", {}),
    "gemma4 per-layer inputs": ("gemma4e", {}),
}  # fmt: skip


def gelu_of_a_table(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU as ggml's CPU kernels do: from a table of F16 values for |x| < 10."""
    looked_up = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x.abs() < 10, looked_up, torch.where(x > 0, x, 0.0))


def reference_logits(directory: Path, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    for module in model.modules():
        if isinstance(getattr(module, "act_fn", None), GELUTanh):
            module.act_fn.forward = gelu_of_a_table
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    directory = make_target(tmp_path / "model", kind, seed=7, **settings)
    conversion = prepare(directory, "f32", pre=PRE_OF_KIND[kind])
    path = tmp_path / "x.gguf"
    write_gguf(path, conversion.metadata, conversion.plans, conversion.types)

    generator = np.random.default_rng(11)
    prompts = [generator.integers(0, VOCAB_SIZE, n).tolist() for n in PROMPT_LENGTHS]
    for prompt, expected in zip(prompts, reference_logits(directory, prompts), strict=True):
        found = llama_logits(path, prompt)
        error = np.abs(found - expected).max() / np.ptp(expected)
        assert error <= LIMIT, f"{len(prompt)} tokens: {error:.1e} of the range"
