"""DFlash drafters (z-lab's DFlashDraftModel) as architecture `dflash`.

`dflash.target_layers` counts layer inputs, so it holds Hugging Face's `target_layer_ids` + 1: the
drafter reads the output of these layers, the input of the next ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, Config, is_number
from ..errors import ConvertError
from ..gguf_target import GgufConfig
from ..plan import Metadata, TensorPlan, list_plan
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
    rope_number,
    rope_parameters,
)
from .qwen3 import DEFAULT_HEAD_DIM

DEFAULT_BLOCK_SIZE = 16  # default block size in z-lab/dflash, model.py
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def target_of(checkpoint: Checkpoint, options: Options) -> Config:
    """Returns the config of a drafter's target; needs --target-model-dir."""
    if options.target_model_dir is None:
        raise ConvertError(
            f"{checkpoint.directory}: a DFlash drafter needs --target-model-dir, "
            "the folder of its target (config and tokenizer) or its GGUF file"
        )
    target = options.target_model_dir
    return GgufConfig(target) if target.is_file() else Config(target)


def _setting(config: Config, name: str, default: Any = None) -> Any:
    """Returns a DFlash setting from `dflash_config` or (older exports) the top level."""
    value = config.mapping("dflash_config").get(name)
    return config.get(name, default) if value is None else value


def _integer(config: Config, name: str, minimum: int, default: int | None = None) -> int:
    value = _setting(config, name, default)
    if type(value) is not int or value < minimum:
        raise ConvertError(
            f"{config.path}: the DFlash setting {name!r} is {value!r}, "
            f"an integer of at least {minimum} is needed"
        )
    return value


def _number(config: Config, name: str) -> float | None:
    value = _setting(config, name)
    if value is not None and not is_number(value):
        raise ConvertError(
            f"{config.path}: the DFlash setting {name!r} is {value!r}, a number is needed"
        )
    return None if value is None else float(value)


