"""Metadata and tensors of converted DFlash drafters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_drafter, make_target
from conversions import converted, edit_config, metadata
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from pairs import make_pair


def drafted(tmp_path: Path, kind: str = "llama", **options: Any) -> tuple[Path, Path]:
    target = make_target(tmp_path / "target", kind, num_hidden_layers=8)
    return make_drafter(tmp_path / "drafter", target, **options), target


def test_drafter_metadata(tmp_path: Path) -> None:
    settings = {"target_layer_ids": [1, 3, 6], "mask_token_id": 17}
    drafter, target = drafted(tmp_path, dflash_config=settings)
    conversion, ours, theirs = converted(drafter, "llama-bpe", target_model_dir=target)
    found = metadata(conversion)
    assert found["target_layers"] == [2, 4, 7]
    assert found["block_size"] == 8
    assert found["tokenizer.ggml.mask_token_id"] == 17
    assert found["general.architecture"] == "dflash"
    absent = ("rope.dimension_sections", "attention.causal", "embedding_scale")
    assert not [key for key in absent if key in found]
    for name, source in (
        ("fc.weight", "fc.weight"),
        ("enc.output_norm.weight", "hidden_norm.weight"),
        ("output_norm.weight", "norm.weight"),
        ("blk.1.attn_k.weight", "layers.1.self_attn.k_proj.weight"),
        ("blk.0.ffn_norm.weight", "layers.0.post_attention_layernorm.weight"),
    ):
        np.testing.assert_array_equal(ours[name], theirs[source])
    assert ours["fc.weight"].shape == (96, 3 * 96)


def test_drafter_without_layer_ids_follows_the_reference(tmp_path: Path) -> None:
    from dflash.model import build_target_layer_ids

    drafter, target = drafted(tmp_path, dflash_config={"target_layer_ids": [1, 5]})
    config = json.loads((drafter / "config.json").read_text())
    del config["dflash_config"]["target_layer_ids"]
    (drafter / "config.json").write_text(json.dumps(config))
    found = metadata(prepare(drafter, "f32", Options(target), "llama-bpe"))
    assert found["target_layers"] == [i + 1 for i in build_target_layer_ids(8, 2)]


def test_drafter_of_a_multimodal_rope_target(tmp_path: Path) -> None:
    drafter, target = drafted(tmp_path, "qwen35")
    found = metadata(prepare(drafter, "f32", Options(target), "qwen35"))
    assert found["rope.dimension_sections"] == [16, 0, 0, 0]


def test_drafter_scales_windows_and_causality(tmp_path: Path) -> None:
    settings = {
        "input_embedding_scale": 3.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
        "attention_value_scale": 0.25,
        "causal": True,
        "block_size": 12,
    }
    kinds = ["sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 64, "layer_types": kinds}
    drafter, target = drafted(tmp_path, dflash_config=settings, **window)
    found = metadata(prepare(drafter, "f32", Options(target), "llama-bpe"))
    assert found["embedding_scale"] == 3.5
    assert found["logit_scale"] == 0.5
    assert found["final_logit_softcapping"] == 30.0
    assert found["attention.value_scale"] == 0.25
    assert found["attention.causal"] is True
    assert found["block_size"] == 12
    assert found["attention.sliding_window"] == 64
    assert found["attention.sliding_window_pattern"] == [True, False]
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 32}
    (drafter / "config.json").write_text(json.dumps(config))
    found = metadata(prepare(drafter, "f32", Options(target), "llama-bpe"))
    assert found["attention.sliding_window"] == 32
    assert found["attention.sliding_window_pattern"] == [True, True]


def test_drafter_takes_no_scale_of_its_target(tmp_path: Path) -> None:
    """The reference drafter has no embedding scale or logit cap, unless its config names them."""
    drafter, target = drafted(tmp_path)
    edit_config(target, model_type="gemma4_text", final_logit_softcapping=30.0)
    found = metadata(prepare(drafter, "f32", Options(target), "llama-bpe"))
    assert {"embedding_scale", "final_logit_softcapping"}.isdisjoint(found)
    edit_config(drafter, final_logit_softcapping=20.0)
    scaled = Options(target, scaled_embeddings=True)
    found = metadata(prepare(drafter, "f32", scaled, "llama-bpe"))
    assert found["embedding_scale"] == pytest.approx(math.sqrt(96))
    assert found["final_logit_softcapping"] == 20.0
    edit_config(drafter, input_embedding_scale=2.5)
    found = metadata(prepare(drafter, "f32", scaled, "llama-bpe"))
    assert found["embedding_scale"] == 2.5


def test_drafter_that_rotates_neighbours_is_reordered(tmp_path: Path) -> None:
    drafter, target = drafted(tmp_path)
    edit_config(drafter, rope_is_neox_style=False)
    _, ours, theirs = converted(drafter, "llama-bpe", target_model_dir=target)
    for name, part, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        old = theirs[f"layers.0.self_attn.{part}.weight"]
        new = ours[f"blk.0.{name}.weight"]
        for head in range(heads):
            for j in range(16):
                row = head * 32
                np.testing.assert_array_equal(new[row + j], old[row + 2 * j])
                np.testing.assert_array_equal(new[row + 16 + j], old[row + 2 * j + 1])
    norm = theirs["layers.0.self_attn.q_norm.weight"]
    expected = np.concatenate([norm[0::2], norm[1::2]])
    np.testing.assert_array_equal(ours["blk.0.attn_q_norm.weight"], expected)


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
def test_a_targets_gguf_stands_for_its_folder(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind)
    plan = prepare(pair.drafter_dir, "f32", Options(target_model_dir=pair.target))
    write_gguf(tmp_path / "other.gguf", plan.metadata, plan.plans, plan.types)
    assert (tmp_path / "other.gguf").read_bytes() == pair.drafter.read_bytes()
