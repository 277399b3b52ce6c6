"""Small GGUF files for tests of the core: converted from random checkpoints, then edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import PRE_OF_KIND, make_target
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.schema import SPLIT_ENDING, Key
from dflash_gguf.convert.write import write_gguf
from model_cache import cached
from numpy.typing import NDArray

_STRUCTURE = ("GGUF.", "general.architecture")


def convert(directory: Path, path: Path, outtype: str = "f32", pre: str | None = None) -> Path:
    plan = prepare(directory, outtype, pre=pre)
    write_gguf(path, plan.metadata, plan.plans, plan.types)
    return path


def make_gguf(folder: Path, kind: str, *, outtype: str = "f32", **settings: Any) -> Path:
    """Makes a random target as folder/model.gguf, with its checkpoint in folder/checkpoint."""
    return _make_gguf(folder, kind, outtype, **settings) / "model.gguf"


@cached
def _make_gguf(folder: Path, kind: str, outtype: str, **settings: Any) -> None:
    directory = make_target(folder / "checkpoint", kind, seed=7, **settings)
    convert(directory, folder / "model.gguf", outtype, PRE_OF_KIND[kind])


@dataclass
class Parts:
    """Contents of a GGUF file.

    metadata: key -> (gguf.GGUFValueType, value, element type of an array).
    tensors: name -> (row-major array, ggml type); quantised data as bytes.
    """

    architecture: str
    metadata: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[NDArray[Any], gguf.GGMLQuantizationType]] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> None:
        kind, _, element = self.metadata[key]
        self.metadata[key] = (kind, value, element)

    def f32(self, name: str, values: NDArray[np.float32]) -> None:
        self.tensors[name] = (values.astype(np.float32), gguf.GGMLQuantizationType.F32)


def read_parts(path: Path) -> Parts:
    reader = gguf.GGUFReader(path)
    parts = Parts(str(reader.fields["general.architecture"].contents()))
    for name, value in reader.fields.items():
        if not name.startswith(_STRUCTURE):
            element = value.types[1] if len(value.types) > 1 else None
            parts.metadata[name] = (value.types[0], value.contents(), element)
    for tensor in reader.tensors:
        parts.tensors[tensor.name] = (np.array(tensor.data), tensor.tensor_type)
    return parts


def write_parts(path: Path, parts: Parts) -> Path:
    writer = gguf.GGUFWriter(path, parts.architecture)
    for key, (kind, value, element) in parts.metadata.items():
        writer.add_key_value(key, value, kind, element)
    for name, (data, kind) in parts.tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edited(source: Path, path: Path, edit: Callable[[Parts], object]) -> Path:
    parts = read_parts(source)
    edit(parts)
    return write_parts(path, parts)


def spoil(name: str, value: float, rows: Any = slice(None)) -> Callable[[Parts], None]:
    """Returns an edit that sets rows of a tensor to a value."""

    def edit(parts: Parts) -> None:
        values = np.array(parts.tensors[name][0])
        values[rows] = value
        parts.f32(name, values)

    return edit


def split_names(prefix: Path, n: int) -> list[Path]:
    return [prefix.with_name(prefix.name + SPLIT_ENDING % (i + 1, n)) for i in range(n)]


def write_split(source: Path, prefix: Path, sizes: Sequence[int]) -> Path:
    """Splits a GGUF file as llama-gguf-split does, with all metadata in part 1; returns part 1.

    sizes: number of tensors in each part; the last part gets all remaining tensors.
    """
    parts = read_parts(source)
    names = list(parts.tensors)
    total = len(names)
    paths = split_names(prefix, len(sizes))
    for index, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        last = index == len(sizes) - 1
        taken, names = (names, []) if last else (names[:size], names[size:])
        writer = gguf.GGUFWriter(path, parts.architecture)
        if index > 0:
            writer.kv_data[0].clear()
        for key, (kind, value, element) in parts.metadata.items() if index == 0 else ():
            writer.add_key_value(key, value, kind, element)
        writer.add_uint16(Key.SPLIT_NO, index)
        writer.add_uint16(Key.SPLIT_COUNT, len(sizes))
        writer.add_int32(Key.SPLIT_TENSORS_COUNT, total)
        for name in taken:
            data, tensor_kind = parts.tensors[name]
            writer.add_tensor(name, data, raw_dtype=tensor_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]
