"""Qwen3.5 and Qwen3.6 text models (dense) as architecture `qwen35`.

Three layers of four are Gated DeltaNet. GGUF tiles their value heads over the n_k key heads (head j
uses key head j mod n_k), Hugging Face groups them (j // r, with r per key head). Hugging Face
stores norm weights as factor - 1, except the DeltaNet's own norm; GGUF stores the factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint, Config
from ..errors import ConvertError
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_attention, add_ffn
from .common import (
    Dims,
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
    permutation,
    require_silu,
    rope_number,
    rope_parameters,
)

DEFAULT_HEAD_DIM = 256  # Default head_dim of transformers' Qwen3_5TextConfig.
DEFAULT_ROPE_SECTIONS = [11, 11, 10, 0]  # Default mrope_section of Qwen3_5TextRotaryEmbedding.
DEFAULT_INTERVAL = 4

AddFfn = Callable[[Inventory, int, str], None]
AddLinear = Callable[[Inventory, int, "LinearDims", int, str], None]


@dataclass(frozen=True, slots=True)
class LinearDims:
    """Sizes of a Gated DeltaNet layer: heads and head sizes of keys and values, kernel length."""

    n_key: int
    n_value: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Number of channels of all key heads, equal to that of all query heads."""
        return self.n_key * self.key_dim

    @property
    def values(self) -> int:
        """Number of channels of all value heads."""
        return self.n_value * self.value_dim


def linear_dims_of(config: Config) -> LinearDims:
    """Returns the sizes of Gated DeltaNet layers in config.json."""
    dims = LinearDims(
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
    )
    if dims.n_value % dims.n_key:
        raise ConvertError(
            f"{config.path}: {dims.n_value} linear value heads are no multiple of "
            f"{dims.n_key} key heads"
        )
    if dims.key_dim != dims.value_dim:
        raise ConvertError(
            f"{config.path}: linear_key_head_dim {dims.key_dim} and linear_value_head_dim "
            f"{dims.value_dim} differ, GGUF can store only equal ones"
        )
    return dims


def value_head_order(dims: LinearDims, head_size: int) -> NDArray[np.int64]:
    """Returns the channel order: GGUF head r * n_key + k is checkpoint head k * ratio + r."""
    ratio = dims.n_value // dims.n_key
    return permutation(
        dims.n_value * head_size,
        dims.n_value,
        lambda rows: rows.reshape(dims.n_key, ratio, head_size).swapaxes(0, 1),
    )


