"""Reads the values of single tensors of GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from .errors import ConvertError
from .gguf_header import GgufHeader, TensorInfo, read_parts


def find_tensor(path: Path, name: str) -> tuple[GgufHeader, TensorInfo]:
    """Returns a tensor, and the header of the file or part with it; ConvertError without one."""
    for part in read_parts(path):
        if name in part.tensors:
            return part, part.tensors[name]
    raise ConvertError(f"{path}: has no tensor {name}")


def read_tensor(path: Path, name: str) -> NDArray[np.float32]:
    """Returns a copy of a tensor of two dimensions as float32; ConvertError if it is missing."""
    part, tensor = find_tensor(path, name)
    if part.missing_bytes:
        raise ConvertError(f"{part.path}: is truncated, {part.missing_bytes} bytes are missing")
    n_rows = tensor.shape[0]
    data = np.memmap(part.path, np.uint8, "r", tensor.start, (n_rows, tensor.n_bytes // n_rows))
    return np.array(dequantize(data, tensor.type), dtype=np.float32)
