"""Repacks MXFP4 blocks of a Hugging Face checkpoint as ggml's, without loss.

A block has 32 values: a shared exponent byte (E8M0) and 32 codes of 4 bits (E2M1). Byte i holds
values 2i (low half) and 2i + 1 in a checkpoint, but values i and i + 16 in ggml.
Source: transformers, integrations/mxfp4.py; ggml-common.h, block_mxfp4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import ConvertError
from .plan import Packed

TYPE = "mxfp4"
BLOCK = 32
"""Number of values in an MXFP4 block."""
NOT_A_NUMBER = 255
"""Exponent byte that stands for NaN."""


def repack(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns ggml's rows [..., n * 17] of codes [..., n, 16] and exponents [..., n]."""
    halves = np.stack((blocks & 15, blocks >> 4), axis=-1)  # codes in each byte, low one first
    codes = halves.reshape(*blocks.shape[:-1], BLOCK)
    packed = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    return np.concatenate((exponents[..., None], packed), axis=-1).reshape(*blocks.shape[:-2], -1)


def packed_rows(name: str, blocks: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> Packed:
    """Repacks codes [experts, rows, n, 16] and exponents [experts, rows, n] when rows are read."""
    n_rows = blocks.shape[1]

    def rows(start: int, stop: int) -> NDArray[np.uint8]:
        pieces = []
        while start < stop:
            expert, first = divmod(start, n_rows)
            end = min(n_rows, first + stop - start)
            part = exponents[expert, first:end]
            if (part == NOT_A_NUMBER).any():
                raise ConvertError(f"{name}: holds NaN blocks; the checkpoint is damaged")
            pieces.append(repack(blocks[expert, first:end], part))
            start += end - first
        return np.concatenate(pieces)

    return Packed(TYPE, rows)
