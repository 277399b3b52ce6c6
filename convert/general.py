"""Metadata keys `general.*`: name, size label, licence and others, as llama.cpp writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import gguf

from .checkpoint import read_object
from .errors import ConvertError
from .plan import Metadata, TensorPlan
from .schema import Key

QUANTIZATION_VERSION = 2  # version of quantised formats, GGML_QNT_VERSION in ggml.h

_KINDS = {
    gguf.GGUFValueType.UINT32: "uint32",
    gguf.GGUFValueType.INT32: "int32",
    gguf.GGUFValueType.FLOAT32: "float32",
    gguf.GGUFValueType.BOOL: "bool",
    gguf.GGUFValueType.STRING: "string",
    gguf.GGUFValueType.ARRAY: "array",
}


def general_metadata(
    directory: Path, arch: str, plans: Sequence[TensorPlan], file_type: int
) -> Metadata:
    """Returns the `general.*` keys; the `gguf` package reads most of them from the model folder."""
    total, shared, expert, n_experts = _parameters(plans)
    generation = read_object(directory / "generation_config.json")
    try:
        found = gguf.Metadata.load(None, directory, None, total)
    except Exception as error:  # gguf raises various exceptions for a malformed model card
        why = " ".join(str(error).split())
        raise ConvertError(f"{directory}: its model card cannot be read: {why}") from error
    found.name = found.name or directory.resolve().name
    found.size_label = found.size_label or gguf.size_label(total, shared, expert, n_experts)
    if found.sampling_penalty_repeat is None:
        found.sampling_penalty_repeat = generation.get("repetition_penalty")
    collector = gguf.GGUFWriter(None, arch)
    found.set_gguf_meta_model(collector)
    result = Metadata(arch)
    result.string(Key.GENERAL_ARCHITECTURE, arch)
    result.string(Key.GENERAL_TYPE, "model")
    for key, value in collector.kv_data[0].items():
        if value.value is not None:
            result.values[key] = (_KINDS[value.type], value.value)
    result.uint32(Key.GENERAL_FILE_TYPE, file_type)
    result.uint32(Key.GENERAL_QUANTIZATION_VERSION, QUANTIZATION_VERSION)
    return result


def _parameters(plans: Sequence[TensorPlan]) -> tuple[int, int, int, int]:
    """Returns the numbers of all weights, non-expert weights, weights per expert, experts."""
    total = shared = expert = n_experts = 0
    for plan in plans:
        size = math.prod(plan.shape)
        total += size
        if "_exps." in plan.name and len(plan.shape) >= 3:  # expert biases count as non-expert
            n_experts = plan.shape[0]
            expert += size // n_experts
        else:
            shared += size
    return total, shared, expert, n_experts
