"""Shared by all architectures: transformer and rope metadata, and the list of tensor plans."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint, Config, is_number
from ..errors import ConvertError
from ..plan import Array, Elementwise, Metadata, TensorPlan
from ..schema import Key, Tensor

# Tensors that a text model does not need: other modalities, and buffers of old checkpoints.
IGNORED = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio"
    r"|multi_modal_projector)\.|\.rotary_emb\.inv_freq$"
)

MAX_LAYERS = 512  # Most layers that llama.cpp loads (LLAMA_MAX_LAYERS).
MAX_VOCAB = 1 << 24  # Vocabulary limit: some readers hold token ids in float32, exact up to 2^24.


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options that affect the conversion of an architecture."""

    target_model_dir: Path | None = None
    mtp: bool = True
    only_mtp: bool = False
    scaled_embeddings: bool = False
    """True to scale embeddings by sqrt(hidden_size) for a drafter whose config has no scale."""
    draft_vocab: int | None = None
    """Number of lowest token ids that an MTP layer drafts, beside the end tokens; None for all."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a transformer: hidden size, layers, heads, vocabulary."""

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int


def dims_of(config: Config, default_head_dim: int | None = None) -> Dims:
    """Returns the sizes in config.json; head_dim defaults to default_head_dim or hidden / heads."""
    n_embd = config.integer("hidden_size")
    n_head = config.integer("num_attention_heads")
    n_head_kv = config.integer("num_key_value_heads", n_head)
    if n_head % n_head_kv:
        raise ConvertError(
            f"{config.path}: {n_head} attention heads are no multiple of "
            f"{n_head_kv} key-value heads"
        )
    head_dim = config.integer("head_dim", default_head_dim or max(1, n_embd // n_head))
    if head_dim % 2:
        raise ConvertError(f"{config.path}: head_dim is {head_dim}, must be even")
    n_layer = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    n_vocab = config.integer("vocab_size", maximum=MAX_VOCAB)
    return Dims(n_embd, n_layer, n_head, n_head_kv, head_dim, n_vocab)


def rope_parameters(config: Config) -> dict[str, Any]:
    """Returns the rope settings, which releases of transformers store under different keys."""
    rope = dict(config.mapping("rope_parameters") or config.mapping("rope_scaling"))
    nested = rope.get("full_attention")
    if isinstance(nested, dict):
        rope = dict(nested)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.number("rope_theta", 10000.0))
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if rope.get(key) is None and config.get(key) is not None:
            rope[key] = config.get(key)
    return rope


def add_transformer(metadata: Metadata, config: Config, dims: Dims, n_blocks: int) -> None:
    """Adds the metadata keys that all architectures have."""
    metadata.uint32(Key.BLOCK_COUNT, n_blocks)
    metadata.uint32(Key.CONTEXT_LENGTH, config.integer("max_position_embeddings"))
    metadata.uint32(Key.EMBEDDING_LENGTH, dims.n_embd)
    if config.get("intermediate_size") is not None:
        metadata.uint32(Key.FEED_FORWARD_LENGTH, config.integer("intermediate_size"))
    metadata.uint32(Key.ATTENTION_HEAD_COUNT, dims.n_head)
    metadata.uint32(Key.ATTENTION_HEAD_COUNT_KV, dims.n_head_kv)
    metadata.float32(Key.ATTENTION_LAYER_NORM_RMS_EPSILON, config.number("rms_norm_eps", 1e-6))
    if config.get("head_dim") is not None or dims.head_dim != dims.n_embd // dims.n_head:
        metadata.uint32(Key.ATTENTION_KEY_LENGTH, dims.head_dim)
        metadata.uint32(Key.ATTENTION_VALUE_LENGTH, dims.head_dim)


def add_rope(
    metadata: Metadata, config: Config, also: Sequence[str] = (), *, truncates: bool = True
) -> None:
    """Adds rope base and scaling. also: further rope types, which the architecture handles itself.

    truncates: True if readers of the architecture round the bounds of YaRN's ramp by default.
    """
    rope = rope_parameters(config)
    metadata.float32(Key.ROPE_FREQ_BASE, rope_number(config, rope, "rope_theta"))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        metadata.string(Key.ROPE_SCALING_TYPE, kind)
        metadata.float32(Key.ROPE_SCALING_FACTOR, rope_number(config, rope, "factor"))
    elif kind not in ("default", *also):
        supported = ", ".join(("default", "linear", "yarn", *also))
        raise ConvertError(
            f"{config.path}: rope type {kind!r} is not supported for {metadata.arch} "
            f"(supported: {supported})"
        )
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        length = original or config.integer("max_position_embeddings")
        metadata.uint32(Key.ROPE_SCALING_ORIGINAL_CONTEXT_LENGTH, length)
        _add_yarn(metadata, config, rope)
        if (rope.get("truncate") is not False) is not truncates:
            metadata.boolean(Key.ROPE_SCALING_YARN_TRUNCATE, not truncates)


def _add_yarn(metadata: Metadata, config: Config, rope: dict[str, Any]) -> None:
    """Adds the settings of YaRN. Source: transformers, modeling_rope_utils.py."""
    factor = rope_number(config, rope, "factor")
    if rope.get("attention_factor") is None and rope.get("attn_factor") is not None:
        rope["attention_factor"] = rope["attn_factor"]
    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale, all_dim = (
            1 + 0.1 * rope_number(config, rope, name) * math.log(max(1.0, factor))
            for name in ("mscale", "mscale_all_dim")
        )
        rope["attention_factor"] = mscale / all_dim
    for key, name in (
        (Key.ROPE_SCALING_YARN_EXT_FACTOR, "extrapolation_factor"),
        (Key.ROPE_SCALING_YARN_ATTN_FACTOR, "attention_factor"),
        (Key.ROPE_SCALING_YARN_BETA_FAST, "beta_fast"),
        (Key.ROPE_SCALING_YARN_BETA_SLOW, "beta_slow"),
    ):
        if rope.get(name) is not None:
            metadata.float32(key, rope_number(config, rope, name))


def rope_number(config: Config, rope: dict[str, Any], name: str, default: Any = None) -> float:
    """Returns a number from the rope settings; raises ConvertError if missing without default."""
    value = rope.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ConvertError(f"{config.path}: rope setting {name!r} is {value!r}, a number is needed")
    return float(value)


def require_silu(config: Config) -> None:
    """Raises ConvertError for an activation other than silu, for which GGUF has no key."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConvertError(f"{config.path}: hidden_act {activation!r} is not supported (only silu)")


def refuse_sliding_window(config: Config) -> None:
    """Raises ConvertError for window attention, which the GGUF architecture does not have."""
    if config.get("use_sliding_window", False):
        raise ConvertError(
            f"{config.path}: use_sliding_window is true, but {config.architecture} has full "
            "attention only in GGUF"
        )


class Inventory:
    """Collects a model's tensor plans, and checks that they use each checkpoint tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.plans: list[TensorPlan] = []
        self._used: set[str] = set()

    def view(self, source: str, shape: Sequence[int], *, packed: bool = False) -> Array:
        """Returns a view of a checkpoint tensor, marked as used; ConvertError for another shape."""
        if source not in self.checkpoint:
            raise ConvertError(f"{self.checkpoint.directory}: the tensor {source!r} is missing")
        found = self.checkpoint.shape(source)
        if found != tuple(shape):
            raise ConvertError(
                f"{self.checkpoint.directory}: {source!r} has shape {list(found)}, "
                f"config.json asks for {list(shape)}"
            )
        self._used.add(source)
        return self.checkpoint.view(source, packed=packed)

    def add(
        self,
        name: str,
        source: str,
        shape: Sequence[int],
        *,
        rows: NDArray[np.int64] | None = None,
        columns: NDArray[np.int64] | None = None,
        apply: Elementwise | None = None,
        write_shape: Sequence[int] | None = None,
    ) -> None:
        """Plans a GGUF tensor from a checkpoint tensor of `shape`. write_shape: its GGUF shape."""
        view = self.view(source, shape)
        final = tuple(write_shape or shape)
        self.plans.append(
            TensorPlan(
                name,
                final,
                (view.reshape(-1, final[-1]),),
                rows=rows,
                columns=columns,
                apply=apply,
                sources=(source,),
            )
        )

    def add_optional(self, name: str, source: str, shape: Sequence[int], **options: Any) -> bool:
        """Plans GGUF tensor `name` if the checkpoint has tensor `source`, else returns False."""
        if source in self.checkpoint:
            self.add(name, source, shape, **options)
            return True
        return False

    def add_parts(
        self, name: str, shape: Sequence[int], parts: Sequence[Array], sources: Sequence[str]
    ) -> None:
        """Plans a GGUF tensor that joins 2-D views of checkpoint tensors, one below the other."""
        self.plans.append(TensorPlan(name, tuple(shape), tuple(parts), sources=tuple(sources)))

    def add_values(self, name: str, values: NDArray[np.float32]) -> None:
        """Plans a one-dimensional GGUF tensor of computed values."""
        self.plans.append(TensorPlan(name, values.shape, (values.reshape(1, -1),)))

    def ignore(self, source: str) -> None:
        """Marks a checkpoint tensor as used, though the GGUF file leaves it out."""
        self._used.add(source)

    def add_head(self, n_embd: int, n_vocab: int, config: Config) -> None:
        """Plans the output head; ConvertError if it is missing and not tied to embeddings."""
        found = self.add_optional(Tensor.OUTPUT, "lm_head.weight", (n_vocab, n_embd))
        if not found and config.get("tie_word_embeddings", True) is False:
            raise ConvertError(
                f"{self.checkpoint.directory}: the tensor 'lm_head.weight' is missing and "
                "config.json says tie_word_embeddings is false"
            )

    def finish(self) -> list[TensorPlan]:
        """Returns the plans of all GGUF tensors; ConvertError for an unused checkpoint tensor."""
        for name in self.checkpoint.names:
            if name not in self._used and IGNORED.search(name) is None:
                raise ConvertError(
                    f"{self.checkpoint.directory}: the tensor {name!r} has no place in "
                    f"{self.checkpoint.config.architecture}"
                )
        return self.plans


def of_block(template: str, block: int) -> str:
    """Returns the name of a block's tensor: replaces `{bid}` in a name of schema.Tensor."""
    return template.replace("{bid}", str(block))


def permutation(n: int, n_heads: int, reorder: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Returns a new order of n rows: `reorder` permutes their indices [n_heads, n / n_heads]."""
    return reorder(np.arange(n, dtype=np.int64).reshape(n_heads, n // n_heads)).reshape(n)


def llama3_rope_factors(config: Config, head_dim: int) -> NDArray[np.float32] | None:
    """Returns divisors of rotation angles, float32 [head_dim / 2]; None unless rope is "llama3".

    Source: transformers, modeling_rope_utils.py, _compute_llama3_parameters.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    base = rope_number(config, rope, "rope_theta")
    factor = rope_number(config, rope, "factor", 8.0)
    low = rope_number(config, rope, "low_freq_factor", 1.0)
    high = rope_number(config, rope, "high_freq_factor", 4.0)
    original = rope_number(config, rope, "original_max_position_embeddings", 8192)
    if high <= low:
        raise ConvertError(
            f"{config.path}: rope high_freq_factor {high:g} must exceed low_freq_factor {low:g}"
        )
    frequency = np.float32(1) / np.float32(base) ** (
        np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    )
    wavelength = np.float32(2 * math.pi) / frequency
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    # Share of the unscaled frequency in Llama 3's rope: 0 for long wavelengths, 1 for short.
    smooth = np.clip(smooth, 0, 1)
    return np.asarray(1 / ((1 - smooth) / np.float32(factor) + smooth), dtype=np.float32)
