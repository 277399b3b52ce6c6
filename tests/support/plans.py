"""Planned tensors of given values, and their rows as the converter writes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from dflash_gguf.convert import quantize
from dflash_gguf.convert.plan import TensorPlan
from numpy.typing import NDArray


def plan(name: str, values: Any, **options: Any) -> TensorPlan:
    array = np.asarray(values)
    return TensorPlan(name, array.shape, (array.reshape(-1, array.shape[-1]),), **options)


def encoded(values: Any, type_name: str, **options: Any) -> NDArray[Any]:
    with ThreadPoolExecutor(1) as pool:
        chunks = list(quantize.encode(plan("t", values, **options), type_name, pool))
    return np.concatenate(chunks)