def target_layer_ids(config: Config, target: Config) -> list[int]:
    """Returns the target layers whose output the drafter reads, checked against the target.

    Default: z-lab/dflash, model.py, build_target_layer_ids.
    """
    n_target, n_draft = target.integer("num_hidden_layers"), config.integer("num_hidden_layers")
    ids = _setting(config, "target_layer_ids")
    if ids is None:
        if n_draft == 1:
            ids = [n_target // 2]
        else:
            ids = [round(1 + i * (n_target - 4) / (n_draft - 1)) for i in range(n_draft)]
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ConvertError(f"{config.path}: target_layer_ids is {ids!r}, integers are needed")
    for layer in ids:
        # Refuses a tap of the last layer: GGUF readers see its output only after the final norm.
        if not 0 <= layer <= n_target - 2:
            raise ConvertError(
                f"{config.path}: target_layer_ids names layer {layer}, but the target "
                f"{target.directory} has {n_target} layers; give layers of 0 to {n_target - 2}"
            )
    return ids


def _check_pair(config: Config, target: Config) -> None:
    for key in ("hidden_size", "vocab_size"):
        mine, theirs = config.integer(key), target.integer(key)
        if mine != theirs:
            raise ConvertError(
                f"{config.path}: the drafter's {key} is {mine}, "
                f"but that of its target {target.directory} is {theirs}"
            )
    mask = _integer(config, "mask_token_id", 0)
    if mask >= config.integer("vocab_size"):
        raise ConvertError(
            f"{config.path}: mask_token_id {mask} is outside the vocabulary of "
            f"{config.integer('vocab_size')}"
        )


def metadata(checkpoint: Checkpoint, options: Options) -> Metadata:
    """Returns the GGUF metadata of a drafter."""
    config, target = checkpoint.config, target_of(checkpoint, options)
    _check_pair(config, target)
    dims = dims_of(config, DEFAULT_HEAD_DIM)
    result = Metadata(Arch.DFLASH)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    _add_rope_extras(result, config, target, dims)
    result.uint32(Key.BLOCK_SIZE, _integer(config, "block_size", 2, DEFAULT_BLOCK_SIZE))
    result.array(Key.TARGET_LAYERS, [i + 1 for i in target_layer_ids(config, target)])
    _add_scales(result, config, options)
    _add_attention_kind(result, config, dims.n_layer)
    result.uint32(Key.TOKENIZER_MASK_ID, _integer(config, "mask_token_id", 0))
    return result


def _add_rope_extras(metadata: Metadata, config: Config, target: Config, dims: Dims) -> None:
    rope = rope_parameters(config)
    if rope.get("partial_rotary_factor") is not None:
        rotated = dims.head_dim * rope_number(config, rope, "partial_rotary_factor")
        metadata.uint32(Key.ROPE_DIMENSION_COUNT, int(rotated))
    # If the target has multimodal rope, the drafter rotates all pairs by the temporal position.
    if "mrope_section" in rope_parameters(target):
        metadata.array(Key.ROPE_DIMENSION_SECTIONS, [dims.head_dim // 2, 0, 0, 0])


def _add_scales(metadata: Metadata, config: Config, options: Options) -> None:
    """Adds the scales of embeddings, logits and V, and the logit soft cap, by the drafter's config.

    The target's scales are ignored, as in z-lab/dflash.
    """
    embedding = _number(config, "input_embedding_scale")
    if embedding is None and options.scaled_embeddings:
        embedding = math.sqrt(config.integer("hidden_size"))
    if embedding is not None:
        metadata.float32(Key.EMBEDDING_SCALE, embedding)
    softcap = _number(config, "final_logit_softcapping")
    if softcap is not None and softcap > 0:
        metadata.float32(Key.FINAL_LOGIT_SOFTCAPPING, softcap)
    for key, name in (
        (Key.LOGIT_SCALE, "output_multiplier"),
        (Key.ATTENTION_VALUE_SCALE, "attention_value_scale"),
    ):
        value = _number(config, name)
        if value is not None:
            metadata.float32(key, value)
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ConvertError(
            f"{config.path}: hidden_act {activation!r} is not supported (supported: {supported})"
        )
    if activation != "silu":
        metadata.string(Key.HIDDEN_ACTIVATION, activation)


def _add_attention_kind(metadata: Metadata, config: Config, n_layer: int) -> None:
    all_sliding = bool(_setting(config, "use_swa", False))
    window = config.mapping("dflash_config").get("swa_window_size") or config.get("sliding_window")
    if window and (all_sliding or config.get("use_sliding_window", False)):
        if type(window) is not int or window < 1:
            raise ConvertError(f"{config.path}: sliding_window is {window!r}, an integer is needed")
        kinds = config.get("layer_types", ["full_attention"] * n_layer)
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            raise ConvertError(f"{config.path}: layer_types needs {n_layer} entries, one per layer")
        pattern = [all_sliding or kind == "sliding_attention" for kind in kinds]
        metadata.uint32(Key.ATTENTION_SLIDING_WINDOW, window)
        metadata.array(Key.ATTENTION_SLIDING_WINDOW_PATTERN, pattern)
    causal = config.get("is_causal")
    if causal is None:
        causal = config.mapping("dflash_config").get("causal")
    if causal is not None:
        metadata.boolean(Key.ATTENTION_CAUSAL, bool(causal))


def tensors(checkpoint: Checkpoint, options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a drafter from its checkpoint."""
    config, target = checkpoint.config, target_of(checkpoint, options)
    _refuse_unrepresentable(checkpoint)
    dims = dims_of(config, DEFAULT_HEAD_DIM)
    n_embd, n_vocab = dims.n_embd, dims.n_vocab
    n_taps = len(target_layer_ids(config, target))
    inventory = Inventory(checkpoint)

    def source(name: str) -> str:
        """Returns a tensor's name in the checkpoint: some exports put `model.` before all names."""
        prefixed = f"model.{name}"
        return prefixed if prefixed in checkpoint else name

    inventory.add(Tensor.FC, source("fc.weight"), (n_embd, n_taps * n_embd))
    inventory.add(Tensor.ENC_OUTPUT_NORM, source("hidden_norm.weight"), (n_embd,))
    inventory.add(Tensor.OUTPUT_NORM, source("norm.weight"), (n_embd,))
    if config.get("has_embed_tokens", True):
        embeddings = source("embed_tokens.weight")
        inventory.add_optional(Tensor.TOKEN_EMBD, embeddings, (n_vocab, n_embd))
    else:
        inventory.ignore(source("embed_tokens.weight"))
    _add_head(inventory, source("lm_head.weight"), source("d2t"), n_embd, n_vocab)
    for block in range(dims.n_layer):
        prefix = source(f"layers.{block}.input_layernorm.weight").removesuffix(
            ".input_layernorm.weight"
        )
        _add_block(inventory, config, dims, block, prefix)
    return inventory.finish()


def _add_head(inventory: Inventory, head: str, d2t: str, n_embd: int, n_vocab: int) -> None:
    """Plans the drafter's own head, and the tokens of its rows if these are not all.

    Source of d2t, offsets from a row's number to its token: SafeAILab/EAGLE, EAGLE-3.
    """
    checkpoint = inventory.checkpoint
    n_rows = n_vocab
    if d2t in checkpoint:
        shape = checkpoint.shape(d2t)
        is_list = len(shape) == 1 and checkpoint.dtype(d2t) == "I64"
        tokens = np.zeros(0, np.int64)
        if is_list:
            (n_rows,) = shape
            offsets = inventory.view(d2t, shape, packed=True)
            tokens = offsets + np.arange(n_rows)
        if not tokens.size or not 0 <= tokens.min() <= tokens.max() < n_vocab:
            raise ConvertError(
                f"{checkpoint.directory}: {d2t!r} is not a list of I64 offsets to tokens 0 to "
                f"{n_vocab - 1}"
            )
        if head not in checkpoint or checkpoint.shape(head) != (n_rows, n_embd):
            raise ConvertError(
                f"{checkpoint.directory}: {d2t!r} has {n_rows} tokens, {head!r} must have a row "
                "for each"
            )
        inventory.plans.append(list_plan(Tensor.D2T, tokens, (d2t,)))
    inventory.add_optional(Tensor.OUTPUT, head, (n_rows, n_embd))


def _refuse_unrepresentable(checkpoint: Checkpoint) -> None:
    if "conv_kernel_size" in checkpoint.config.mapping("dflash_config"):
        raise ConvertError(
            f"{checkpoint.config.path}: dflash_config has 'conv_kernel_size': it is a DFlash2 "
            "drafter, only DFlash drafters can be run"
        )
    for name in checkpoint.names:
        if "markov_head" in name:
            raise ConvertError(
                f"{checkpoint.directory}: is a DSpark drafter ({name!r}), only DFlash "
                "drafters can be run"
            )
    if (checkpoint.directory / "mask_embedding.pt").exists():
        raise ConvertError(
            f"{checkpoint.directory}: has a mask_embedding.pt, which is not supported; "
            "merge it into the drafter's embed_tokens first"
        )


def _add_block(inventory: Inventory, config: Config, dims: Dims, block: int, prefix: str) -> None:
    n_embd, head = dims.n_embd, dims.head_dim
    for template, part in (
        (Tensor.ATTN_NORM, "input_layernorm"),
        (Tensor.FFN_NORM, "post_attention_layernorm"),
    ):
        inventory.add(of_block(template, block), f"{prefix}.{part}.weight", (n_embd,))
    neox = config.get("rope_is_neox_style", True)

    def order(n_heads: int) -> Any:
        """Returns Q's or K's row order, even dimensions first; None if rope pairs halves."""
        if neox:
            return None
        return permutation(
            n_heads * head,
            n_heads,
            lambda rows: rows.reshape(n_heads, head // 2, 2).swapaxes(1, 2),
        )

    for template, part in ((Tensor.ATTN_Q_NORM, "q_norm"), (Tensor.ATTN_K_NORM, "k_norm")):
        name = f"{prefix}.self_attn.{part}.weight"
        inventory.add(of_block(template, block), name, (head,), columns=order(1))
    add_attention(
        inventory, dims, block, prefix, q_rows=order(dims.n_head), k_rows=order(dims.n_head_kv)
    )
    sinks = f"{prefix}.self_attn.sinks"
    inventory.add_optional(of_block(Tensor.ATTN_SINKS, block), sinks, (dims.n_head,))
    add_ffn(inventory, n_embd, config.integer("intermediate_size"), block, f"{prefix}.mlp")
