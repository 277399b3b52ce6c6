"""Defines shapes of published models, and their GGUF metadata and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.schema import Arch, Key, Tensor
from dflash_gguf.convert.types import FILE_TYPES

HAVE_SECTIONS = (Arch.QWEN35, Arch.QWEN35MOE)
"""Architectures with multi-section RoPE (M-RoPE)."""
NORM_BEHIND = (Arch.GEMMA3, Arch.GEMMA4)
"""Architectures with a norm after attention and after the feed-forward network."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes of a mixture of experts. n_ff_shared: 0 without a shared expert.

    in_blocks: True if the experts are published in MXFP4.
    """

    n: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sizes of sliding-window layers, all but every `period`-th layer. 0: as in full layers."""

    window: int
    period: int
    n_head_kv: int = 0
    head_dim: int = 0
    rope_base: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. n_k_heads, n_v_heads: heads of Gated DeltaNet layers, 0 for none.

    taps: target layers whose inputs a drafter reads. multi_rope: True for a drafter with M-RoPE.
    biased: True if attention has biases. yarn: factor, and context length before scaling.
    n_per_layer: width of Gemma's per-layer embeddings, 0 for none. n_shared: number of last layers,
    which read other layers' K/V; wide: True if their feed-forward networks have twice the width.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    eps: float
    tied: bool
    rope_dims: int
    n_k_heads: int = 0
    n_v_heads: int = 0
    d_state: int = 128
    d_conv: int = 4
    attention_interval: int = 4
    taps: tuple[int, ...] = ()
    multi_rope: bool = False
    experts: Mixture | None = None
    sliding: Sliding | None = None
    biased: bool = False
    yarn: tuple[float, int] | None = None
    n_per_layer: int = 0
    n_shared: int = 0
    wide: bool = False

    def slides(self, block: int) -> bool:
        """True if the layer has a sliding window."""
        return self.sliding is not None and (block + 1) % self.sliding.period != 0

    def kv_heads(self, block: int) -> tuple[int, int]:
        """Returns the number of a layer's K/V heads, and the size of a head."""
        if self.sliding is None or not self.slides(block):
            return self.n_head_kv, self.head_dim
        return self.sliding.n_head_kv or self.n_head_kv, self.sliding.head_dim or self.head_dim

    def shares(self, block: int) -> bool:
        """True if the layer reads the keys and values of another layer."""
        return block >= self.n_layer - self.n_shared

    def ff(self, block: int) -> int:
        """Returns the width of a layer's dense feed-forward network."""
        return self.n_ff * (2 if self.wide and self.shares(block) else 1)

    def cut(self, n_layer: int) -> Shape:
        """Returns a shape of fewer layers, with the same share of layers that read others' K/V."""
        return replace(self, n_layer=n_layer, n_shared=self.n_shared * n_layer // self.n_layer)


def _gpt_oss(n_layer: int, n_experts: int) -> Shape:
    return Shape(
        Arch.GPT_OSS,
        n_layer,
        2880,
        2880,
        64,
        8,
        64,
        201088,
        131072,
        150000.0,
        1e-5,
        False,
        64,
        experts=Mixture(n_experts, 4, 2880, in_blocks=True),
        sliding=Sliding(128, 2),
        biased=True,
        yarn=(32.0, 4096),
    )


def _gemma4(
    n_layer: int, n_embd: int, n_ff: int, heads: tuple[int, int, int], experts: Mixture | None
) -> Shape:
    """heads: numbers of query heads, of K/V heads in full and in sliding-window layers."""
    return Shape(
        Arch.GEMMA4,
        n_layer,
        n_embd,
        n_ff,
        heads[0],
        heads[1],
        512,
        262144,
        262144,
        1e6,
        1e-6,
        True,
        512,
        experts=experts,
        sliding=Sliding(1024, 6, heads[2], 256, 1e4),
    )


def _gemma4_e(
    n_layer: int, n_embd: int, n_head_kv: int, n_shared: int, period: int, wide: bool
) -> Shape:
    return replace(
        _gemma4(n_layer, n_embd, 4 * n_embd, (8, n_head_kv, n_head_kv), None),
        n_ctx=131072,
        sliding=Sliding(512, period, n_head_kv, 256, 1e4),
        n_per_layer=256,
        n_shared=n_shared,
        wide=wide,
    )


# Sizes from the models' config.json files.
PRESETS = {
    "smollm2": Shape(Arch.LLAMA, 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, True, 64),
    "llama-8b": Shape(
        Arch.LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, 128
    ),
    "qwen3-8b": Shape(
        Arch.QWEN3, 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, False, 128
    ),
    "qwen3-30b-a3b": Shape(
        Arch.QWEN3MOE,
        48,
        2048,
        6144,
        32,
        4,
        128,
        151936,
        262144,
        1e7,
        1e-6,
        False,
        128,
        experts=Mixture(128, 8, 768),
    ),
    "qwen35-0.8b": Shape(
        Arch.QWEN35, 24, 1024, 3584, 8, 2, 256, 248320, 262144, 1e7, 1e-6, True, 64, 16, 16
    ),
    "qwen35-27b": Shape(
        Arch.QWEN35, 64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e7, 1e-6, False, 64, 16, 48
    ),
    "qwen35-35b-a3b": Shape(
        Arch.QWEN35MOE,
        40,
        2048,
        512,
        16,
        2,
        256,
        248320,
        262144,
        1e7,
        1e-6,
        False,
        64,
        16,
        32,
        experts=Mixture(256, 8, 512, 512),
    ),
    "qwen3-coder-next": Shape(
        Arch.QWEN3NEXT,
        48,
        2048,
        5120,
        16,
        2,
        256,
        151936,
        262144,
        5e6,
        1e-6,
        False,
        64,
        16,
        32,
        experts=Mixture(512, 10, 512, 512),
    ),
    "qwen25-7b": Shape(
        Arch.QWEN2,
        28,
        3584,
        18944,
        28,
        4,
        128,
        152064,
        32768,
        1e6,
        1e-6,
        False,
        128,
        biased=True,
    ),
    "gemma-3-27b": Shape(
        Arch.GEMMA3,
        62,
        5376,
        21504,
        32,
        16,
        128,
        262208,
        131072,
        1e6,
        1e-6,
        True,
        128,
        sliding=Sliding(1024, 6, rope_base=1e4),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-4-12b": _gemma4(48, 3840, 15360, (16, 1, 8), None),
    "gemma-4-31b": _gemma4(60, 5376, 21504, (32, 4, 16), None),
    "gemma-4-26b-a4b": _gemma4(30, 2816, 2112, (16, 2, 8), Mixture(128, 8, 704)),
    "gemma-4-e2b": _gemma4_e(35, 1536, 1, n_shared=20, period=5, wide=True),
    "gemma-4-e4b": _gemma4_e(42, 2560, 2, n_shared=18, period=6, wide=False),
}

# Models of 3 or 4 layers, to test devices: rows of matrices are whole quantised blocks of any type,
# and heads have the sizes of published models.
TINY = Shape(Arch.LLAMA, 3, 256, 512, 4, 2, 64, 512, 8192, 1e5, 1e-5, False, 64)
TINY_HYBRID = replace(
    TINY,
    arch=Arch.QWEN35,
    n_layer=4,
    n_head=6,
    n_head_kv=1,
    head_dim=256,
    n_k_heads=4,
    n_v_heads=12,
)
TINY_GEMMA4 = replace(
    TINY,
    arch=Arch.GEMMA4,
    tied=True,
    head_dim=512,
    rope_dims=512,
    sliding=Sliding(32, 3, 4, 256, 1e4),
)
PRESETS |= {
    "tiny-llama": TINY,
    "tiny-qwen2": replace(TINY, arch=Arch.QWEN2, biased=True),
    "tiny-qwen3": replace(TINY, arch=Arch.QWEN3),
    "tiny-qwen3moe": replace(TINY, arch=Arch.QWEN3MOE, experts=Mixture(8, 2, 256)),
    "tiny-qwen35": TINY_HYBRID,
    "tiny-qwen35moe": replace(
        TINY_HYBRID,
        arch=Arch.QWEN35MOE,
        n_k_heads=2,
        n_v_heads=4,
        experts=Mixture(8, 2, 256, 256),
    ),
    "tiny-qwen3next": replace(
        TINY_HYBRID,
        arch=Arch.QWEN3NEXT,
        n_k_heads=2,
        n_v_heads=4,
        experts=Mixture(8, 2, 256, 256),
    ),
    "tiny-gpt-oss": replace(
        TINY,
        arch=Arch.GPT_OSS,
        experts=Mixture(8, 4, 256, in_blocks=True),
        sliding=Sliding(32, 2),
        biased=True,
        yarn=(32.0, 4096),
    ),
    "tiny-gemma3": replace(TINY, arch=Arch.GEMMA3, sliding=Sliding(32, 3, rope_base=1e4)),
    "tiny-gemma4": TINY_GEMMA4,
    "tiny-gemma4moe": replace(TINY_GEMMA4, experts=Mixture(8, 2, 256)),
    "tiny-gemma4e": replace(
        TINY_GEMMA4,
        n_layer=4,
        sliding=Sliding(32, 2, 2, 256, 1e4),
        n_per_layer=256,
        n_shared=2,
        wide=True,
    ),
}
TINY_NAMES = tuple(name for name in PRESETS if name.startswith("tiny-"))
TAPS = dict.fromkeys(TINY_NAMES, (1, 2)) | {
    "smollm2": (2, 8, 15, 21, 28),
    "llama-8b": (2, 9, 16, 22, 29),
    "qwen3-8b": (2, 10, 18, 26, 34),
    "qwen3-30b-a3b": (2, 13, 24, 35, 46),
    "qwen35-0.8b": (2, 7, 12, 17, 22),
    "qwen35-27b": (2, 17, 32, 47, 62),
    "qwen35-35b-a3b": (2, 11, 20, 29, 38),
    "qwen3-coder-next": (2, 13, 24, 35, 46),
    "gpt-oss-20b": (2, 7, 12, 17, 22),
    "gpt-oss-120b": (2, 10, 18, 26, 34),
    "gemma-4-12b": (2, 13, 24, 35, 46),
    "gemma-4-31b": (2, 13, 24, 36, 47, 58),
    "gemma-4-26b-a4b": (2, 8, 14, 20, 26),
    "gemma-4-e2b": (2, 9, 16, 24, 31),
    "gemma-4-e4b": (2, 11, 20, 29, 38),
}


def _drafter(target: Shape, taps: tuple[int, ...]) -> Shape:
    drafter = _usual_drafter(target, taps)
    if target.n_embd < 1024:
        return drafter
    if target.arch == Arch.QWEN3NEXT:
        return replace(drafter, n_layer=8)
    if target.arch == Arch.GPT_OSS:
        heads = {"n_head": 64, "head_dim": 64, "rope_dims": 64}
        return replace(drafter, n_layer=8, n_ff=7680, **heads, biased=True, yarn=target.yarn)
    if target.arch == Arch.GEMMA4:
        return replace(drafter, n_head=64, n_ff=2 * target.n_embd, sliding=Sliding(2048, 5))
    return drafter


def _usual_drafter(target: Shape, taps: tuple[int, ...]) -> Shape:
    small = target.n_embd < 1024
    heads = (target.n_head, target.n_head_kv, target.head_dim) if small else (32, 8, 128)
    if target.n_embd == 1024:
        heads = (16, 8, 128)
    return Shape(
        Arch.DFLASH,
        5,
        target.n_embd,
        6144 if target.experts and not small else target.n_ff,
        *heads,
        target.n_vocab,
        target.n_ctx,
        target.rope_base,
        target.eps,
        tied=True,
        rope_dims=heads[2],
        taps=taps,
        multi_rope=target.arch in HAVE_SECTIONS,
    )


PRESETS |= {f"{name}-dflash": _drafter(PRESETS[name], taps) for name, taps in TAPS.items()}
BLOCK_SIZE = 16


def metadata(shape: Shape, name: str, outtype: str) -> Metadata:
    """Returns the GGUF metadata that loaders need for a shape."""
    meta = Metadata(shape.arch)
    meta.string(Key.GENERAL_ARCHITECTURE, shape.arch)
    meta.string(Key.GENERAL_NAME, f"random {name}")
    meta.uint32(Key.GENERAL_FILE_TYPE, FILE_TYPES[outtype])
    meta.uint32(Key.GENERAL_QUANTIZATION_VERSION, 2)
    meta.uint32(Key.VOCAB_SIZE, shape.n_vocab)
    meta.uint32(Key.BLOCK_COUNT, shape.n_layer)
    meta.uint32(Key.CONTEXT_LENGTH, shape.n_ctx)
    meta.uint32(Key.EMBEDDING_LENGTH, shape.n_embd)
    meta.uint32(Key.FEED_FORWARD_LENGTH, shape.n_ff)
    if shape.wide:
        meta.array(Key.FEED_FORWARD_LENGTH, [shape.ff(block) for block in range(shape.n_layer)])
    meta.uint32(Key.ATTENTION_HEAD_COUNT, shape.n_head)
    meta.uint32(Key.ATTENTION_HEAD_COUNT_KV, shape.n_head_kv)
    meta.uint32(Key.ATTENTION_KEY_LENGTH, shape.head_dim)
    meta.uint32(Key.ATTENTION_VALUE_LENGTH, shape.head_dim)
    meta.float32(Key.ATTENTION_LAYER_NORM_RMS_EPSILON, shape.eps)
    meta.uint32(Key.ROPE_DIMENSION_COUNT, shape.rope_dims)
    meta.float32(Key.ROPE_FREQ_BASE, shape.rope_base)
    if shape.n_v_heads:
        if shape.arch in HAVE_SECTIONS:
            meta.array(Key.ROPE_DIMENSION_SECTIONS, [11, 11, 10, 0])
        meta.uint32(Key.FULL_ATTENTION_INTERVAL, shape.attention_interval)
        meta.uint32(Key.SSM_CONV_KERNEL, shape.d_conv)
        meta.uint32(Key.SSM_STATE_SIZE, shape.d_state)
        meta.uint32(Key.SSM_GROUP_COUNT, shape.n_k_heads)
        meta.uint32(Key.SSM_TIME_STEP_RANK, shape.n_v_heads)
        meta.uint32(Key.SSM_INNER_SIZE, shape.d_state * shape.n_v_heads)
    if shape.experts:
        meta.uint32(Key.EXPERT_COUNT, shape.experts.n)
        meta.uint32(Key.EXPERT_USED_COUNT, shape.experts.n_used)
        meta.uint32(Key.EXPERT_FEED_FORWARD_LENGTH, shape.experts.n_ff)
        if shape.experts.n_ff_shared:
            meta.uint32(Key.EXPERT_SHARED_FEED_FORWARD_LENGTH, shape.experts.n_ff_shared)
    if shape.sliding:
        _add_windows(meta, shape, shape.sliding)
    if shape.yarn:
        factor, n_ctx = shape.yarn
        meta.string(Key.ROPE_SCALING_TYPE, "yarn")
        meta.float32(Key.ROPE_SCALING_FACTOR, factor)
        meta.uint32(Key.ROPE_SCALING_ORIGINAL_CONTEXT_LENGTH, n_ctx)
    if shape.arch == Arch.GEMMA4:
        meta.float32(Key.FINAL_LOGIT_SOFTCAPPING, 30.0)
        meta.uint32(Key.EMBEDDING_LENGTH_PER_LAYER_INPUT, shape.n_per_layer)
        if shape.n_shared:
            meta.uint32(Key.ATTENTION_SHARED_KV_LAYERS, shape.n_shared)
    if shape.taps:
        meta.array(Key.TARGET_LAYERS, list(shape.taps))
        meta.uint32(Key.BLOCK_SIZE, BLOCK_SIZE)
    if shape.multi_rope:
        meta.array(Key.ROPE_DIMENSION_SECTIONS, [shape.rope_dims // 2, 0, 0, 0])
    return meta


def _add_windows(meta: Metadata, shape: Shape, sliding: Sliding) -> None:
    meta.uint32(Key.ATTENTION_SLIDING_WINDOW, sliding.window)
    blocks = range(shape.n_layer)
    if shape.arch != Arch.GPT_OSS:
        meta.array(Key.ATTENTION_SLIDING_WINDOW_PATTERN, [shape.slides(b) for b in blocks])
    if sliding.n_head_kv:
        meta.array(Key.ATTENTION_HEAD_COUNT_KV, [shape.kv_heads(b)[0] for b in blocks])
    if sliding.head_dim:
        meta.uint32(Key.ATTENTION_KEY_LENGTH_SWA, sliding.head_dim)
        meta.uint32(Key.ATTENTION_VALUE_LENGTH_SWA, sliding.head_dim)
        meta.uint32(Key.ROPE_DIMENSION_COUNT_SWA, sliding.head_dim)
    if sliding.rope_base:
        meta.float32(Key.ROPE_FREQ_BASE_SWA, sliding.rope_base)


def _attention(shape: Shape, block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_head_kv, head_dim = shape.kv_heads(block)
    width, kv_width = head_dim * shape.n_head, head_dim * n_head_kv
    # Qwen3.5's attention is gated: each head's projection has a query and a gate.
    yield Tensor.ATTN_Q, ((2 if shape.n_v_heads else 1) * width, shape.n_embd)
    if not shape.shares(block):
        yield Tensor.ATTN_K, (kv_width, shape.n_embd)
    # Gemma 4's full layers use keys as values, except in models with per-layer embeddings.
    has_values = shape.arch != Arch.GEMMA4 or shape.slides(block) or shape.n_per_layer > 0
    if has_values and not shape.shares(block):
        yield Tensor.ATTN_V, (kv_width, shape.n_embd)
    yield Tensor.ATTN_OUTPUT, (shape.n_embd, width)
    if shape.biased:
        yield Tensor.ATTN_Q_BIAS, (width,)
        yield Tensor.ATTN_K_BIAS, (kv_width,)
        yield Tensor.ATTN_V_BIAS, (kv_width,)
        if shape.arch != Arch.QWEN2:
            yield Tensor.ATTN_OUTPUT_BIAS, (shape.n_embd,)
    if shape.arch == Arch.GPT_OSS:
        yield Tensor.ATTN_SINKS, (shape.n_head,)
    elif shape.arch not in (Arch.LLAMA, Arch.QWEN2):
        yield Tensor.ATTN_Q_NORM, (head_dim,)
        if not shape.shares(block):
            yield Tensor.ATTN_K_NORM, (head_dim,)
    if shape.arch in NORM_BEHIND:
        yield Tensor.POST_ATTENTION_NORM, (shape.n_embd,)


def _delta_net(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = shape.d_state * shape.n_v_heads
    channels = 2 * shape.d_state * shape.n_k_heads + inner
    yield Tensor.ATTN_QKV, (channels, shape.n_embd)
    yield Tensor.ATTN_GATE, (inner, shape.n_embd)
    yield Tensor.SSM_CONV1D, (channels, shape.d_conv)
    yield Tensor.SSM_DT_BIAS, (shape.n_v_heads,)
    yield Tensor.SSM_A, (shape.n_v_heads,)
    if shape.arch == Arch.QWEN3NEXT:
        yield Tensor.SSM_BETA_ALPHA, (2 * shape.n_v_heads, shape.n_embd)
    else:
        yield Tensor.SSM_ALPHA, (shape.n_v_heads, shape.n_embd)
        yield Tensor.SSM_BETA, (shape.n_v_heads, shape.n_embd)
    yield Tensor.SSM_NORM, (shape.d_state,)
    yield Tensor.SSM_OUT, (shape.n_embd, inner)


def _feed_forward(shape: Shape, block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if shape.experts is None or shape.arch == Arch.GEMMA4:
        yield Tensor.FFN_GATE, (shape.ff(block), shape.n_embd)
        yield Tensor.FFN_UP, (shape.ff(block), shape.n_embd)
        yield Tensor.FFN_DOWN, (shape.n_embd, shape.ff(block))
    if shape.arch in NORM_BEHIND:
        yield Tensor.POST_FFW_NORM, (shape.n_embd,)
    if shape.arch == Arch.GEMMA4:
        yield Tensor.LAYER_OUTPUT_SCALE, (1,)
    if shape.experts is None:
        return
    n, n_ff, n_shared = shape.experts.n, shape.experts.n_ff, shape.experts.n_ff_shared
    yield Tensor.FFN_GATE_INP, (n, shape.n_embd)
    if shape.arch == Arch.GEMMA4:
        yield Tensor.FFN_GATE_INP_SCALE, (shape.n_embd,)
        yield Tensor.PRE_FFW_NORM_2, (shape.n_embd,)
        yield Tensor.POST_FFW_NORM_1, (shape.n_embd,)
        yield Tensor.POST_FFW_NORM_2, (shape.n_embd,)
        yield Tensor.FFN_GATE_UP_EXPS, (n, 2 * n_ff, shape.n_embd)
        yield Tensor.FFN_DOWN_EXPS, (n, shape.n_embd, n_ff)
        yield Tensor.FFN_DOWN_EXPS_SCALE, (n,)
        return
    yield Tensor.FFN_GATE_EXPS, (n, n_ff, shape.n_embd)
    yield Tensor.FFN_UP_EXPS, (n, n_ff, shape.n_embd)
    yield Tensor.FFN_DOWN_EXPS, (n, shape.n_embd, n_ff)
    if shape.arch == Arch.GPT_OSS:
        yield Tensor.FFN_GATE_INP_BIAS, (n,)
        yield Tensor.FFN_GATE_EXPS_BIAS, (n, n_ff)
        yield Tensor.FFN_UP_EXPS_BIAS, (n, n_ff)
        yield Tensor.FFN_DOWN_EXPS_BIAS, (n, shape.n_embd)
    if n_shared:
        yield Tensor.FFN_GATE_INP_SHEXP, (shape.n_embd,)
        yield Tensor.FFN_GATE_SHEXP, (n_shared, shape.n_embd)
        yield Tensor.FFN_UP_SHEXP, (n_shared, shape.n_embd)
        yield Tensor.FFN_DOWN_SHEXP, (shape.n_embd, n_shared)


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the row-major shape of each tensor, in the order of the file."""
    if shape.taps:
        yield Tensor.FC, (shape.n_embd, len(shape.taps) * shape.n_embd)
        yield Tensor.ENC_OUTPUT_NORM, (shape.n_embd,)
    else:
        yield Tensor.TOKEN_EMBD, (shape.n_vocab, shape.n_embd)
    yield Tensor.OUTPUT_NORM, (shape.n_embd,)
    if not shape.tied and not shape.taps:
        yield Tensor.OUTPUT, (shape.n_vocab, shape.n_embd)
    if shape.arch == Arch.GEMMA4:
        yield Tensor.ROPE_FREQS, (shape.head_dim // 2,)
    if shape.n_per_layer:
        width = shape.n_layer * shape.n_per_layer
        yield Tensor.PER_LAYER_TOKEN_EMBD, (shape.n_vocab, width)
        yield Tensor.PER_LAYER_MODEL_PROJ, (width, shape.n_embd)
        yield Tensor.PER_LAYER_PROJ_NORM, (shape.n_per_layer,)
    hybrid = shape.n_v_heads > 0
    # True if the norm before the feed-forward network has the name POST_ATTENTION_NORM.
    behind = hybrid or shape.arch == Arch.GPT_OSS
    for bid in range(shape.n_layer):
        recurrent = hybrid and (bid + 1) % shape.attention_interval != 0
        layer = [(Tensor.ATTN_NORM, (shape.n_embd,))]
        layer += _delta_net(shape) if recurrent else _attention(shape, bid)
        layer.append((Tensor.POST_ATTENTION_NORM if behind else Tensor.FFN_NORM, (shape.n_embd,)))
        layer += _feed_forward(shape, bid)
        if shape.n_per_layer:
            layer.append((Tensor.PER_LAYER_INP_GATE, (shape.n_per_layer, shape.n_embd)))
            layer.append((Tensor.PER_LAYER_PROJ, (shape.n_embd, shape.n_per_layer)))
            layer.append((Tensor.PER_LAYER_POST_NORM, (shape.n_embd,)))
        for name, sizes in layer:
            yield name.replace("{bid}", str(bid)), sizes
