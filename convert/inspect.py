"""Describes a GGUF file as text: metadata, tensors, sizes, and whether the data is complete."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .errors import ConvertError
from .gguf_header import ArrayValue, GgufHeader, MetadataValue, read_parts
from .schema import DRAFTERS, Arch, Key, Tensor

_MAX_VALUE_CHARS = 80
_MAX_ITEMS = 8


def inspect(path: Path) -> str:
    """Returns a description of a GGUF file; part 1 of a split model stands for all parts."""
    headers = read_parts(path)
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    whole = replace(headers[0], tensors=tensors)
    parts = [*map(_summary, headers), "", _metadata_table(whole), "", _tensor_table(whole), ""]
    return "\n".join([*parts, _type_totals(whole), *map(completeness, headers)])


def expect(path: Path, variant: str) -> None:
    """Raises ConvertError unless a file is a complete target of a variant, base or instruct."""
    from dflash_gguf.text.variants import variant_of

    headers = read_parts(path)
    found = headers[0].metadata.get(Key.GENERAL_ARCHITECTURE)
    architecture = None if found is None else found.value
    if architecture in (*DRAFTERS, Arch.CLIP) or architecture not in vars(Arch).values():
        raise ConvertError(f"{path}: is not a model, its architecture is {architecture!r}")
    if not any(Tensor.TOKEN_EMBD in header.tensors for header in headers):
        raise ConvertError(f"{path}: has no weights, only metadata")
    for header in headers:
        if header.missing_bytes:
            raise ConvertError(f"{header.path}: {completeness(header)}")
    evidence = variant_of(path)
    if evidence.variant != variant:
        raise ConvertError(
            f"{path}: is a model of the variant {evidence.variant} ({evidence.reason}), "
            f"--expect is {variant}"
        )


def completeness(header: GgufHeader) -> str:
    """Returns a line on the tensor data: complete, or how many tensors are cut off."""
    if not header.missing_bytes:
        return f"tensor data: complete ({max(0, header.file_bytes - header.data_start):,} bytes)"
    cut = [t.name for t in header.tensors.values() if t.start + t.n_bytes > header.file_bytes]
    return (
        f"tensor data: TRUNCATED, the file has {header.file_bytes:,} of {header.needed_bytes:,} "
        f"bytes, {len(cut)} of {len(header.tensors)} tensors are cut off, from {cut[0]}"
    )


def _summary(header: GgufHeader) -> str:
    n_weights = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return (
        f"{header.path}: GGUF version {header.version}, {header.file_bytes:,} bytes, "
        f"{len(header.metadata)} metadata entries, {len(header.tensors)} tensors, "
        f"{n_weights:,} weights"
    )


def _metadata_table(header: GgufHeader) -> str:
    rows = [(key, _type(value), _show(value.value)) for key, value in header.metadata.items()]
    return table(("metadata", "type", "value"), rows)


def _type(value: MetadataValue) -> str:
    if isinstance(value.value, ArrayValue):
        return f"{value.type}[{value.value.count}]"
    return value.type


def _show(value: object) -> str:
    if isinstance(value, ArrayValue):
        more = ", ..." if value.count > _MAX_ITEMS else ""
        return _shorten("[" + ", ".join(map(_show, value.head[:_MAX_ITEMS])) + more + "]")
    if isinstance(value, str):
        return _shorten(repr(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _tensor_table(header: GgufHeader) -> str:
    rows = [
        (tensor.name, " x ".join(map(str, tensor.shape)), tensor.type.name, f"{tensor.n_bytes:,}")
        for tensor in header.tensors.values()
    ]
    return table(("tensor", "shape (rows x columns)", "type", "bytes"), rows)


def _type_totals(header: GgufHeader) -> str:
    n_bytes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        n_bytes[tensor.type.name] += tensor.n_bytes
    totals = ", ".join(f"{name} {size:,}" for name, size in n_bytes.most_common())
    return f"bytes by type: {totals or 'none'}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table of left-aligned columns under a heading."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = (
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in [head, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)