def layer_is_linear(config: Config, n_layer: int) -> list[bool]:
    """Returns True for each Gated DeltaNet layer, False for each full-attention layer."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", DEFAULT_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        raise ConvertError(f"{config.path}: layer_types needs {n_layer} entries, one per layer")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise ConvertError(
                f"{config.path}: layer type {kind!r} is not linear_attention or full_attention"
            )
    return [kind == "linear_attention" for kind in kinds]


def count_mtp_layers(checkpoint: Checkpoint, options: Options) -> int:
    """Returns the number of multi-token-prediction layers whose tensors the checkpoint has.

    config.json is no proof: transformers keeps `mtp_num_hidden_layers` but drops the tensors.
    """
    if not options.mtp:
        return 0
    found = [re.match(r"mtp\.layers\.(\d+)\.", name) for name in checkpoint.names]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def text_metadata(
    checkpoint: Checkpoint, options: Options, arch: str, *, has_sections: bool = True
) -> Metadata:
    """Returns all metadata but the experts' keys; also used by `qwen35moe` and `qwen3next`.

    has_sections: True if rope positions may have several coordinates.
    """
    config, dims = checkpoint.config, dims_of(checkpoint.config, DEFAULT_HEAD_DIM)
    require_silu(config)
    linear = linear_dims_of(config)
    n_mtp = count_mtp_layers(checkpoint, options)
    result = Metadata(arch)
    add_transformer(result, config, dims, dims.n_layer + n_mtp)
    add_rope(result, config)
    rope = rope_parameters(config)
    if has_sections:
        result.array(Key.ROPE_DIMENSION_SECTIONS, _sections(config, rope.get("mrope_section")))
    rotated = dims.head_dim * rope_number(config, rope, "partial_rotary_factor", 0.25)
    result.uint32(Key.ROPE_DIMENSION_COUNT, int(rotated))
    result.uint32(Key.SSM_CONV_KERNEL, linear.kernel)
    result.uint32(Key.SSM_STATE_SIZE, linear.key_dim)
    result.uint32(Key.SSM_GROUP_COUNT, linear.n_key)
    result.uint32(Key.SSM_TIME_STEP_RANK, linear.n_value)
    result.uint32(Key.SSM_INNER_SIZE, linear.values)
    recurrent = layer_is_linear(config, dims.n_layer) + [False] * n_mtp
    result.array(Key.ATTENTION_RECURRENT_LAYERS, recurrent)
    interval = config.integer("full_attention_interval", DEFAULT_INTERVAL)
    result.uint32(Key.FULL_ATTENTION_INTERVAL, interval)
    if n_mtp:
        result.uint32(Key.NEXTN_PREDICT_LAYERS, n_mtp)
    return result


def _sections(config: Config, value: object) -> list[int]:
    if value is None:
        return DEFAULT_ROPE_SECTIONS
    if not isinstance(value, list) or len(value) > 4 or any(type(v) is not int for v in value):
        raise ConvertError(
            f"{config.path}: mrope_section is {value!r}, up to 4 integers are needed"
        )
    return value + [0] * (4 - len(value))


def metadata(checkpoint: Checkpoint, options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen3.5 model."""
    return text_metadata(checkpoint, options, Arch.QWEN35)


