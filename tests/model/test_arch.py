"""Logits of every architecture compared with transformers, on random float32 models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    KINDS,
    LLAMA3_ROPE,
    ONE,
    SEVEN,
    VOCAB_SIZE,
    YARN_ROPE,
    heads,
    value_heads,
)
from device import DEVICE, placement
from gguf_files import Parts, edited, make_gguf
from hf_models import unpack_experts
from numpy.typing import NDArray
from reference import reference_logits

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Engine, Model, Sequence

N_UBATCH = 16
N_TOKENS = 70
# Prompt lengths below, at and above the micro-batch of 16, and of several micro-batches.
LENGTHS = (1, 5, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 3 * N_UBATCH + 7, N_TOKENS)
# Largest error relative to the range of the logits, by K/V type. Observed: 5e-5 with F32 (1.9e-4
# with Gemma's experts, whose GELU ggml reads from an F16 table) and 1.1e-3 with F16.
LIMITS = {"f32": 5e-4 if DEVICE is None else 2e-3, "f16": 1e-2}

YARN_BETAS = {**YARN_ROPE, "beta_fast": 16.0, "beta_slow": 2.0}
YARN_MSCALES = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3}
QWEN35_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
QWEN35_YARN = {
    **YARN_ROPE,
    "factor": 16.0,
    "beta_fast": 2.0,
    "beta_slow": 0.05,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}


GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


# Defaults of make_target(): 4 heads of 32, 2 K/V heads, width 96, untied head, vocabulary 421.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, one layer": ("llama", {"tie_word_embeddings": True, **ONE, **heads(3, 3, 24)}),
    "llama seven layers, GQA 3": ("llama", {**SEVEN, **heads(6, 2, 16)}),
    "llama biases, GQA 4": ("llama", {"attention_bias": True, "mlp_bias": True, **heads(8, 2, 16)}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, equal heads": (
        "qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4, **ONE}
    ),
    "qwen2 seven layers, yarn": ("qwen2", {**SEVEN, "rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, GQA 3": ("qwen3", {"tie_word_embeddings": True, **heads(6, 2, 32)}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen3 yarn, betas": ("qwen3", {"rope_parameters": YARN_BETAS}),
    "qwen3 yarn, attention factor": (
        "qwen3",
        {"rope_parameters": {**YARN_ROPE, "attention_factor": 0.8}},
    ),
    "llama yarn, mscales, betas": ("llama", {"rope_parameters": {**YARN_BETAS, **YARN_MSCALES}}),
    "qwen3moe yarn, betas": ("qwen3moe", {"rope_parameters": YARN_BETAS}),
    "qwen35 yarn, betas": ("qwen35", {"rope_parameters": QWEN35_YARN}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe one expert used": ("qwen3moe", {"num_experts_per_tok": 1, **heads(3, 1, 32)}),
    "qwen35 two value heads a key head": ("qwen35", {}),
    "qwen35 three value heads a key head": ("qwen35", value_heads(2, 6)),
    "qwen35 seven layers, tied": (
        "qwen35",
        {**SEVEN, "tie_word_embeddings": True, **heads(4, 1, 32), **value_heads(1, 3)},
    ),
    "qwen35 published head sizes": (
        "qwen35",
        {
            **heads(4, 1, 256),
            **value_heads(2, 6),
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": QWEN35_ROPE,
        },
    ),
    "qwen35 with MTP": ("qwen35", {"mtp": True}),
    "qwen35 as Qwen3.8 is published": (
        "qwen35",
        {
            **{"wrapped": True, "mtp": True, **heads(6, 1, 256), **value_heads(2, 6)},
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": QWEN35_ROPE,
        },
    ),
    "qwen35moe": ("qwen35moe", {}),
    "qwen35moe MTP, three value heads": ("qwen35moe", {"mtp": True, **value_heads(2, 6)}),
    "qwen3next": ("qwen3next", {}),
    "qwen3next three value heads, seven layers, MTP": (
        "qwen3next", {"mtp": True, **SEVEN, **value_heads(2, 6), **heads(6, 2, 48)}
    ),
    "qwen3next three of eight experts, published head sizes": (
        "qwen3next",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, **heads(4, 1, 256)},
            **{**value_heads(2, 4), "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3 as it is published, thirteen layers": (
        "gemma3",
        {"num_hidden_layers": 13, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
         "rope_parameters": GEMMA3_ROPE, **heads(4, 1, 256)},
    ),
    "gemma4": ("gemma4", {}),
    "gemma4 multimodal, seven layers": (
        "gemma4",
        {"wrapped": True, "tie_word_embeddings": True, **SEVEN,
         "layer_types": (["sliding_attention"] * 2 + ["full_attention"])
         * 2 + ["full_attention"], "num_global_key_value_heads": 2, **heads(6, 3, 20)},
    ),
    "gemma4 other heads": ("gemma4", {**heads(4, 2, 24), "global_head_dim": 48}),
    "gemma4 published head sizes, no cap": (
        "gemma4",
        {**heads(2, 1, 256), "global_head_dim": 512, "attention_k_eq_v": False,
         "final_logit_softcapping": None, "sliding_window": 21},
    ),
    "gemma4 experts": ("gemma4moe", {}),
    "gemma4 four of eight experts, heads of two sizes": (
        "gemma4moe",
        {"num_experts": 8, "top_k_experts": 4, "num_global_key_value_heads": 2, **heads(6, 3, 24)},
    ),
    "gemma4 per-layer inputs, shared keys": ("gemma4e", {}),
    "gemma4 per-layer inputs alone, tied": (
        "gemma4e", {"num_kv_shared_layers": 0, "tie_word_embeddings": True}
    ),
    "gemma4 shared keys alone, one full layer's": (
        "gemma4e",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 3, **heads(6, 3, 20),
         "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2},
    ),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss, rounded yarn, heads of 64": (
        "gpt-oss", {"rope_parameters": {**YARN_ROPE, "truncate": True}, **heads(4, 1, 64)}
    ),
    "gpt-oss two of four experts, five layers": (
        "gpt-oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 5,
         **heads(6, 2, 48), "rope_parameters": {**YARN_BETAS, "truncate": False}},
    ),
}  # fmt: skip


def prompt(n: int = N_TOKENS) -> list[int]:
    return np.random.default_rng(11).integers(0, VOCAB_SIZE, n).tolist()


def sequence_of(
    path: Path,
    cache_type: str = "f32",
    n_ubatch: int = N_UBATCH,
    n_ctx: int = 128,
    repack: bool = True,
) -> Sequence:
    config = LoadConfig(
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        repack=repack,
        n_threads=1,  # on such small models waiting costs more than a second thread gains
        **placement(),
        cache_type_k=cache_type,
        cache_type_v=cache_type,
    )
    return Sequence(Engine(Model(str(path), config)))


def assert_close(
    found: NDArray[np.float32], expected: NDArray[np.float32], cache_type: str = "f32"
) -> None:
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"{cache_type}, {len(found)} rows: {error:.1e}")
    assert error <= LIMITS[cache_type]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    path = make_gguf(tmp_path, kind, **settings)
    tokens = prompt()
    expected = reference_logits(tmp_path / "checkpoint", tokens)
    for cache_type in LIMITS:
        sequence = sequence_of(path, cache_type)
        for n in LENGTHS:
            sequence.reset()
            assert_close(sequence.logits(tokens[:n]), expected[:n], cache_type)
        sequence.reset()
        assert_close(continued(sequence, tokens), expected[N_UBATCH:], cache_type)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4", "gemma4moe", "gemma4e"])
def test_a_prompt_far_beyond_the_windows(tmp_path: Path, kind: str) -> None:
    path = make_gguf(tmp_path, kind, max_position_embeddings=1024)
    tokens = prompt(600)
    found = sequence_of(path, n_ubatch=256, n_ctx=640).logits(tokens)
    assert_close(found, reference_logits(tmp_path / "checkpoint", tokens))


def test_experts_in_mxfp4_blocks(tmp_path: Path) -> None:
    """Quantised inputs may route a token with nearly equal router scores to another expert."""
    path = make_gguf(tmp_path, "gpt-oss", outtype="auto", packed_experts=True)
    tokens = prompt(24)
    expected = reference_logits(unpack_experts(tmp_path / "checkpoint"), tokens)
    found = sequence_of(path).logits(tokens)
    # Median error over rows. Observed: 4e-3 of the range; 0.5 with misplaced weights.
    assert np.median(np.abs(found - expected).max(1)) <= 0.03 * np.ptp(expected)


def continued(sequence: Sequence, tokens: list[int]) -> NDArray[np.float32]:
    """Returns the logits after a prefill of N_UBATCH + 1 tokens and after each further token."""
    rows = [sequence.prefill(tokens[: N_UBATCH + 1])]
    found = [rows[0].logits()]
    for token in tokens[N_UBATCH + 1 :]:
        row = sequence.decode(token)
        found.append(row.logits())
        assert row.argmax() == found[-1].argmax()
    return np.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_the_logits(
    tiny_gguf: Callable[[str], Path], kind: str
) -> None:
    tokens = prompt()
    expected = sequence_of(tiny_gguf(kind), n_ubatch=128).logits(tokens)
    for n_ubatch in (1, 7, 64):
        found = sequence_of(tiny_gguf(kind), n_ubatch=n_ubatch).logits(tokens)
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))


def fuse_qkv(parts: Parts) -> None:
    """Fuses Q, K and V as llama.cpp's converter does with --fuse-qkv: rows of Q, then K, then V."""
    for il in range(2):
        for suffix in ("weight", "bias"):
            if f"blk.{il}.attn_q.{suffix}" in parts.tensors:
                each = [parts.tensors.pop(f"blk.{il}.attn_{x}.{suffix}")[0] for x in "qkv"]
                parts.f32(f"blk.{il}.attn_qkv.{suffix}", np.concatenate(each))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3moe"])
