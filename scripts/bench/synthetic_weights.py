"""Makes random weights: valid blocks of ggml types, about as spread as real weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from dflash_gguf.convert.schema import Tensor
from dflash_gguf.convert.types import BLOCKS
from numpy.typing import NDArray

WEIGHT_SCALE = 0.02  # approximate standard deviation of the weights of matrices
POOL_BYTES = 32 << 20
NEAR_ONE = ("norm.weight", "norm_1.weight", "norm_2.weight", ".scale", "scale.weight")
"""Ends of the names of tensors whose random values shall be near 1."""

# Byte offsets of a block's float16 scales, and values of these scales for which random other bits
# give weights of standard deviation 1. The second scale, of the minimum, makes their mean 0.
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
    """Returns random blocks of a ggml type, uint8 [n_blocks, block_bytes]."""
    size = BLOCKS[type_name][1]
    # An odd number of blocks, so that successive rows of a matrix, cut from the pool, differ.
    n_blocks = POOL_BYTES // size | 1
    if type_name in _SCALES:
        pool = random.integers(0, 256, (n_blocks, size), dtype=np.uint8)
        for offset, factor in _SCALES[type_name].items():
            scale = np.array([factor * WEIGHT_SCALE], np.float16).view(np.uint8)
            pool[:, offset : offset + 2] = scale
        return pool
    if type_name == "mxfp4":  # MXFP4's standard deviation: 2.8 * 2 ** (exponent byte - 127)
        pool = random.integers(0, 256, (n_blocks, size), dtype=np.uint8)
        pool[:, 0] = 127 - 7
        return pool
    values = random.standard_normal(n_blocks, np.float32) * np.float32(WEIGHT_SCALE)
    if type_name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    return values.astype(type_name.replace("f", "float")).view(np.uint8).reshape(-1, size)


def rope_divisors(n: int) -> NDArray[np.float32]:
    """Returns Gemma's RoPE divisors for n pairs of dimensions; only a quarter of them rotates."""
    return np.where(np.arange(n) < n // 4, 1, 1e30).astype(np.float32)


def is_small(name: str, sizes: tuple[int, ...]) -> bool:
    """True for vectors, convolutions and routers; only larger tensors share random blocks."""
    return len(sizes) == 1 or name.endswith(("ssm_conv1d.weight", "ffn_gate_inp.weight"))


def small_values(
    name: str, sizes: tuple[int, ...], random: np.random.Generator
) -> NDArray[np.uint8]:
    """Returns a float32 tensor as bytes: norms and scales near 1, decays negative."""
    if name.endswith(NEAR_ONE):
        values = random.uniform(0.9, 1.1, sizes)
    elif name == Tensor.ROPE_FREQS:
        values = rope_divisors(sizes[0])
    elif name.endswith("ssm_a"):
        values = -random.uniform(0.5, 4.0, sizes)
    else:
        values = random.standard_normal(sizes) * 0.3
    return values.astype(np.float32).reshape(-1).view(np.uint8)


class Pools:
    """Pools of random blocks, one for each ggml type, made when the type is first needed."""

    def __init__(self, random: np.random.Generator) -> None:
        """random: generator of the blocks, and of the offsets where tensors begin in a pool."""
        self._random = random
        self._pools: dict[str, NDArray[np.uint8]] = {}

    def pieces(self, type_name: str, n_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yields blocks of n_bytes in all: views of the pool, from a random offset on."""
        if type_name not in self._pools:
            self._pools[type_name] = random_pool(type_name, self._random).reshape(-1)
        pool, size = self._pools[type_name], BLOCKS[type_name][1]
        at = int(self._random.integers(len(pool) // size)) * size
        while n_bytes > 0:
            piece = pool[at : at + n_bytes]
            yield piece
            n_bytes -= len(piece)
            at = 0
