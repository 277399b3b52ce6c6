"""Compares a GGUF file with its checkpoint: tensors, metadata, and the error of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .arch import Options, architecture_of
from .checkpoint import Checkpoint
from .conversion import plans_of, with_shortlist
from .errors import ConvertError
from .gguf_header import ArrayValue, GgufHeader, TensorInfo, read_parts
from .inspect import completeness, table
from .layout import gpt_oss_experts, layout_of, qwen3next_heads
from .plan import Metadata, TensorPlan, to_float32
from .schema import Arch, Key, Tensor
from .tokenizer import END_KEYS

CHUNK_ELEMENTS = 1 << 22

# Largest relative RMS error of a tensor by ggml type: 1.4 to 2.4 times the largest measured one,
# almost 0 for exact types. A lost or doubled transform causes 0.5 and more.
LIMITS = {
    "F32": 1e-6,
    "F16": 5e-4,
    "BF16": 3e-3,
    "Q8_0": 0.01,
    "Q6_K": 0.04,
    "Q5_K": 0.08,
    "Q5_1": 0.08,
    "Q5_0": 0.08,
    "Q4_K": 0.15,
    "Q4_1": 0.15,
    "Q4_0": 0.15,
    "MXFP4": 1e-6,
}


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """Comparison of a tensor: its relative RMS error, and the limit for its type."""

    name: str
    type: str
    shape: tuple[int, ...]
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """True if the error is within its limit; false for NaN."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a comparison. `problems` holds a sentence for each difference."""

    file: Path
    tensors: tuple[TensorCheck, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        rows = [
            (t.name, t.type, f"{t.error:.2e}", f"{t.limit:.2e}", "ok" if t.ok else "WRONG")
            for t in self.tensors
        ]
        lines = [table(("tensor", "type", "relative error", "limit", ""), rows), ""]
        lines += [f"problem: {problem}" for problem in self.problems]
        state = "matches the checkpoint" if self.ok else f"{len(self.problems)} problems"
        return "\n".join([*lines, f"{self.file}: {len(self.tensors)} tensors compared, {state}"])


def check(model_dir: Path, gguf_file: Path, target_model_dir: Path | None = None) -> Report:
    """Compares a GGUF file with its checkpoint. MTP layers count only if the GGUF file has any."""
    parts = read_parts(gguf_file)
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    header = replace(parts[0], tensors=tensors)
    checkpoint = Checkpoint(model_dir)
    architecture = architecture_of(checkpoint)
    arch = _value(header, Key.GENERAL_ARCHITECTURE)
    mtp = bool(_value(header, Key.NEXTN_PREDICT_LAYERS.replace("{arch}", str(arch))))
    scaled = _value(header, Key.EMBEDDING_SCALE.replace("{arch}", str(arch))) is not None
    only_mtp = mtp and Tensor.ATTN_NORM.format(bid=0) not in tensors
    options = Options(target_model_dir, mtp, only_mtp, scaled)
    expected = architecture.metadata(checkpoint, options)
    if arch != expected.arch:
        raise ConvertError(
            f"{gguf_file}: architecture is {arch!r}, {model_dir} needs {expected.arch!r}"
        )
    for part in parts:
        if part.missing_bytes:
            raise ConvertError(f"{part.path}: {completeness(part)}")
    problems: list[str] = []
    expected_plans = plans_of(checkpoint, options)
    listed = tensors.get(Tensor.D2T)
    if mtp and listed is not None and listed.type.name == "I64":
        path = next(part.path for part in parts if Tensor.D2T in part.tensors)
        tokens = np.memmap(path, np.dtype("<i8"), "r", listed.start, listed.shape)
        n_vocab = checkpoint.config.integer("vocab_size")
        if not (tokens.size and 0 <= tokens.min() <= tokens.max() < n_vocab):
            raise ConvertError(f"{gguf_file}: d2t does not list tokens 0 to {n_vocab - 1}")
        expected_plans = with_shortlist(expected_plans, tokens, has_trunk=not only_mtp)
        lacking = {_value(header, key) for key in END_KEYS} - {None, *tokens.ravel().tolist()}
        problems = [f"{Tensor.D2T}: lacks the end token {token}" for token in sorted(lacking)]
    plans = {plan.name: plan for plan in expected_plans}
    problems += [*_metadata_problems(header, expected), *_inventory_problems(header, plans)]
    checks = []
    for part in parts:
        data = np.memmap(part.path, np.uint8, "r")
        for tensor in part.tensors.values():
            plan = plans.get(tensor.name)
            if plan is not None and plan.shape == tensor.shape:
                checks.append(_check_tensor(tensor, plan, data, checkpoint, expected.arch))
                checkpoint.release()
    for result in checks:
        if not result.ok:
            problems.append(
                f"{result.name}: relative error {result.error:.3g} exceeds "
                f"{result.limit:g}, the limit for {result.type}"
            )
    return Report(gguf_file, tuple(checks), tuple(problems))


def _value(header: GgufHeader, key: str) -> Any:
    found = header.metadata.get(key)
    return None if found is None else found.value


def _metadata_problems(header: GgufHeader, expected: Metadata) -> Iterator[str]:
    for key, (kind, value) in expected.values.items():
        found = _value(header, key)
        if found is None:
            if value != _default(key, expected):
                yield f"{key}: is missing, the checkpoint gives {value}"
        elif kind == "array":
            if not isinstance(found, ArrayValue) or list(found.head) != value:
                shown = list(found.head) if isinstance(found, ArrayValue) else found
                yield f"{key}: is {shown}, the checkpoint gives {value}"
        elif found != (float(np.float32(value)) if kind == "float32" else value):
            yield f"{key}: is {found}, the checkpoint gives {value}"


def _default(key: str, expected: Metadata) -> Any:
    """Returns the head size that readers assume if an old file lacks its key; else None."""
    if not key.endswith((".attention.key_length", ".attention.value_length")):
        return None
    sizes = (Key.EMBEDDING_LENGTH, Key.ATTENTION_HEAD_COUNT)
    n_embd, n_head = (expected.values[name.replace("{arch}", expected.arch)][1] for name in sizes)
    return n_embd // n_head


def _inventory_problems(header: GgufHeader, plans: dict[str, TensorPlan]) -> Iterator[str]:
    for name, plan in plans.items():
        if name not in header.tensors:
            yield f"{name}: is missing"
        elif header.tensors[name].shape != plan.shape:
            yield (
                f"{name}: has shape {list(header.tensors[name].shape)}, "
                f"the checkpoint gives {list(plan.shape)}"
            )
    for name in header.tensors:
        if name not in plans:
            yield f"{name}: is in the file, but the checkpoint gives no such tensor"


def _check_tensor(
    tensor: TensorInfo,
    plan: TensorPlan,
    data: NDArray[np.uint8],
    checkpoint: Checkpoint,
    arch: str,
) -> TensorCheck:
    n_rows = math.prod(tensor.shape[:-1])
    raw = data[tensor.start : tensor.start + tensor.n_bytes].reshape(n_rows, -1)
    if tensor.type.name == "I64":
        error = 1.0 - np.array_equal(raw.view("<i8"), plan.parts[0])
        return TensorCheck(tensor.name, tensor.type.name, tensor.shape, error, 0.0)
    limit = LIMITS.get(tensor.type.name)
    if limit is None:
        raise ConvertError(f"{tensor.name}: type {tensor.type.name} cannot be checked")
    layout = layout_of(tensor.name, arch, checkpoint.config)
    squares = np.zeros(2)  # sums of squares of (file - checkpoint) and of checkpoint values
    first = 0
    for source in _sources(plan, checkpoint, arch):
        step = max(1, CHUNK_ELEMENTS // source.shape[1])
        for start in range(0, len(source), step):
            wanted = to_float32(source[start : start + step])
            wanted = wanted if layout.value is None else layout.value(wanted)
            rows = slice(first + start, first + start + len(wanted))
            found = _dequantise(raw[rows if layout.rows is None else layout.rows[rows]], tensor)
            found = found if layout.columns is None else found[:, layout.columns]
            squares += _squares(found, wanted)
        first += len(source)
    return TensorCheck(tensor.name, tensor.type.name, tensor.shape, _ratio(*squares), limit)


def _sources(plan: TensorPlan, checkpoint: Checkpoint, arch: str) -> Iterator[NDArray[Any]]:
    """Yields the values of a GGUF tensor in checkpoint order, as consecutive 2-D views."""
    n_columns = plan.n_columns
    if arch == Arch.GPT_OSS and "_exps." in plan.name:
        yield from gpt_oss_experts(plan.name, plan.sources, checkpoint)
        return
    for source in plan.sources:
        if source.endswith(".in_proj_qkvz.weight"):
            yield from qwen3next_heads(plan.name, source, checkpoint)
            continue
        view = checkpoint.view(source)
        if source.endswith(".gate_up_proj") and "gate_up" not in plan.name:
            half = view.shape[1] // 2
            for expert in view:
                yield expert[:half] if "gate" in plan.name else expert[half:]
        else:
            rows = view.reshape(-1, n_columns)
            yield rows if plan.name != Tensor.OUTPUT or plan.rows is None else rows[plan.rows]
    if not plan.sources:
        yield from plan.parts


def _dequantise(raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType(tensor.type))
    return values


def _squares(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float64]:
    difference = np.subtract(found, wanted, dtype=np.float64).ravel()
    flat = wanted.ravel().astype(np.float64)
    return np.array([difference @ difference, flat @ flat])


def _ratio(difference: float, wanted: float) -> float:
    if wanted == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / wanted)