def test_fused_projections_give_the_same(tmp_path: Path, kind: str) -> None:
    path = make_gguf(tmp_path, kind, attention_bias=kind == "llama")
    fused = edited(path, tmp_path / "fused.gguf", fuse_qkv)
    found, expected = (sequence_of(x).logits(prompt(20)) for x in (fused, path))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))


def separate_experts(parts: Parts) -> None:
    for name in [x for x in parts.tensors if "ffn_gate_up_exps.weight" in x]:
        both, kind = parts.tensors.pop(name)
        for i, part in enumerate(np.split(both, 2, axis=1)):
            part_name = name.replace("gate_up", ("gate", "up")[i])
            parts.tensors[part_name] = (np.ascontiguousarray(part), kind)


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0", "q4_0"])
def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path, outtype: str) -> None:
    fused = make_gguf(tmp_path, "gemma4moe", outtype=outtype, moe_intermediate_size=96)
    apart = edited(fused, tmp_path / "apart.gguf", separate_experts)
    for repack in (True, False):
        found, expected = (
            sequence_of(path, repack=repack).logits(prompt(20)) for path in (fused, apart)
        )
        np.testing.assert_array_equal(found, expected)


def divide_by_scales(parts: Parts) -> None:
    for name in [
        x for x in parts.tensors if x.endswith(".weight") and parts.tensors[x][0].ndim > 1
    ]:
        values = parts.tensors[name][0]
        if any(x in name for x in ("token_embd", "conv1d", "ffn_gate_inp_shexp")):
            continue
        if "ffn_gate_inp" in name and name.replace("weight", "scale") in parts.tensors:
            continue  # scales the input of Gemma's router
        per_expert = values.shape[0] if values.ndim == 3 else 1
        scale = np.linspace(0.5, 4.0, per_expert, dtype=np.float32)
        shape = (-1, 1, 1) if values.ndim == 3 else ()
        parts.f32(name, values / scale.reshape(shape))
        known = parts.tensors.get(name.removesuffix("weight") + "scale")
        parts.f32(
            name.removesuffix("weight") + "scale", scale if known is None else scale * known[0]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_scale_companions_are_multiplied_in(
    tmp_path: Path, tiny_gguf: Callable[[str], Path], kind: str
) -> None:
    scaled = edited(tiny_gguf(kind), tmp_path / "scaled.gguf", divide_by_scales)
    found, expected = (sequence_of(x).logits(prompt(20)) for x in (scaled, tiny_gguf(kind)))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))
