"""What the architectures share: metadata of a transformer, rope, and the inventory of tensors."""

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

# Parts of multimodal checkpoints that a text model does not need, and buffers of old ones.
IGNORED = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio"
    r"|multi_modal_projector)\.|\.rotary_emb\.inv_freq$"
)

MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS
MAX_VOCAB = 1 << 24  # ids beyond are not exact in float32, which some readers carry them in


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides about an architecture's conversion."""

    target_model_dir: Path | None = None
    mtp: bool = True
    scaled_embeddings: bool = False
    """A drafter that names no scale reads its target's embeddings times the root of their width."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of the attention and the feed-forward blocks, by GGUF's names of them."""

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int


def dims_of(config: Config, default_head_dim: int | None = None) -> Dims:
    """The sizes in config.json; without `head_dim` there it is the default or hidden / heads."""
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
        raise ConvertError(f"{config.path}: head_dim {head_dim} is odd, rope turns pairs")
    n_layer = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    n_vocab = config.integer("vocab_size", maximum=MAX_VOCAB)
    return Dims(n_embd, n_layer, n_head, n_head_kv, head_dim, n_vocab)


def rope_parameters(config: Config) -> dict[str, Any]:
    """The rope settings, wherever the release of transformers that wrote config.json put them."""
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
    """The keys every architecture here has."""
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
    """Rope base and scaling. `also` names rope types that the architecture treats itself.

    truncates: whether readers round the bounds of yarn's ramp where the file does not say.
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
    """YaRN's own settings. Source: transformers, modeling_rope_utils.py."""
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
    """A number of the rope settings; required where no default is given."""
    value = rope.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ConvertError(f"{config.path}: rope setting {name!r} is {value!r}, a number is needed")
    return float(value)


def require_silu(config: Config) -> None:
    """Refuses any other activation: the GGUF architecture has no key for it."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConvertError(f"{config.path}: hidden_act {activation!r} is not supported (only silu)")


def refuse_sliding_window(config: Config) -> None:
    """Refuses window attention where the GGUF architecture is full attention throughout."""
    if config.get("use_sliding_window", False):
        raise ConvertError(
            f"{config.path}: use_sliding_window is true, but {config.architecture} has full "
            "attention only in GGUF"
        )


class Inventory:
    """Collects the plans of a checkpoint's tensors and sees that none is missing or left over."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """An empty inventory of `checkpoint`."""
        self.checkpoint = checkpoint
        self.plans: list[TensorPlan] = []
        self._used: set[str] = set()

    def view(self, source: str, shape: Sequence[int], *, packed: bool = False) -> Array:
        """A tensor of the checkpoint, its shape checked, counted as used; packed: its bytes."""
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
        """Plans one tensor from one source of `shape`; `write_shape` is its GGUF shape if other."""
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
        """As `add`, if the checkpoint has the source; says whether it does."""
        if source in self.checkpoint:
            self.add(name, source, shape, **options)
            return True
        return False

    def add_parts(
        self, name: str, shape: Sequence[int], parts: Sequence[Array], sources: Sequence[str]
    ) -> None:
        """Plans one tensor from 2-D views that follow each other."""
        self.plans.append(TensorPlan(name, tuple(shape), tuple(parts), sources=tuple(sources)))

    def add_values(self, name: str, values: NDArray[np.float32]) -> None:
        """Plans a computed one-dimensional tensor."""
        self.plans.append(TensorPlan(name, values.shape, (values.reshape(1, -1),)))

    def ignore(self, source: str) -> None:
        """Counts a tensor as used without writing it."""
        self._used.add(source)

    def add_head(self, n_embd: int, n_vocab: int, config: Config) -> None:
        """`lm_head`, which may be absent only where config.json does not say it is untied."""
        found = self.add_optional(Tensor.OUTPUT, "lm_head.weight", (n_vocab, n_embd))
        if not found and config.get("tie_word_embeddings", True) is False:
            raise ConvertError(
                f"{self.checkpoint.directory}: the tensor 'lm_head.weight' is missing and "
                "config.json says tie_word_embeddings is false"
            )

    def finish(self) -> list[TensorPlan]:
        """All plans; a tensor of the checkpoint that none of them uses is an error."""
        for name in self.checkpoint.names:
            if name not in self._used and IGNORED.search(name) is None:
                raise ConvertError(
                    f"{self.checkpoint.directory}: the tensor {name!r} has no place in "
                    f"{self.checkpoint.config.architecture}"
                )
        return self.plans


def of_block(template: str, block: int) -> str:
    """A tensor name of schema.Tensor for a block."""
    return template.replace("{bid}", str(block))


def permutation(n: int, n_heads: int, reorder: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Rows of `n_heads` equal blocks reordered by `reorder`, which gets indices [heads, size]."""
    return reorder(np.arange(n, dtype=np.int64).reshape(n_heads, n // n_heads)).reshape(n)


def llama3_rope_factors(config: Config, head_dim: int) -> NDArray[np.float32] | None:
    """Divisors of the rotation angles for rope type "llama3", else None.

    Returns:
        float32 [head_dim / 2].

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
    # Below 0 the wavelength is long (scaled by the factor), above 1 short (left alone).
    smooth = np.clip(smooth, 0, 1)
    return np.asarray(1 / ((1 - smooth) / np.float32(factor) + smooth), dtype=np.float32)
