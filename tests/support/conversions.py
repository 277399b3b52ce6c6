"""Helpers of converter tests: planned values, checkpoint values, edited folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_gguf.convert.arch import Options, qwen35
from dflash_gguf.convert.checkpoint import Checkpoint
from dflash_gguf.convert.conversion import Conversion, prepare
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Arrays = dict[str, NDArray[np.float32]]


def planned(conversion: Conversion) -> Arrays:
    """Returns the values that the converter would write, in row-major shapes."""
    return {p.name: p.read(0, p.n_rows).reshape(p.shape) for p in conversion.plans}


def stored(directory: Path) -> Arrays:
    """Returns all tensors of a checkpoint, with names without the multimodal prefix."""
    found: Arrays = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            found[name.replace("language_model.", "")] = tensor.float().numpy()
    return found


def converted(directory: Path, pre: str, **options: Any) -> tuple[Conversion, Arrays, Arrays]:
    conversion = prepare(directory, "f32", Options(**options), pre)
    return conversion, planned(conversion), stored(directory)


def metadata(conversion: Conversion) -> dict[str, Any]:
    arch = conversion.metadata.arch
    values = conversion.metadata.values.items()
    return {key.removeprefix(f"{arch}."): value for key, (_, value) in values}


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {k: v for k, v in changes.items() if v is not None}
    save_file({k: v for k, v in tensors.items() if k not in changes or v is changes[k]}, path)


def metadata_only(directory: Path) -> Conversion:
    checkpoint = Checkpoint(directory)
    found = qwen35.metadata(checkpoint, Options())
    return Conversion(checkpoint, "f32", found, [], {})