def plus_one(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the factors of a norm whose weights are stored as factor - 1."""
    return values + np.float32(1)


def negated_exp(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the decay rate -exp(A_log), correctly rounded, which numpy's float32 exp is not."""
    with np.errstate(over="ignore"):
        return (-np.exp(values.astype(np.float64))).astype(np.float32)


def add_linear_attention(
    inventory: Inventory, n_embd: int, linear: LinearDims, block: int, prefix: str
) -> None:
    """Plans the tensors of a Gated DeltaNet layer: reordered value heads, decay -exp(A_log)."""
    channels = 2 * linear.keys + linear.values
    order = value_head_order(linear, linear.value_dim)
    heads = value_head_order(linear, 1)
    mixed = np.concatenate([np.arange(2 * linear.keys), 2 * linear.keys + order])
    source = f"{prefix}.linear_attn"

    def name(template: str) -> str:
        return of_block(template, block)

    qkv, z, out = (f"{source}.{part}.weight" for part in ("in_proj_qkv", "in_proj_z", "out_proj"))
    inventory.add(name(Tensor.ATTN_QKV), qkv, (channels, n_embd), rows=mixed)
    inventory.add(name(Tensor.ATTN_GATE), z, (linear.values, n_embd), rows=order)
    inventory.add(
        name(Tensor.SSM_CONV1D),
        f"{source}.conv1d.weight",
        (channels, 1, linear.kernel),
        rows=mixed,
        write_shape=(channels, linear.kernel),
    )
    inventory.add(name(Tensor.SSM_DT_BIAS), f"{source}.dt_bias", (linear.n_value,), columns=heads)
    inventory.add(
        name(Tensor.SSM_A),
        f"{source}.A_log",
        (linear.n_value,),
        columns=heads,
        apply=negated_exp,
    )
    for template, part in ((Tensor.SSM_BETA, "in_proj_b"), (Tensor.SSM_ALPHA, "in_proj_a")):
        shape = (linear.n_value, n_embd)
        inventory.add(name(template), f"{source}.{part}.weight", shape, rows=heads)
    inventory.add(name(Tensor.SSM_NORM), f"{source}.norm.weight", (linear.value_dim,))
    inventory.add(name(Tensor.SSM_OUT), out, (n_embd, linear.values), columns=order)


def add_full_attention(inventory: Inventory, dims: Dims, block: int, prefix: str) -> None:
    """Plans a full-attention layer's tensors; in Q, each head's query precedes its gate."""
    for template, part in ((Tensor.ATTN_Q_NORM, "q_norm"), (Tensor.ATTN_K_NORM, "k_norm")):
        source = f"{prefix}.self_attn.{part}.weight"
        inventory.add(of_block(template, block), source, (dims.head_dim,), apply=plus_one)
    add_attention(inventory, dims, block, prefix, q_factor=2)


def _add_block_norms(inventory: Inventory, n_embd: int, block: int, prefix: str) -> None:
    for template, part in (
        (Tensor.ATTN_NORM, "input_layernorm"),
        (Tensor.POST_ATTENTION_NORM, "post_attention_layernorm"),
    ):
        source = f"{prefix}.{part}.weight"
        inventory.add(of_block(template, block), source, (n_embd,), apply=plus_one)


def _add_mtp(inventory: Inventory, dims: Dims, n_mtp: int, add_block_ffn: AddFfn) -> None:
    """Plans MTP layers as blocks after the trunk; the first MTP block holds shared tensors."""
    for layer in range(n_mtp):
        block, prefix = dims.n_layer + layer, f"mtp.layers.{layer}"
        _add_block_norms(inventory, dims.n_embd, block, prefix)
        add_full_attention(inventory, dims, block, prefix)
        add_block_ffn(inventory, block, f"{prefix}.mlp")
    fusion = of_block(Tensor.NEXTN_EH_PROJ, dims.n_layer)
    inventory.add(fusion, "mtp.fc.weight", (dims.n_embd, 2 * dims.n_embd))
    for template, part in (
        (Tensor.NEXTN_ENORM, "pre_fc_norm_embedding"),
        (Tensor.NEXTN_HNORM, "pre_fc_norm_hidden"),
        (Tensor.NEXTN_SHARED_HEAD_NORM, "norm"),
    ):
        name = of_block(template, dims.n_layer)
        inventory.add(name, f"mtp.{part}.weight", (dims.n_embd,), apply=plus_one)


def text_tensors(
    checkpoint: Checkpoint,
    options: Options,
    add_block_ffn: AddFfn,
    add_linear: AddLinear = add_linear_attention,
) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a text model from its checkpoint.

    add_block_ffn, add_linear: functions that plan a block's FFN and Gated DeltaNet tensors.
    """
    config, dims = checkpoint.config, dims_of(checkpoint.config, DEFAULT_HEAD_DIM)
    linear = linear_dims_of(config)
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,), apply=plus_one)
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block, is_linear in enumerate(layer_is_linear(config, dims.n_layer)):
        prefix = f"model.layers.{block}"
        _add_block_norms(inventory, dims.n_embd, block, prefix)
        if is_linear:
            add_linear(inventory, dims.n_embd, linear, block, prefix)
        else:
            add_full_attention(inventory, dims, block, prefix)
        add_block_ffn(inventory, block, f"{prefix}.mlp")
    n_mtp = count_mtp_layers(checkpoint, options)
    if n_mtp:
        _add_mtp(inventory, dims, n_mtp, add_block_ffn)
    elif not options.mtp:
        for name in checkpoint.names:
            if name.startswith("mtp."):
                inventory.ignore(name)
    return inventory.finish()


def tensors(checkpoint: Checkpoint, options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Qwen3.5 model from its checkpoint."""
    config = checkpoint.config
    n_embd, n_ff = config.integer("hidden_size"), config.integer("intermediate_size")

    def add_block_ffn(inventory: Inventory, block: int, prefix: str) -> None:
        add_ffn(inventory, n_embd, n_ff, block, prefix)

    return text_tensors(checkpoint, options, add_block_ffn)
