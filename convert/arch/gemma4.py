"""Gemma 4 text models as architecture `gemma4`: dense, with experts, with per-layer inputs.

Sliding and full layers differ in head size, key-value heads and rope.
Source: transformers, models/gemma4 and models/gemma4_unified; llama.cpp, conversion/gemma.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, Config, is_number, read_json
from ..errors import ConvertError
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_attention, add_ffn
from .common import Dims, Inventory, Options, add_transformer, dims_of, of_block, rope_number
from .qwen3moe import add_expert_counts, expert_count

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_PERIOD = 6  # transformers' default: every sixth layer has full attention
DEFAULT_FULL_HEAD_DIM = 512
FROZEN = 1e30  # divisor of a rope angle that leaves a pair unrotated


@dataclass(frozen=True, slots=True)
class _Layers:
    """Sizes of each layer: heads of sliding and of full layers, feed-forward width."""

    kinds: tuple[str, ...]
    sliding: Dims
    full: Dims
    n_ff: tuple[int, ...]
    n_shared: int
    """Number of last layers that use keys and values of earlier layers."""
    n_inputs: int
    """Width of the per-layer inputs, 0 if there are none."""

    def dims(self, block: int) -> Dims:
        return self.sliding if self.kinds[block] == SLIDING else self.full


def _count(config: Config, name: str) -> int:
    return config.integer(name) if config.get(name, 0) != 0 else 0


def _layers(config: Config) -> _Layers:
    sliding = dims_of(config, 256)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            FULL if (block + 1) % DEFAULT_PERIOD == 0 or block + 1 == sliding.n_layer else SLIDING
            for block in range(sliding.n_layer)
        ]
    if not isinstance(kinds, list) or len(kinds) != sliding.n_layer or set(kinds) - {SLIDING, FULL}:
        raise ConvertError(
            f"{config.path}: layer_types must name {SLIDING} or {FULL} for each of "
            f"{sliding.n_layer} layers"
        )
    if FULL not in kinds:
        raise ConvertError(f"{config.path}: layer_types must name at least one {FULL}")
    full = _full_dims(config, sliding, kinds.index(FULL))
    n_shared = _count(config, "num_kv_shared_layers")
    if n_shared and not set(kinds) <= set(kinds[: sliding.n_layer - n_shared]):
        raise ConvertError(
            f"{config.path}: num_kv_shared_layers is {n_shared} of {sliding.n_layer}, which leaves "
            "no layer of each kind to share"
        )
    width = config.integer("intermediate_size")
    is_wide = config.get("use_double_wide_mlp", False) is True
    n_ff = tuple(
        width * (2 if is_wide and block >= sliding.n_layer - n_shared else 1)
        for block in range(sliding.n_layer)
    )
    n_inputs = _count(config, "hidden_size_per_layer_input")
    return _Layers(tuple(kinds), sliding, full, n_ff, n_shared, n_inputs)


def _full_dims(config: Config, sliding: Dims, first: int) -> Dims:
    """Returns head sizes of full-attention layers, from `global_*` keys or per_layer_config."""
    changes = config.mapping("per_layer_config")
    found = [value for key, value in changes.items() if _is_index(key, first)]
    own: dict[str, Any] = found[0] if found and isinstance(found[0], dict) else {}
    given: dict[str, Any] = {
        "head_dim": own.get("head_dim"),
        "num_key_value_heads": own.get("num_key_value_heads"),
    }
    if config.get("per_layer_config") is None:  # per_layer_config {} gives all layers equal sizes
        given["head_dim"] = config.integer("global_head_dim", DEFAULT_FULL_HEAD_DIM)
        if config.get("attention_k_eq_v", False):
            given["num_key_value_heads"] = config.get("num_global_key_value_heads")
    head_dim = given["head_dim"] or sliding.head_dim
    n_head_kv = given["num_key_value_heads"] or sliding.n_head_kv
    for name, value in (("head_dim", head_dim), ("num_key_value_heads", n_head_kv)):
        if type(value) is not int or value < 1:
            raise ConvertError(
                f"{config.path}: {name} of full layers is {value!r}, must be at least 1"
            )
    if head_dim % 2 or sliding.n_head % n_head_kv:
        raise ConvertError(
            f"{config.path}: full-attention layers have head_dim {head_dim}, which must be even, "
            f"and {n_head_kv} key-value heads, which must divide {sliding.n_head} heads"
        )
    return replace(sliding, head_dim=head_dim, n_head_kv=n_head_kv)


def _is_index(key: str, block: int) -> bool:
    return key.isdecimal() and int(key) == block


def _rope(config: Config, kind: str) -> dict[str, Any]:
    rope = config.mapping("rope_parameters").get(kind)
    if rope is None:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        if kind == FULL:
            rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    if not isinstance(rope, dict):
        raise ConvertError(
            f"{config.path}: rope_parameters of {kind} are {rope!r}, an object is needed"
        )
    expected = "proportional" if kind == FULL else "default"
    if rope.get("rope_type") != expected:
        raise ConvertError(
            f"{config.path}: rope type {rope.get('rope_type')!r} of {kind} is not supported for "
            f"gemma4 (supported: {expected})"
        )
    if kind == SLIDING and rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConvertError(
            f"{config.path}: partial_rotary_factor {rope['partial_rotary_factor']!r} of {kind} is "
            "not supported for gemma4"
        )
    return rope


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Gemma 4 model."""
    config, layers = checkpoint.config, _layers(checkpoint.config)
    _refuse_unrepresentable(config)
    result = Metadata(Arch.GEMMA4)
    add_transformer(result, config, layers.full, layers.full.n_layer)
    if len(set(layers.n_ff)) > 1:
        result.array(Key.FEED_FORWARD_LENGTH, list(layers.n_ff))
    if layers.full.n_head_kv != layers.sliding.n_head_kv:
        heads = [layers.dims(block).n_head_kv for block in range(len(layers.kinds))]
        result.array(Key.ATTENTION_HEAD_COUNT_KV, heads)
    result.uint32(Key.ATTENTION_KEY_LENGTH_SWA, layers.sliding.head_dim)
    result.uint32(Key.ATTENTION_VALUE_LENGTH_SWA, layers.sliding.head_dim)
    for key, kind in ((Key.ROPE_FREQ_BASE, FULL), (Key.ROPE_FREQ_BASE_SWA, SLIDING)):
        result.float32(key, rope_number(config, _rope(config, kind), "rope_theta"))
    # Rope spans whole heads; divisors (rope_freqs) leave some pairs of full layers unrotated.
    result.uint32(Key.ROPE_DIMENSION_COUNT, layers.full.head_dim)
    result.uint32(Key.ROPE_DIMENSION_COUNT_SWA, layers.sliding.head_dim)
    result.uint32(Key.ATTENTION_SLIDING_WINDOW, config.integer("sliding_window"))
    is_sliding = [kind == SLIDING for kind in layers.kinds]
    result.array(Key.ATTENTION_SLIDING_WINDOW_PATTERN, is_sliding)
    result.uint32(Key.ATTENTION_SHARED_KV_LAYERS, layers.n_shared)
    result.uint32(Key.EMBEDDING_LENGTH_PER_LAYER_INPUT, layers.n_inputs)
    # GGUF readers cap logits at 30 if final_logit_softcapping is missing.
    result.float32(Key.FINAL_LOGIT_SOFTCAPPING, config.number("final_logit_softcapping", 0.0))
    if _has_experts(config):
        add_expert_counts(result, config, used="top_k_experts")
    suppressed = _suppressed_tokens(checkpoint)
    if suppressed:
        result.array(Key.TOKENIZER_SUPPRESS_TOKENS, suppressed)
    return result


