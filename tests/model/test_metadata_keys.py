"""Keys that change a model's numbers are honoured, or refused with their name and value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import KINDS
from gguf_files import Parts, edited
from pairs import make_pair

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Drafter, Engine, Error, Model, Sequence

TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
# Keys without architecture, each with a harmless value and a refused value.
KEYS: dict[str, tuple[Any, Any]] = {
    "logit_scale": (1.0, 0.5),
    "residual_scale": (0.0, 0.22),
    "embedding_scale": (1.0, 12.0),
    "attn_logit_softcapping": (0.0, 50.0),
    "final_logit_softcapping": (0.0, 30.0),
    "router_logit_softcapping": (0.0, 30.0),
    "use_parallel_residual": (False, True),
    "hidden_activation": ("silu", "gelu"),
    "hyper_connection.count": (0, 4),
    "embedding_length_per_layer_input": (0, 8),
    "attention.max_alibi_bias": (0.0, 8.0),
    "attention.clamp_kqv": (0.0, 8.0),
    "attention.causal": (True, False),
    "attention.sliding_window": (0, 16),
    "attention.shared_kv_layers": (0, 1),
    "attention.value_scale": (1.0, 0.5),
    "attention.output_scale": (0.0, 0.5),
    "attention.temperature_length": (0, 8192),
    "attention.temperature_scale": (0.0, 0.1),
    "rope.scaling.alpha": (1.0, 8.0),
    "rope.scaling.yarn_log_multiplier": (0.0, 1.0),
    "expert_group_count": (1, 2),
    "expert_group_used_count": (1, 2),
    "expert_weights_scale": (1.0, 2.5),
    "expert_weights_norm": (True, False),
    "expert_gating_func": (1, 2),
    "moe_every_n_layers": (1, 2),
    "interleave_moe_layer_step": (1, 2),
    "leading_dense_block_count": (0, 1),
    "swiglu_clamp_exp": ([0.0, 0.0], [0.0, 7.0]),
    "swiglu_clamp_shexp": ([0.0, 0.0], [0.0, 7.0]),
    "sample_from_anchor": (False, True),
    "has_confidence_head": (False, True),
}
HARMLESS = {
    "vocab_size": 421,
    "tensor_data_layout": "Meta AI original pth",
    "pooling_type": 3,
    "classifier.pooling_type": 1,
    "classifier.output_labels": ["yes", "no"],
    "attention.layer_norm_epsilon": 1e-5,
    "expert_shared_count": 1,
    "rope.scaling.finetuned": True,
}
# Keys of sliding layers, in models without such layers.
OF_SLIDING_LAYERS = {
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 5000.0,
}
WINDOWED = ("gpt-oss", "gemma3", "gemma4", "gemma4moe", "gemma4e")
DENSE = {"expert_count": (0, 4), "expert_used_count": (0, 2), "expert_feed_forward_length": (0, 32)}
WITHOUT_SECTIONS = {"rope.dimension_sections": ([0, 0, 0, 0], [8, 8, 8, 8])}
WITHOUT_RECURRENCE = {
    "attention.recurrent_layers": ([False, False], [True, False]),
    "full_attention_interval": (1, 4),
}
OWN: dict[str, dict[str, tuple[Any, Any]]] = {
    "llama": {**DENSE, **WITHOUT_SECTIONS, **WITHOUT_RECURRENCE},
    "qwen2": {**DENSE, **WITHOUT_SECTIONS, **WITHOUT_RECURRENCE},
    "gemma3": {**DENSE, **WITHOUT_SECTIONS, **WITHOUT_RECURRENCE},
    "qwen3": {**DENSE, **WITHOUT_SECTIONS, **WITHOUT_RECURRENCE},
    "qwen3moe": {
        **WITHOUT_SECTIONS,
        **WITHOUT_RECURRENCE,
        "expert_shared_feed_forward_length": (0, 32),
    },
    "qwen35": DENSE,
    "qwen35moe": {},
    "qwen3next": WITHOUT_SECTIONS,
    "gpt-oss": {
        **WITHOUT_SECTIONS,
        **WITHOUT_RECURRENCE,
        "expert_shared_feed_forward_length": (0, 32),
    },
    "gemma4": {
        **WITHOUT_SECTIONS,
        **WITHOUT_RECURRENCE,
        **{key: DENSE[key] for key in ("expert_used_count", "expert_feed_forward_length")},
    },
    "gemma4moe": {
        **WITHOUT_SECTIONS,
        **WITHOUT_RECURRENCE,
        "expert_shared_feed_forward_length": (0, 32),
    },
}
OWN["gemma4e"] = OWN["gemma4"]
# Keys that the drafter's graph honours, as tested in test_drafter.py.
DRAFTER_HONOURS = (
    *("logit_scale", "embedding_scale", "final_logit_softcapping", "hidden_activation"),
    *("attention.causal", "attention.sliding_window", "attention.value_scale"),
)


def typed(value: Any) -> tuple[Any, Any, Any]:
    if isinstance(value, list):
        return (gguf.GGUFValueType.ARRAY, value, TYPES[type(value[0])])
    return (TYPES[type(value)], value, None)


def put(parts: Parts, key: str, value: Any) -> None:
    parts.metadata[f"{parts.architecture}.{key}"] = typed(value)


def keys_of(kind: str) -> dict[str, tuple[Any, Any]]:
    """Returns the keys that graphs of a kind do not honour."""
    found = KEYS | OWN[kind]
    honoured = ["attention.sliding_window"] if kind in WINDOWED else []
    if kind.startswith("gemma"):
        honoured += ["final_logit_softcapping", "logit_scale", "embedding_scale"]
        honoured += ["attention.value_scale"]
    if kind.startswith("gemma4"):
        honoured += ["attention.shared_kv_layers", "embedding_length_per_layer_input"]
    return {key: values for key, values in found.items() if key not in honoured}


def load(path: Path) -> Model:
    return Model(str(path), LoadConfig(n_ctx=64, n_threads=1, n_gpu_layers=0))


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_change_nothing_are_accepted(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    def edit(parts: Parts) -> None:
        for key, (neutral, _) in keys_of(kind).items():
            put(parts, key, neutral)
        of_windows = {} if kind in WINDOWED else OF_SLIDING_LAYERS
        for key, value in (HARMLESS | of_windows).items():
            put(parts, key, value)

    tokens = [5, 9, 200, 17]
    expected, found = (
        Sequence(Engine(load(path))).logits(tokens)
        for path in (tiny_gguf(kind), edited(tiny_gguf(kind), tmp_path / "x.gguf", edit))
    )
    np.testing.assert_array_equal(found, expected)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return "\\[" + ", ".join(f"{float(x):g}" for x in value)
    return f'"{value}"' if isinstance(value, str) else f"{float(value):g}"


# Harmless keys that llama.cpp's converter and quantiser and publishers write.
PUBLISHED: dict[str, Any] = {
    "general.quantized_by": "somebody",
    "general.sampling.top_k": 20,
    "general.sampling.temp": 0.6,
    "general.base_model.0.name": "Base",
    "general.tags": ["chat", "text-generation"],
    "general.file_type": 15,
    "general.quantization_version": 2,
    "quantize.imatrix.file": "/imatrix.gguf",
    "quantize.imatrix.dataset": "calibration.txt",
    "quantize.imatrix.entries_count": 252,
    "quantize.imatrix.chunks_count": 140,
    "mradermacher.quantize_version": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "{arch}.vocab_size": 421,
    "{arch}.attention.key_length": 32,
    "{arch}.attention.value_length": 32,
    "{arch}.rope.scaling.type": "none",
    "{arch}.rope.scaling.finetuned": False,
    "{arch}.nextn_predict_layers": 0,
    "{arch}.pooling_type": 3,
    "{arch}.classifier.output_labels": ["yes", "no"],
    "{arch}.attention.layer_norm_epsilon": 1e-6,
}
PUBLISHED_OF: dict[str, dict[str, Any]] = {
    "llama": {"rope.dimension_count": 32, "expert_count": 0, "expert_used_count": 0},
    "qwen3": {},
    "qwen3moe": {"expert_weights_scale": 1.0, "expert_gating_func": 1, "expert_group_count": 1},
    "qwen35": {
        "full_attention_interval": 4,
        "attention.recurrent_layers": [True, True, True, False],
        "rope.dimension_sections": [2, 1, 1, 0],
    },
}
# Source: llama.cpp's vocabulary file of Gemma 4 26B.
PUBLISHED_OF["gemma4moe"] = {
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, True, False],
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
}
PUBLISHED_OF["gemma4"] = PUBLISHED_OF["gemma4moe"] | {"expert_count": 0}
PUBLISHED_OF["gemma4e"] = {
    **PUBLISHED_OF["gemma4"],
    "attention.sliding_window_pattern": [True, False] * 3,
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 16,
}
PUBLISHED_OF["qwen2"] = {}
PUBLISHED_OF["gemma3"] = {"attention.sliding_window": 512, "rope.scaling.type": "linear"}
PUBLISHED_OF["gpt-oss"] = {"rope.scaling.type": "yarn"}
PUBLISHED_OF["qwen35moe"] = PUBLISHED_OF["qwen35"] | PUBLISHED_OF["qwen3moe"]
PUBLISHED_OF["qwen3next"] = {
    **PUBLISHED_OF["qwen3moe"],
    "full_attention_interval": 4,
    "attention.recurrent_layers": [True, True, True, False],
}


@pytest.mark.parametrize("kind", KINDS)
def test_published_files_are_accepted(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    def edit(parts: Parts) -> None:
        arch = parts.architecture
        keys = {key.format(arch=arch): value for key, value in PUBLISHED.items()}
        for key, value in PUBLISHED_OF[kind].items():
            keys[f"{arch}.{key}"] = value
        for key, value in keys.items():
            parts.metadata[key] = typed(value)

    tokens = [5, 9, 200, 17]
    expected, found = (
        Sequence(Engine(load(path))).logits(tokens)
        for path in (tiny_gguf(kind), edited(tiny_gguf(kind), tmp_path / "x.gguf", edit))
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["qwen3", "qwen35"])
def test_a_factor_that_undoes_that_of_yarn(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """DeepSeek-R1-0528-Qwen3-8B undoes YaRN's attention factor, by either of two keys."""

    def with_factor(key: str, value: float) -> Path:
        def edit(parts: Parts) -> None:
            put(parts, "rope.scaling.type", "yarn")
            put(parts, "rope.scaling.factor", 4.0)
            put(parts, "rope.scaling.original_context_length", 128)
            put(parts, f"rope.scaling.{key}", value)

        return edited(tiny_gguf(kind), tmp_path / f"{key}.gguf", edit)

    tokens = [5, 9, 200, 17, 8, 8, 1]
    undoing = 0.8782488562869419
    expected = Sequence(Engine(load(with_factor("yarn_attn_factor", 1.0)))).logits(tokens)
    for key in ("attn_factor", "yarn_attn_factor"):
        found = Sequence(Engine(load(with_factor(key, undoing)))).logits(tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))
    other = Sequence(Engine(load(with_factor("yarn_attn_factor", 0.9)))).logits(tokens)
    assert np.abs(other - expected).max() > 1e-3 * np.ptp(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_would_change_numbers_are_refused_by_name(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    arch = load(tiny_gguf(kind)).architecture
    for key, (_, other) in keys_of(kind).items():

        def edit(parts: Parts, key: str = key, other: Any = other) -> None:
            put(parts, key, other)

        path = edited(tiny_gguf(kind), tmp_path / "x.gguf", edit)
        with pytest.raises(Error, match=f"metadata key {arch}.{key} is {shown(other)}") as caught:
            load(path)
        assert str(path) in str(caught.value)


def test_a_key_that_nobody_knows_is_refused(
    tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    for value, text in ((2, "2"), ("wide\ner", '"wide\\?er"'), ([1, 2, 3, 4, 5], r"\[1, 2, 3, 4,")):
        path = edited(tiny_gguf("llama"), tmp_path / "x.gguf", lambda p, v=value: put(p, "wide", v))
        with pytest.raises(Error, match=f"key llama.wide is {text}.* may change the model's num"):
            load(path)


def test_keys_of_others_are_none_of_ours(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(parts: Parts) -> None:
        kind = gguf.GGUFValueType.FLOAT32
        for key in ("general.wide", "llama2.logit_scale", "quantize.imatrix.chunks", "mergekit.x"):
            parts.metadata[key] = (kind, 0.5, None)

    load(edited(tiny_gguf("llama"), tmp_path / "x.gguf", edit))


def test_drafters_are_held_to_the_same(tmp_path: Path) -> None:
    layers = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    pair = make_pair(tmp_path, "qwen3", use_sliding_window=True, **layers)
    target = load(pair.target)

    def open_with(key: str, value: Any) -> None:
        path = edited(pair.drafter, tmp_path / "x.gguf", lambda parts: put(parts, key, value))
        Drafter(str(path), target)

    for key, (neutral, other) in (KEYS | DENSE).items():
        open_with(key, neutral)
        if key not in DRAFTER_HONOURS:
            with pytest.raises(Error, match=f"metadata key dflash.{key} is {shown(other)}"):
                open_with(key, other)


def test_rope_sections_fill_the_rotated_dimensions_at_most(tmp_path: Path) -> None:
    """Sections beyond the rotated dimensions abort ggml; qwen35 rotates 8 of 32, its drafter 32."""
    pair = make_pair(tmp_path, "qwen35")
    target = load(pair.target)

    def with_sections(path: Path, sections: list[int]) -> Path:
        put_sections = partial(put, key="rope.dimension_sections", value=sections)
        return edited(path, tmp_path / f"{'_'.join(map(str, sections))}.gguf", put_sections)

    full = load(with_sections(pair.target, [5, 1, 1, 1]))
    drafter = Drafter(str(with_sections(pair.drafter, [29, 1, 1, 1])), full)
    sequence = Sequence(Engine(full, drafter=drafter))
    assert np.isfinite(sequence.prefill([5, 9, 200]).logits()).all()
    assert np.isfinite(sequence.draft(7, 3).logits).all()
    for path, n_dims, open_it in (
        (pair.target, 8, load),
        (pair.drafter, 32, lambda path: Drafter(str(path), target)),
    ):
        with pytest.raises(Error, match=f"sections of {n_dims + 1} dimensions in all, expected 1"):
            open_it(with_sections(path, [n_dims - 3, 1, 1, 2]))
        with pytest.raises(Error, match=f"a section of {n_dims + 1}, expected 0 to {n_dims}"):
            open_it(with_sections(path, [n_dims + 1, 0, 0, 0]))
    with pytest.raises(Error, match="sections of 0 dimensions in all"):
        load(with_sections(pair.target, [0, 0, 0, 0]))


def test_attention_scale_is_honoured(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """Halved queries and twice the attention scale give the same logits."""

    def edit(parts: Parts) -> None:
        put(parts, "attention.scale", 2 / 32**0.5)
        for name in [name for name in parts.tensors if "attn_q." in name]:
            parts.f32(name, parts.tensors[name][0] / 2)

    tokens = [5, 9, 200, 17, 8, 8, 1]
    expected, found = (
        Sequence(Engine(load(path))).logits(tokens)
        for path in (tiny_gguf("llama"), edited(tiny_gguf("llama"), tmp_path / "x.gguf", edit))
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))
