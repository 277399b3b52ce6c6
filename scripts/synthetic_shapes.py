"""Shapes of published models, as GGUF metadata and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.schema import Arch, Key, Tensor
from dflash_gguf.convert.types import FILE_TYPES


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: n_ff of one expert; n_ff_shared of the one that is always asked, 0 for none."""

    n: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. n_k_heads, n_v_heads: of linear attention; 0 where there is none.

    taps: layer inputs of the target that a drafter reads. multi_rope: its positions are M-RoPE's.
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
    experts: Experts | None = None


# Sizes as in the models' config.json. Drafters have five layers like z-lab's, their target's width
# and Qwen3's heads.
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
        experts=Experts(128, 8, 768),
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
        experts=Experts(256, 8, 512, 512),
    ),
}

# Three or four layers of each architecture, for tests of a device: rows are whole blocks of every
# type, and attention and delta rule have heads of their published sizes.
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
PRESETS |= {
    "tiny-llama": TINY,
    "tiny-qwen3": replace(TINY, arch=Arch.QWEN3),
    "tiny-qwen3moe": replace(TINY, arch=Arch.QWEN3MOE, experts=Experts(8, 2, 256)),
    "tiny-qwen35": TINY_HYBRID,
    "tiny-qwen35moe": replace(
        TINY_HYBRID, arch=Arch.QWEN35MOE, n_k_heads=2, n_v_heads=4, experts=Experts(8, 2, 256, 256)
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
}


def _drafter(target: Shape, taps: tuple[int, ...]) -> Shape:
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
        multi_rope=target.n_v_heads > 0,
    )


PRESETS |= {f"{name}-dflash": _drafter(PRESETS[name], taps) for name, taps in TAPS.items()}
BLOCK_SIZE = 16


def metadata(shape: Shape, name: str, outtype: str) -> Metadata:
    """The metadata a loader needs."""
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
    meta.uint32(Key.ATTENTION_HEAD_COUNT, shape.n_head)
    meta.uint32(Key.ATTENTION_HEAD_COUNT_KV, shape.n_head_kv)
    meta.uint32(Key.ATTENTION_KEY_LENGTH, shape.head_dim)
    meta.uint32(Key.ATTENTION_VALUE_LENGTH, shape.head_dim)
    meta.float32(Key.ATTENTION_LAYER_NORM_RMS_EPSILON, shape.eps)
    meta.uint32(Key.ROPE_DIMENSION_COUNT, shape.rope_dims)
    meta.float32(Key.ROPE_FREQ_BASE, shape.rope_base)
    if shape.n_v_heads:
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
    if shape.taps:
        meta.array(Key.TARGET_LAYERS, list(shape.taps))
        meta.uint32(Key.BLOCK_SIZE, BLOCK_SIZE)
    if shape.multi_rope:
        meta.array(Key.ROPE_DIMENSION_SECTIONS, [shape.rope_dims // 2, 0, 0, 0])
    return meta


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.head_dim * shape.n_head
    kv_width = shape.head_dim * shape.n_head_kv
    # Qwen3.5 gates its attention: a head has a query and a gate.
    yield Tensor.ATTN_Q, ((2 if shape.n_v_heads else 1) * width, shape.n_embd)
    yield Tensor.ATTN_K, (kv_width, shape.n_embd)
    yield Tensor.ATTN_V, (kv_width, shape.n_embd)
    yield Tensor.ATTN_OUTPUT, (shape.n_embd, width)
    if shape.arch != Arch.LLAMA:
        yield Tensor.ATTN_Q_NORM, (shape.head_dim,)
        yield Tensor.ATTN_K_NORM, (shape.head_dim,)


def _delta_net(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = shape.d_state * shape.n_v_heads
    channels = 2 * shape.d_state * shape.n_k_heads + inner
    yield Tensor.ATTN_QKV, (channels, shape.n_embd)
    yield Tensor.ATTN_GATE, (inner, shape.n_embd)
    yield Tensor.SSM_CONV1D, (channels, shape.d_conv)
    yield Tensor.SSM_DT_BIAS, (shape.n_v_heads,)
    yield Tensor.SSM_A, (shape.n_v_heads,)
    yield Tensor.SSM_ALPHA, (shape.n_v_heads, shape.n_embd)
    yield Tensor.SSM_BETA, (shape.n_v_heads, shape.n_embd)
    yield Tensor.SSM_NORM, (shape.d_state,)
    yield Tensor.SSM_OUT, (shape.n_embd, inner)


def _feed_forward(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    if shape.experts is None:
        yield Tensor.FFN_GATE, (shape.n_ff, shape.n_embd)
        yield Tensor.FFN_UP, (shape.n_ff, shape.n_embd)
        yield Tensor.FFN_DOWN, (shape.n_embd, shape.n_ff)
        return
    n, n_ff, n_shared = shape.experts.n, shape.experts.n_ff, shape.experts.n_ff_shared
    yield Tensor.FFN_GATE_INP, (n, shape.n_embd)
    yield Tensor.FFN_GATE_EXPS, (n, n_ff, shape.n_embd)
    yield Tensor.FFN_UP_EXPS, (n, n_ff, shape.n_embd)
    yield Tensor.FFN_DOWN_EXPS, (n, shape.n_embd, n_ff)
    if n_shared:
        yield Tensor.FFN_GATE_INP_SHEXP, (shape.n_embd,)
        yield Tensor.FFN_GATE_SHEXP, (n_shared, shape.n_embd)
        yield Tensor.FFN_UP_SHEXP, (n_shared, shape.n_embd)
        yield Tensor.FFN_DOWN_SHEXP, (shape.n_embd, n_shared)


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and row-major shapes in file order."""
    if shape.taps:
        yield Tensor.FC, (shape.n_embd, len(shape.taps) * shape.n_embd)
        yield Tensor.ENC_OUTPUT_NORM, (shape.n_embd,)
    else:
        yield Tensor.TOKEN_EMBD, (shape.n_vocab, shape.n_embd)
    yield Tensor.OUTPUT_NORM, (shape.n_embd,)
    if not shape.tied and not shape.taps:
        yield Tensor.OUTPUT, (shape.n_vocab, shape.n_embd)
    hybrid = shape.n_v_heads > 0
    for bid in range(shape.n_layer):
        recurrent = hybrid and (bid + 1) % shape.attention_interval != 0
        layer = [(Tensor.ATTN_NORM, (shape.n_embd,))]
        layer += _delta_net(shape) if recurrent else _attention(shape)
        layer.append((Tensor.POST_ATTENTION_NORM if hybrid else Tensor.FFN_NORM, (shape.n_embd,)))
        layer += _feed_forward(shape)
        for name, sizes in layer:
            yield name.replace("{bid}", str(bid)), sizes
