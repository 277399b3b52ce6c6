"""Tensor transforms and metadata of each architecture, compared with formulas value by value."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_target
from conversions import converted, edit_config, edit_tensors, metadata, metadata_only, stored
from dflash_gguf.convert.arch.common import llama3_rope_factors
from dflash_gguf.convert.checkpoint import Config
from dflash_gguf.convert.conversion import prepare, stored_type
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.write import write_gguf
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hf_models import mxfp4_values
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize(("n_head", "n_head_kv", "head_dim"), [(4, 2, 32), (3, 1, 24), (2, 2, 8)])
def test_llama_q_and_k_pairs_become_neighbours(
    tmp_path: Path, n_head: int, n_head_kv: int, head_dim: int
) -> None:
    sizes = {"num_attention_heads": n_head, "num_key_value_heads": n_head_kv, "head_dim": head_dim}
    make_target(tmp_path, "llama", attention_bias=True, mlp_bias=True, **sizes)
    _, ours, theirs = converted(tmp_path, "llama-bpe")
    half = head_dim // 2
    for part, heads in (("q", n_head), ("k", n_head_kv)):
        for kind in ("weight", "bias"):
            new = ours[f"blk.1.attn_{part}.{kind}"]
            old = theirs[f"model.layers.1.self_attn.{part}_proj.{kind}"]
            for head in range(heads):
                for j in range(half):
                    row = head * head_dim
                    np.testing.assert_array_equal(new[row + 2 * j], old[row + j])
                    np.testing.assert_array_equal(new[row + 2 * j + 1], old[row + j + half])
    for name, source in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        for kind in ("weight", "bias"):
            expected = theirs[f"model.layers.0.{source}.{kind}"]
            np.testing.assert_array_equal(ours[f"blk.0.{name}.{kind}"], expected)


def test_llama3_rope_factors_follow_the_wavelength(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    make_target(tmp_path, "llama", rope_parameters=rope, head_dim=64)
    conversion, ours, _ = converted(tmp_path, "llama-bpe")
    expected = []
    for pair in range(32):
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / 64)
        if wavelength < 64 / 4.0:
            expected.append(1.0)
        elif wavelength > 64 / 1.0:
            expected.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append(1 / ((1 - smooth) / 8.0 + smooth))
    np.testing.assert_allclose(ours["rope_freqs.weight"], expected, rtol=2e-6)
    assert {1.0, 8.0} < set(expected)
    assert "rope.scaling.type" not in metadata(conversion)


def test_rope_factors_are_only_for_llama3(tmp_path: Path) -> None:
    make_target(tmp_path, "llama")
    assert llama3_rope_factors(Config(tmp_path), 32) is None


def test_yarn_is_written_and_other_scalings_are_refused(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    make_target(tmp_path, "qwen3", rope_parameters=yarn)
    found = metadata(prepare(tmp_path, "f32", pre="qwen2"))
    assert found["rope.scaling.type"] == "yarn"
    assert found["rope.scaling.factor"] == 4.0
    assert found["rope.scaling.original_context_length"] == 128
    assert found["rope.scaling.yarn_beta_fast"] == 16.0
    edit_config(tmp_path, rope_parameters=yarn | {"rope_type": "longrope"})
    with pytest.raises(ConvertError, match="rope type 'longrope' is not supported for qwen3"):
        prepare(tmp_path, "f32", pre="qwen2")
    edit_config(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 1e6})
    with pytest.raises(ConvertError, match="rope setting 'factor' is None"):
        prepare(tmp_path, "f32", pre="qwen2")


@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize(("kind", "usual"), [("qwen3", True), ("gpt-oss", False)])
def test_whether_bounds_of_yarn_are_rounded_is_written_where_unusual(
    tmp_path: Path, kind: str, usual: bool, truncate: bool | None
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    yarn |= {"original_max_position_embeddings": 128}
    make_target(tmp_path, kind, rope_parameters=yarn)
    edit_config(tmp_path, rope_parameters=yarn | {"truncate": truncate})
    found = metadata(prepare(tmp_path, "f32", pre="qwen2"))
    rounds = truncate is not False
    assert found.get("rope.scaling.yarn_truncate", usual) == rounds
    assert ("rope.scaling.yarn_truncate" in found) == (rounds != usual)


def test_configs_of_older_releases_give_the_same_metadata(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    make_target(tmp_path, "llama", rope_parameters=rope)
    new = metadata(prepare(tmp_path, "f32", pre="llama-bpe"))
    edit_config(
        tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}
    )
    old = metadata(prepare(tmp_path, "f32", pre="llama-bpe"))
    assert old == new
    assert old["rope.freq_base"] == 5e5


@pytest.mark.parametrize("kind", ["qwen3moe", "qwen35moe"])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_stacked(tmp_path: Path, kind: str, fused: bool) -> None:
    separate = stored(make_target(tmp_path / "separate", kind))
    make_target(tmp_path / "used", kind, fused_experts=fused)
    _, ours, _ = converted(tmp_path / "used", "qwen2")
    for part, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        stack = ours[f"blk.1.ffn_{part}_exps.weight"]
        assert stack.shape[0] == 6
        for expert in range(6):
            expected = separate[f"model.layers.1.mlp.experts.{expert}.{name}.weight"]
            np.testing.assert_array_equal(stack[expert], expected)


def test_untied_tied_and_missing_heads(tmp_path: Path) -> None:
    make_target(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    assert "output.weight" not in converted(tmp_path / "tied", "qwen2")[1]
    make_target(tmp_path / "untied", "qwen3")
    assert "output.weight" in converted(tmp_path / "untied", "qwen2")[1]
    edit_tensors(tmp_path / "untied", **{"lm_head.weight": None})
    with pytest.raises(ConvertError, match=r"'lm_head\.weight' is missing"):
        prepare(tmp_path / "untied", "f32", pre="qwen2")


@pytest.mark.parametrize(("n_key", "ratio"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_value_heads_are_tiled_over_key_heads(tmp_path: Path, n_key: int, ratio: int) -> None:
    size, n_value = 16, n_key * ratio
    heads = {"linear_num_key_heads": n_key, "linear_num_value_heads": n_value}
    make_target(tmp_path, "qwen35", **heads)
    _, ours, theirs = converted(tmp_path, "qwen35")
    hf = {k.removeprefix("model.layers.0.linear_attn."): v for k, v in theirs.items()}
    keys = 2 * n_key * size
    for name, source in (
        ("attn_qkv.weight", hf["in_proj_qkv.weight"]),
        ("ssm_conv1d.weight", hf["conv1d.weight"][:, 0]),
    ):
        np.testing.assert_array_equal(ours[f"blk.0.{name}"][:keys], source[:keys])
    for key in range(n_key):
        for r in range(ratio):
            new, old = r * n_key + key, key * ratio + r
            to, fro = slice(new * size, (new + 1) * size), slice(old * size, (old + 1) * size)
            pairs = [
                (ours["blk.0.attn_qkv.weight"][keys:][to], hf["in_proj_qkv.weight"][keys:][fro]),
                (ours["blk.0.ssm_conv1d.weight"][keys:][to], hf["conv1d.weight"][keys:, 0][fro]),
                (ours["blk.0.attn_gate.weight"][to], hf["in_proj_z.weight"][fro]),
                (ours["blk.0.ssm_out.weight"][:, to], hf["out_proj.weight"][:, fro]),
                (ours["blk.0.ssm_alpha.weight"][new], hf["in_proj_a.weight"][old]),
                (ours["blk.0.ssm_beta.weight"][new], hf["in_proj_b.weight"][old]),
                (ours["blk.0.ssm_dt.bias"][new], hf["dt_bias"][old]),
            ]
            for written, source in pairs:
                np.testing.assert_array_equal(written, source)
            expected = -math.exp(hf["A_log"][old])
            assert ours["blk.0.ssm_a"][new] == pytest.approx(expected, rel=1e-7)


def test_zero_centred_norms_become_factors(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen35", mtp=True)
    _, ours, theirs = converted(tmp_path, "qwen35")
    pairs = {
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.3.post_attention_norm.weight": "model.layers.3.post_attention_layernorm.weight",
        "blk.3.attn_q_norm.weight": "model.layers.3.self_attn.q_norm.weight",
        "blk.3.attn_k_norm.weight": "model.layers.3.self_attn.k_norm.weight",
        "blk.4.attn_norm.weight": "mtp.layers.0.input_layernorm.weight",
        "blk.4.nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "blk.4.nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "blk.4.nextn.shared_head_norm.weight": "mtp.norm.weight",
    }
    for name, source in pairs.items():
        np.testing.assert_array_equal(ours[name], theirs[source] + np.float32(1))
    own = "model.layers.0.linear_attn.norm.weight"
    np.testing.assert_array_equal(ours["blk.0.ssm_norm.weight"], theirs[own])
    fusion = ours["blk.4.nextn.eh_proj.weight"]
    np.testing.assert_array_equal(fusion, theirs["mtp.fc.weight"])


def test_qwen3next_projections_of_a_key_head_are_taken_apart(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3next", mtp=True)
    conversion, ours, theirs = converted(tmp_path, "qwen2")
    source = "model.layers.0.linear_attn"
    # Two key heads of 16, each with two value heads and two gates.
    first, second = theirs[f"{source}.in_proj_qkvz.weight"].reshape(2, 96, 96)
    q, k, v, z = slice(0, 16), slice(16, 32), slice(32, 64), slice(64, 96)
    expected = [first[q], second[q], first[k], second[k], first[v], second[v]]
    np.testing.assert_array_equal(ours["blk.0.attn_qkv.weight"], np.concatenate(expected))
    gates = np.concatenate([first[z], second[z]])
    np.testing.assert_array_equal(ours["blk.0.attn_gate.weight"], gates)
    for name, part in (
        ("ssm_ba.weight", "in_proj_ba.weight"),
        ("ssm_dt.bias", "dt_bias"),
        ("ssm_out.weight", "out_proj.weight"),
        ("ssm_norm.weight", "norm.weight"),
    ):
        np.testing.assert_array_equal(ours[f"blk.0.{name}"], theirs[f"{source}.{part}"])
    decay = -np.exp(theirs[f"{source}.A_log"].astype(np.float64))
    np.testing.assert_array_equal(ours["blk.0.ssm_a"], decay.astype(np.float32))
    norm = theirs["model.layers.0.input_layernorm.weight"] + np.float32(1)
    np.testing.assert_array_equal(ours["blk.0.attn_norm.weight"], norm)
    found = metadata(conversion)
    assert "rope.dimension_sections" not in found
    assert (found["rope.dimension_count"], found["nextn_predict_layers"]) == (8, 1)


def test_qwen3next_whose_weights_are_not_renormalised_is_refused(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3next", norm_topk_prob=False)
    with pytest.raises(ConvertError, match="norm_topk_prob is not true, which Qwen3NextForCausal"):
        prepare(tmp_path, "f32", pre="qwen2")


def test_matrices_that_were_trained_for_q4_0_lose_nothing(tmp_path: Path) -> None:
    """QAT checkpoints hold BF16 values that q4_0 represents exactly."""
    make_target(tmp_path, "gemma4", dtype="bfloat16", tie_word_embeddings=True)
    random = np.random.default_rng(0)
    trained = {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if "layers" in name and values.ndim == 2:
            codes = random.integers(-8, 8, (values.numel() // 32, 32))
            codes[:, 5] = -8  # the largest magnitude determines the block's scale
            scales = np.exp2(random.integers(-9, -4, (len(codes), 1)))
            blocks = torch.from_numpy((codes * scales).astype(np.float32))
            trained[name] = blocks.reshape(values.shape).to(torch.bfloat16)
    edit_tensors(tmp_path, **trained)
    conversion = prepare(tmp_path, "q4_0")
    path = tmp_path / "x.gguf"
    write_gguf(path, conversion.metadata, conversion.plans, conversion.types)
    found_at = {x.name: x for x in GGUFReader(path).tensors}
    plans = {plan.sources[0]: plan.name for plan in conversion.plans if plan.sources}
    for name, values in trained.items():
        tensor = found_at[plans[name]]
        assert tensor.tensor_type == GGMLQuantizationType.Q4_0
        found = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found, values.float().numpy())


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe"])
def test_mtp_layers_are_blocks_that_no_mtp_drops(tmp_path: Path, kind: str) -> None:
    make_target(tmp_path, kind, mtp=True, wrapped=True)
    with_mtp, ours, _ = converted(tmp_path, "qwen35")
    assert metadata(with_mtp)["block_count"] == 5
    assert metadata(with_mtp)["nextn_predict_layers"] == 1
    assert metadata(with_mtp)["attention.recurrent_layers"] == [True] * 3 + [False] * 2
    without, rest, _ = converted(tmp_path, "qwen35", mtp=False)
    assert metadata(without)["block_count"] == 4
    assert "nextn_predict_layers" not in metadata(without)
    assert {n for n in ours if n not in rest} == {n for n in ours if n.startswith("blk.4.")}


def test_a_config_that_promises_mtp_without_tensors_counts_none(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen35", mtp_num_hidden_layers=1)
    found = metadata(prepare(tmp_path, "f32", pre="qwen35"))
    assert found["block_count"] == 4
    assert "nextn_predict_layers" not in found


def test_multimodal_checkpoints_give_their_text_part(tmp_path: Path) -> None:
    plain = converted(make_target(tmp_path / "a", "qwen35"), "qwen35")
    wrapped = converted(make_target(tmp_path / "b", "qwen35", wrapped=True), "qwen35")
    assert {n: v.shape for n, v in wrapped[1].items()} == {n: v.shape for n, v in plain[1].items()}
    assert not [name for name in wrapped[1] if "visual" in name]


def test_rope_sections_and_partial_rotation(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen35")
    found = metadata(prepare(tmp_path, "f32", pre="qwen35"))
    assert found["rope.dimension_sections"] == [2, 1, 1, 0]
    assert found["rope.dimension_count"] == 8
    assert found["ssm.inner_size"] == 64
    edit_config(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    found = metadata(prepare(tmp_path, "f32", pre="qwen35"))
    assert found["rope.dimension_sections"] == [11, 11, 10, 0]
    edit_config(tmp_path, layer_types=None, full_attention_interval=2)
    found = metadata(metadata_only(tmp_path))
    assert found["attention.recurrent_layers"] == [True, False, True, False]


def test_auto_takes_the_type_of_the_first_matrix(tmp_path: Path) -> None:
    for dtype, expected in (
        ("bfloat16", "bf16"),
        ("float16", "f16"),
        ("float32", "f16"),
    ):
        directory = make_target(tmp_path / dtype, "qwen3", dtype=dtype)
        conversion = prepare(directory, "auto", pre="qwen2")
        assert conversion.outtype == expected
        assert stored_type(conversion.checkpoint) == expected


def test_gpt_oss_gate_and_up_take_turns(tmp_path: Path) -> None:
    make_target(tmp_path, "gpt-oss")
    _, ours, theirs = converted(tmp_path, "gpt-4o")
    both = theirs["model.layers.2.mlp.experts.gate_up_proj"]  # [experts, in, 2 * out]
    bias = theirs["model.layers.2.mlp.experts.gate_up_proj_bias"]
    for expert in range(8):
        for row in range(64):
            for part, column in (("gate", 2 * row), ("up", 2 * row + 1)):
                name = f"blk.2.ffn_{part}_exps"
                found = ours[f"{name}.weight"][expert, row]
                np.testing.assert_array_equal(found, both[expert, :, column])
                assert ours[f"{name}.bias"][expert, row] == bias[expert, column]
    down = theirs["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(ours["blk.1.ffn_down_exps.weight"], down.swapaxes(1, 2))


def test_mxfp4_blocks_keep_their_values(tmp_path: Path) -> None:
    make_target(tmp_path, "gpt-oss", packed_experts=True)
    conversion = prepare(tmp_path, "f32", pre="gpt-4o")
    tensors = load_file(tmp_path / "model.safetensors")
    plans = {plan.name: plan for plan in conversion.plans}
    for part, first, step in (("gate_up", 1, 2), ("down", 0, 1)):
        base = f"model.layers.3.mlp.experts.{part}_proj"
        expected = mxfp4_values(tensors[f"{base}_blocks"], tensors[f"{base}_scales"])
        plan = plans["blk.3.ffn_up_exps.weight" if first else "blk.3.ffn_down_exps.weight"]
        assert plan.packed is not None and conversion.types[plan.name] == "mxfp4"
        found = dequantize(plan.packed.rows(0, plan.n_rows), GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(found.reshape(plan.shape), expected[:, first::step].numpy())
        # Read some rows across the border of two experts.
        some = plan.packed.rows(plan.n_rows // 8 - 3, plan.n_rows // 4 + 5)
        rows = plan.packed.rows(0, plan.n_rows)[plan.n_rows // 8 - 3 : plan.n_rows // 4 + 5]
        np.testing.assert_array_equal(some, rows)
    assert conversion.metadata.values["general.file_type"][1] == 38


LAYERS = ["full_attention", "sliding_attention"] * 2
GPT_OSS_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no sinks": ({}, {"model.layers.1.self_attn.sinks": None}, "self_attn.sinks' is missing"),
    "wrong number of experts": (
        {"num_local_experts": 6},
        {},
        "'model.layers.0.mlp.router.bias' has shape \\[8\\], config.json asks for \\[6\\]",
    ),
    "too many chosen": ({"num_experts_per_tok": 9}, {}, "9 experts per token, but there are only"),
    "other layers": ({"layer_types": LAYERS}, {}, "layer_types do not alternate"),
    "part of a head": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {},
        "partial_rotary_factor is 0.5, must be 1 for gpt-oss",
    ),
    "another format": (
        {"quantization_config": {"quant_method": "awq"}},
        {},
        "already quantised .* names 'awq', only 'mxfp4'",
    ),
}


@pytest.mark.parametrize("case", GPT_OSS_FAULTS)
def test_a_damaged_gpt_oss_folder_is_refused(tmp_path: Path, case: str) -> None:
    config, tensors, message = GPT_OSS_FAULTS[case]
    make_target(tmp_path, "gpt-oss")
    edit_config(tmp_path, **config)
    edit_tensors(tmp_path, **tensors)
    with pytest.raises(ConvertError, match=message):
        prepare(tmp_path, "f32", pre="gpt-4o")


def test_rows_that_blocks_of_mxfp4_do_not_fill_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "x", "gpt-oss", packed_experts=True, intermediate_size=48)
    message = "down_proj has rows of 48 values, which MXFP4's blocks of 32 do not fill"
    with pytest.raises(ConvertError, match=message):
        prepare(tmp_path / "x", "f32", pre="gpt-4o")


def test_damaged_mxfp4_blocks_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "x", "gpt-oss", packed_experts=True)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    exponents = load_file(tmp_path / "x" / "model.safetensors")[name]
    exponents[5, 40, 1] = 255
    edit_tensors(tmp_path / "x", **{name: exponents})
    conversion = prepare(tmp_path / "x", "f32", pre="gpt-4o")
    with pytest.raises(ConvertError, match=r"ffn_down_exps\.weight: holds NaN blocks"):
        write_gguf(tmp_path / "x.gguf", conversion.metadata, conversion.plans, conversion.types)
    assert not (tmp_path / "x.gguf").exists()

    make_target(tmp_path / "y", "gpt-oss", intermediate_size=40)
    blocks = torch.zeros(8, 96, 2, 16, dtype=torch.uint8)
    edit_tensors(tmp_path / "y", **{"model.layers.0.mlp.experts.down_proj_blocks": blocks})
    with pytest.raises(ConvertError, match="rows of 40 values, which MXFP4's blocks of 32"):
        prepare(tmp_path / "y", "f32", pre="gpt-4o")


def test_gemma4_layers_of_two_kinds(tmp_path: Path) -> None:
    make_target(tmp_path, "gemma4")
    conversion, ours, theirs = converted(tmp_path, "gemma4")
    found = metadata(conversion)
    assert found["attention.sliding_window_pattern"] == [True, True, True, False]
    assert found["attention.head_count_kv"] == [2, 2, 2, 1]
    assert (found["attention.key_length"], found["attention.key_length_swa"]) == (64, 32)
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (1e6, 1e4)
    assert found["final_logit_softcapping"] == 30.0
    # Rope rotates a quarter of a head of 64: 8 of 32 pairs.
    np.testing.assert_array_equal(ours["rope_freqs.weight"], [1.0] * 8 + [np.float32(1e30)] * 24)
    assert "blk.3.attn_v.weight" not in ours and "blk.2.attn_v.weight" in ours
    for name, source in (
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ):
        expected = theirs[f"model.layers.1.{source}.weight"]
        np.testing.assert_array_equal(ours[f"blk.1.{name}.weight"], expected)
    np.testing.assert_array_equal(
        ours["blk.2.layer_output_scale.weight"], theirs["model.layers.2.layer_scalar"]
    )


def test_gemma4_without_a_cap_says_so(tmp_path: Path) -> None:
    make_target(tmp_path, "gemma4", final_logit_softcapping=None)
    assert metadata(prepare(tmp_path, "f32"))["final_logit_softcapping"] == 0.0


def test_gemma4_configs_as_published_give_the_same_metadata(tmp_path: Path) -> None:
    make_target(tmp_path, "gemma4")
    new = metadata(prepare(tmp_path, "f32"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 64, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert metadata(prepare(tmp_path, "f32")) == new


GEMMA4_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    "both directions": ({"use_bidirectional_attention": "all"}, "only text generators can be run"),
    "layer kinds": ({"layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
    "no full layer": ({"layer_types": ["sliding_attention"] * 4}, "at least one full_attention"),
    "shared": ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3 of 4, which leaves no"),
    "rope": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope type 'yarn' of full_attention is not supported",
    ),
    "norms": ({"hidden_size": 64}, r"has shape \[421, 96\], config.json asks for \[421, 64\]"),
    "heads": (
        {"per_layer_config": {"3": {"head_dim": 33}}},
        "full-attention layers have head_dim 33, which must be even",
    ),
}


@pytest.mark.parametrize("case", GEMMA4_FAULTS)
def test_a_gemma4_config_that_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    changes, message = GEMMA4_FAULTS[case]
    make_target(tmp_path, "gemma4")
    edit_config(tmp_path, **changes)
    with pytest.raises(ConvertError, match=message):
        prepare(tmp_path, "f32")


def test_a_gemma4_tokenizer_needs_bytes_to_fall_back_to(tmp_path: Path) -> None:
    make_target(tmp_path, "gemma4", pre="qwen2")
    with pytest.raises(ConvertError, match="is not the tokenizer of a Gemma 4 model"):
        prepare(tmp_path, "f32")


def test_gemma3_folders_may_leave_out_defaults_and_hold_a_vision_part(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    whole = make_target(
        tmp_path / "whole",
        "gemma3",
        max_position_embeddings=131072,
        query_pre_attn_scalar=256,
        **sizes,
    )
    expected = prepare(whole, "f32")
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    config = json.loads((part / "config.json").read_text())
    for name in ("max_position_embeddings", "query_pre_attn_scalar", "layer_types", *sizes):
        del config[name]
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    del config["rope_parameters"]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (part / "config.json").write_text(json.dumps(outer))
    tensors = load_file(part / "model.safetensors")
    moved = {f"language_model.{name}": value for name, value in tensors.items()}
    moved["multi_modal_projector.mm_input_projection_weight"] = torch.ones(4, 4)
    save_file(moved, part / "model.safetensors")
    found = prepare(part, "f32")
    assert [plan.name for plan in found.plans] == [plan.name for plan in expected.plans]
    for key in ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor", "context_length"):
        name = f"gemma3.{key}"
        assert found.metadata.values[name] == expected.metadata.values[name], key
    for key in ("attention.head_count", "attention.head_count_kv", "attention.key_length"):
        name = f"gemma3.{key}"
        assert found.metadata.values[name] == expected.metadata.values[name], key