def _has_experts(config: Config) -> bool:
    return config.get("enable_moe_block", False) is True


def _refuse_unrepresentable(config: Config) -> None:
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ConvertError(
            f"{config.path}: hidden_activation {activation!r} is not supported "
            "(only gelu_pytorch_tanh)"
        )
    if config.get("use_bidirectional_attention") == "all":
        raise ConvertError(
            f"{config.path}: use_bidirectional_attention is 'all'; only text generators can be run"
        )


def _suppressed_tokens(checkpoint: Checkpoint) -> list[int]:
    """Returns suppress_tokens of generation_config.json for Gemma4Unified classes, else []."""
    path = checkpoint.directory / "generation_config.json"
    if "Unified" not in checkpoint.config.architecture or not path.is_file():
        return []
    content = read_json(path)
    found = content.get("suppress_tokens") if isinstance(content, dict) else None
    if found is None:
        return []
    if not isinstance(found, list) or any(type(token) is not int or token < 0 for token in found):
        raise ConvertError(f"{path}: suppress_tokens is {found!r}, a list of token ids is needed")
    return found


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Gemma 4 model from its checkpoint."""
    config, layers = checkpoint.config, _layers(checkpoint.config)
    n_embd, n_vocab = layers.full.n_embd, layers.full.n_vocab
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (n_vocab, n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (n_embd,))
    inventory.add_head(n_embd, n_vocab, config)
    inventory.add_values(Tensor.ROPE_FREQS, _rope_divisors(config, layers.full.head_dim))
    if layers.n_inputs:
        _add_per_layer_inputs(inventory, config, layers)
    for block in range(layers.full.n_layer):
        _add_block(inventory, config, layers, block)
    return inventory.finish()


def _rope_divisors(config: Config, head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns divisors of the rope angles of full layers: only the first pairs are rotated."""
    share = _rope(config, FULL).get("partial_rotary_factor", 0.25)
    if not is_number(share) or not 0 < share <= 1:
        raise ConvertError(
            f"{config.path}: partial_rotary_factor of {FULL} is {share!r}, must be > 0 and <= 1"
        )
    n_turned = int(head_dim * share / 2)
    divisors = np.full(head_dim // 2, FROZEN, np.float32)
    divisors[:n_turned] = 1
    return divisors


def _add_per_layer_inputs(inventory: Inventory, config: Config, layers: _Layers) -> None:
    n_layer, n_embd = layers.full.n_layer, layers.full.n_embd
    n_rows = config.integer("vocab_size_per_layer_input", layers.full.n_vocab)
    if n_rows != layers.full.n_vocab:
        raise ConvertError(
            f"{config.path}: vocab_size_per_layer_input is {n_rows}, vocab_size "
            f"{layers.full.n_vocab}; they must be the same"
        )
    width = n_layer * layers.n_inputs
    for name, source, shape in (
        (Tensor.PER_LAYER_TOKEN_EMBD, "embed_tokens_per_layer", (n_rows, width)),
        (Tensor.PER_LAYER_MODEL_PROJ, "per_layer_model_projection", (width, n_embd)),
        (Tensor.PER_LAYER_PROJ_NORM, "per_layer_projection_norm", (layers.n_inputs,)),
    ):
        inventory.add(name, f"model.{source}.weight", shape)


def _add_block(inventory: Inventory, config: Config, layers: _Layers, block: int) -> None:
    dims, prefix = layers.dims(block), f"model.layers.{block}"
    shares = block >= dims.n_layer - layers.n_shared
    norms = [
        (Tensor.ATTN_NORM, "input_layernorm", dims.n_embd),
        (Tensor.POST_ATTENTION_NORM, "post_attention_layernorm", dims.n_embd),
        (Tensor.FFN_NORM, "pre_feedforward_layernorm", dims.n_embd),
        (Tensor.POST_FFW_NORM, "post_feedforward_layernorm", dims.n_embd),
        (Tensor.ATTN_Q_NORM, "self_attn.q_norm", dims.head_dim),
    ]
    if _has_experts(config):
        norms += [
            (Tensor.PRE_FFW_NORM_2, "pre_feedforward_layernorm_2", dims.n_embd),
            (Tensor.POST_FFW_NORM_1, "post_feedforward_layernorm_1", dims.n_embd),
            (Tensor.POST_FFW_NORM_2, "post_feedforward_layernorm_2", dims.n_embd),
        ]
    if layers.n_inputs:
        norms.append((Tensor.PER_LAYER_POST_NORM, "post_per_layer_input_norm", dims.n_embd))
    for name, part, size in norms:
        inventory.add(of_block(name, block), f"{prefix}.{part}.weight", (size,))
    # Checkpoints may hold key norms that layers with shared keys do not use.
    key_norm = (of_block(Tensor.ATTN_K_NORM, block), f"{prefix}.self_attn.k_norm.weight")
    add_norm = inventory.add_optional if shares else inventory.add
    add_norm(*key_norm, (dims.head_dim,))
    value_is_key = bool(config.get("attention_k_eq_v", False)) and layers.kinds[block] == FULL
    add_attention(
        inventory, dims, block, prefix, optional_k=shares, optional_v=shares or value_is_key
    )
    scale = of_block(Tensor.LAYER_OUTPUT_SCALE, block)
    inventory.add_optional(scale, f"{prefix}.layer_scalar", (1,))
    add_ffn(inventory, dims.n_embd, layers.n_ff[block], block, f"{prefix}.mlp")
    if _has_experts(config):
        _add_experts(inventory, config, dims, block, prefix)
    if layers.n_inputs:
        for name, part, shape in (
            (Tensor.PER_LAYER_INP_GATE, "per_layer_input_gate", (layers.n_inputs, dims.n_embd)),
            (Tensor.PER_LAYER_PROJ, "per_layer_projection", (dims.n_embd, layers.n_inputs)),
        ):
            inventory.add(of_block(name, block), f"{prefix}.{part}.weight", shape)


def _add_experts(inventory: Inventory, config: Config, dims: Dims, block: int, prefix: str) -> None:
    n, n_ff = expert_count(config), config.integer("moe_intermediate_size")
    for name, source, shape in (
        (Tensor.FFN_GATE_INP, "router.proj.weight", (n, dims.n_embd)),
        (Tensor.FFN_GATE_INP_SCALE, "router.scale", (dims.n_embd,)),
        (Tensor.FFN_GATE_UP_EXPS, "experts.gate_up_proj", (n, 2 * n_ff, dims.n_embd)),
        (Tensor.FFN_DOWN_EXPS, "experts.down_proj", (n, dims.n_embd, n_ff)),
        (Tensor.FFN_DOWN_EXPS_SCALE, "router.per_expert_scale", (n,)),
    ):
        inventory.add(of_block(name, block), f"{prefix}.{source}", shape)
