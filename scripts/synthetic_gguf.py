"""Writes a GGUF of a published model's shape with random weights, as fast as the disk takes it.

    scripts/synthetic_gguf.py qwen35-27b OUT.gguf --outtype q4_k_m

For measurements, where only shapes and types matter. Quantised blocks are random but valid, and
their scales keep the activations finite. The file has no tokenizer. llama.cpp loads it too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from dflash_gguf.convert.plan import Metadata, TensorPlan
from dflash_gguf.convert.schema import Arch, Key, Tensor
from dflash_gguf.convert.types import BLOCKS, FILE_TYPES, choose_types
from dflash_gguf.convert.write import ALIGNMENT, header_bytes, tensor_bytes
from numpy.typing import NDArray

WEIGHT_SCALE = 0.02  # about the standard deviation of every matrix
POOL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. n_k_heads, n_v_heads: of linear attention; 0 where there is none."""

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


# Sizes as in the config.json of SmolLM2-135M, Qwen3-8B, Qwen3.5-0.8B and Qwen3.5-27B.
PRESETS = {
    "smollm2": Shape(Arch.LLAMA, 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, True, 64),
    "qwen3-8b": Shape(
        Arch.QWEN3, 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, False, 128
    ),
    "qwen35-0.8b": Shape(
        Arch.QWEN35, 24, 1024, 3584, 8, 2, 256, 248320, 262144, 1e7, 1e-6, True, 64, 16, 16
    ),
    "qwen35-27b": Shape(
        Arch.QWEN35, 64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e7, 1e-6, False, 64, 16, 48
    ),
}


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
    meta.string(Key.TOKENIZER_MODEL, "no_vocab")
    return meta


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.head_dim * shape.n_head
    kv_width = shape.head_dim * shape.n_head_kv
    # Qwen3.5 gates its attention: a head has a query and a gate.
    yield Tensor.ATTN_Q, ((2 if shape.arch == Arch.QWEN35 else 1) * width, shape.n_embd)
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


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and row-major shapes in file order."""
    yield Tensor.TOKEN_EMBD, (shape.n_vocab, shape.n_embd)
    yield Tensor.OUTPUT_NORM, (shape.n_embd,)
    if not shape.tied:
        yield Tensor.OUTPUT, (shape.n_vocab, shape.n_embd)
    hybrid = shape.arch == Arch.QWEN35
    for bid in range(shape.n_layer):
        recurrent = hybrid and (bid + 1) % shape.attention_interval != 0
        layer = [(Tensor.ATTN_NORM, (shape.n_embd,))]
        layer += _delta_net(shape) if recurrent else _attention(shape)
        layer.append((Tensor.POST_ATTENTION_NORM if hybrid else Tensor.FFN_NORM, (shape.n_embd,)))
        layer.append((Tensor.FFN_GATE, (shape.n_ff, shape.n_embd)))
        layer.append((Tensor.FFN_UP, (shape.n_ff, shape.n_embd)))
        layer.append((Tensor.FFN_DOWN, (shape.n_embd, shape.n_ff)))
        for name, sizes in layer:
            yield name.replace("{bid}", str(bid)), sizes


# Byte offsets of the float16 scales in a block, and the spread of what they multiply when all other
# bits are random. q4_K takes 7.5 times its first scale as the second, so that values centre on 0.
_SCALES = {
    "q4_0": {0: 1 / 4.6},
    "q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "q5_0": {0: 1 / 9.2},
    "q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
    "q8_0": {0: 1 / 74},
    "q4_K": {0: 1 / 256, 2: 7.5 / 256},
    "q5_K": {0: 1 / 512, 2: 15.5 / 512},
    "q6_K": {208: 1 / 1350},
}


def random_pool(type_name: str, random: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks of a type, uint8 [n_blocks, block_bytes]."""
    size = BLOCKS[type_name][1]
    # A number of blocks that no row divides: rows cut from the pool one after the other differ.
    n_blocks = POOL_BYTES // size | 1
    if type_name in _SCALES:
        pool = random.integers(0, 256, (n_blocks, size), dtype=np.uint8)
        for offset, factor in _SCALES[type_name].items():
            scale = np.array([factor * WEIGHT_SCALE], np.float16).view(np.uint8)
            pool[:, offset : offset + 2] = scale
        return pool
    values = random.standard_normal(n_blocks, np.float32) * np.float32(WEIGHT_SCALE)
    if type_name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    return values.astype(type_name.replace("f", "float")).view(np.uint8).reshape(-1, size)


def small_values(name: str, sizes: tuple[int, ...], random: np.random.Generator) -> bytes:
    """Values of a float32 tensor: norms near 1, decays negative, the rest random."""
    if name.endswith("norm.weight"):
        values = random.uniform(0.9, 1.1, sizes)
    elif name.endswith("ssm_a"):
        values = -random.uniform(0.5, 4.0, sizes)
    else:
        values = random.standard_normal(sizes) * 0.3
    return values.astype(np.float32).tobytes()


class Pools:
    """Slices of random blocks; a pool is made when its type is first asked for."""

    def __init__(self, random: np.random.Generator) -> None:
        """`random` draws blocks and offsets."""
        self._random = random
        self._pools: dict[str, memoryview] = {}

    def write(self, put: Callable[[memoryview], object], type_name: str, n_bytes: int) -> None:
        """Writes n_bytes of blocks, beginning anywhere in the pool."""
        if type_name not in self._pools:
            self._pools[type_name] = memoryview(random_pool(type_name, self._random)).cast("B")
        pool, size = self._pools[type_name], BLOCKS[type_name][1]
        at = int(self._random.integers(len(pool) // size)) * size
        while n_bytes > 0:
            piece = pool[at : at + n_bytes]
            put(piece)
            n_bytes -= len(piece)
            at = 0


def write_model(path: Path, shape: Shape, name: str, outtype: str, seed: int) -> None:
    """Writes the file, or nothing."""
    plans = [
        # zeros without memory: a plan wants a view of its rows, which nobody reads
        TensorPlan(n, s, (np.broadcast_to(np.float32(0), (s[0] if len(s) > 1 else 1, s[-1])),))
        for n, s in tensors(shape)
    ]
    types = choose_types(plans, outtype, shape.arch, shape.n_layer, 0)
    random = np.random.default_rng(seed)
    pools = Pools(random)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(header_bytes(metadata(shape, name, outtype), plans, types))
            for plan in plans:
                n_bytes = tensor_bytes(plan, types[plan.name])
                if types[plan.name] == "f32" and n_bytes < 1 << 22:
                    file.write(small_values(plan.name, plan.shape, random))
                else:
                    pools.write(file.write, types[plan.name], n_bytes)
                file.write(b"\0" * (-n_bytes % ALIGNMENT))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a GGUF of random weights")
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("outfile", type=Path, metavar="OUT.gguf")
    parser.add_argument("--outtype", choices=sorted(FILE_TYPES), default="q8_0")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        write_model(args.outfile, PRESETS[args.preset], args.preset, args.outtype, args.seed)
    except OSError as error:
        sys.exit(f"error: {args.outfile}: cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
