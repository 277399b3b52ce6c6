"""Gemma 3 text models, also those in multimodal checkpoints, as architecture `gemma3`.

Source: transformers, models/gemma3; llama.cpp, conversion/gemma.py and src/models/gemma3.cpp.
"""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint, Config
from ..errors import ConvertError
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_attention, add_ffn
from .common import Inventory, Options, add_rope, add_transformer, dims_of, of_block, rope_number
from .qwen35 import plus_one

DEFAULT_HEAD_DIM = 256
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
"""Defaults of transformers' Gemma3TextConfig, which published config.json files leave out."""
PERIOD = 6
"""Every sixth layer has full attention, others a window: GGUF readers know no other pattern."""
N_LAYERS_27B = 62
"""Layers of the 27B model: readers then scale attention by 1 / sqrt(hidden_size / n_heads)."""


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Gemma 3 model."""
    config = _config(checkpoint)
    dims = dims_of(config, DEFAULT_HEAD_DIM)
    _refuse_unrepresentable(config)
    result = Metadata(Arch.GEMMA3)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    result.float32(Key.ROPE_FREQ_BASE_SWA, _sliding_rope_base(config))
    result.uint32(Key.ATTENTION_SLIDING_WINDOW, config.integer("sliding_window"))
    return result


def _config(checkpoint: Checkpoint) -> Config:
    config = checkpoint.config
    config.values = {**DEFAULTS, **config.values}
    return config


def _refuse_unrepresentable(config: Config) -> None:
    """Raises ConvertError for settings that GGUF readers would not apply."""
    dims = dims_of(config, DEFAULT_HEAD_DIM)
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    kinds = config.get("layer_types")
    pattern = [
        "full_attention" if (block + 1) % PERIOD == 0 else "sliding_attention"
        for block in range(dims.n_layer)
    ]
    width = dims.n_embd // dims.n_head if dims.n_layer == N_LAYERS_27B else dims.head_dim
    for name, value, expected in (
        ("hidden_activation", activation, "gelu_pytorch_tanh"),
        ("layer_types", kinds or pattern, pattern),
        ("sliding_window_pattern", config.get("sliding_window_pattern", PERIOD), PERIOD),
        ("query_pre_attn_scalar", config.number("query_pre_attn_scalar", 256.0), float(width)),
        ("attn_logit_softcapping", config.get("attn_logit_softcapping"), None),
        ("final_logit_softcapping", config.get("final_logit_softcapping"), None),
        ("attention_bias", config.get("attention_bias", False), False),
        ("use_bidirectional_attention", config.get("use_bidirectional_attention", False), False),
    ):
        if value != expected:
            raise ConvertError(
                f"{config.path}: {name} is {value!r}, architecture {Arch.GEMMA3} supports "
                f"only {expected!r}"
            )


def _sliding_rope_base(config: Config) -> float:
    rope: Any = config.mapping("rope_parameters").get("sliding_attention")
    if isinstance(rope, dict):
        return rope_number(config, rope, "rope_theta")
    return config.number("rope_local_base_freq", 10000.0)


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors; norms hold 1 + weight, the factor in use."""
    config = _config(checkpoint)
    dims = dims_of(config, DEFAULT_HEAD_DIM)
    n_ff = config.integer("intermediate_size")
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,), apply=plus_one)
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block in range(dims.n_layer):
        prefix = f"model.layers.{block}"
        for name, part, size in (
            (Tensor.ATTN_NORM, "input_layernorm", dims.n_embd),
            (Tensor.ATTN_Q_NORM, "self_attn.q_norm", dims.head_dim),
            (Tensor.ATTN_K_NORM, "self_attn.k_norm", dims.head_dim),
            (Tensor.POST_ATTENTION_NORM, "post_attention_layernorm", dims.n_embd),
            (Tensor.FFN_NORM, "pre_feedforward_layernorm", dims.n_embd),
            (Tensor.POST_FFW_NORM, "post_feedforward_layernorm", dims.n_embd),
        ):
            source = f"{prefix}.{part}.weight"
            inventory.add(of_block(name, block), source, (size,), apply=plus_one)
        add_attention(inventory, dims, block, prefix)
        add_ffn(inventory, dims.n_embd, n_ff, block, f"{prefix}.mlp")
    return inventory.finish()
