"""Random models of every architecture and weight type, written in milliseconds.

Sizes are odd where a type allows it: widths that no vector divides, heads of 40. Values keep
activations near 1, which random blocks would not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.schema import Arch, Key, Tensor
from numpy.typing import NDArray
from synthetic_shapes import HAVE_SECTIONS, Mixture, Shape, Sliding, metadata, tensors
from synthetic_vocabulary import copied_vocabulary, invented_vocabulary
from synthetic_weights import NEAR_ONE, rope_divisors

from dflash_gguf.native import quantize

N_VOCAB = 301
_SHARED = {"n_vocab": N_VOCAB, "n_ctx": 40960, "rope_base": 1e4, "eps": 1e-5, "tied": False}
_SLIDING, _GEMMA = Sliding(40, 3, 2, 64, 5e3), {"n_layer": 3}
_HYBRID = {"n_layer": 3, "attention_interval": 2, "rope_dims": 16}


def _shape(arch: str, heads: tuple[int, int, int], **more: Any) -> Shape:
    """Returns a shape; heads: number of query heads, of K/V heads, and head size."""
    n_head, n_head_kv, head_dim = heads
    sizes = {"n_layer": 2, "n_embd": 0, "n_ff": 0, "rope_dims": head_dim, **_SHARED, **more}
    return Shape(arch=arch, n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim, **sizes)


# Attention and recurrence are 256 wide, so that their products exist in every type.
SHAPES = {
    "llama": _shape(Arch.LLAMA, (4, 2, 64)),
    "llama, heads of 40": _shape(Arch.LLAMA, (6, 3, 40)),
    "qwen2": _shape(Arch.QWEN2, (4, 2, 64), biased=True),
    "qwen3": _shape(Arch.QWEN3, (2, 1, 128)),
    "qwen3moe": _shape(Arch.QWEN3MOE, (8, 2, 32), experts=Mixture(6, 2, 0)),
    "qwen35": _shape(Arch.QWEN35, (4, 1, 64), n_k_heads=2, n_v_heads=8, d_state=32, **_HYBRID),
    "qwen35moe": _shape(
        Arch.QWEN35MOE,
        (8, 4, 32),
        n_k_heads=4,
        n_v_heads=16,
        d_state=16,
        experts=Mixture(5, 3, 0, 1),
        **_HYBRID,
    ),
    "qwen3next": _shape(
        Arch.QWEN3NEXT,
        (8, 4, 32),
        n_k_heads=4,
        n_v_heads=16,
        d_state=16,
        experts=Mixture(5, 3, 0, 1),
        **_HYBRID,
    ),
    "gpt-oss": _shape(
        Arch.GPT_OSS,
        (4, 2, 64),
        experts=Mixture(6, 4, 0),
        sliding=Sliding(40, 2),
        biased=True,
        yarn=(8.0, 512),
    ),
    "gemma3": _shape(Arch.GEMMA3, (4, 2, 64), sliding=Sliding(40, 3, rope_base=5e3), **_GEMMA),
    "gemma4": _shape(Arch.GEMMA4, (4, 1, 128), sliding=_SLIDING, **_GEMMA),
    "gemma4moe": _shape(
        Arch.GEMMA4, (4, 1, 128), sliding=_SLIDING, experts=Mixture(5, 3, 0), **_GEMMA
    ),
    "gemma4e": _shape(
        Arch.GEMMA4,
        (4, 2, 128),
        n_layer=4,
        sliding=Sliding(40, 2, 2, 64, 5e3),
        n_per_layer=1,
        n_shared=2,
        wide=True,
    ),
}
ONE_HEAD = {
    "llama, one head": _shape(Arch.LLAMA, (1, 1, 32), n_layer=1),
    "qwen35, one head": _shape(
        Arch.QWEN35, (1, 1, 32), n_k_heads=2, n_v_heads=8, d_state=32, **_HYBRID | {"n_layer": 2}
    ),
}
"""Shapes for long contexts, where more heads would take minutes."""
UNEVEN = {
    "qwen35, heads of 40": _shape(
        Arch.QWEN35, (4, 2, 40), n_k_heads=2, n_v_heads=8, d_state=12, **_HYBRID
    )
}
"""Shapes with head and state sizes that no vector divides."""
WIDTHS = {1: (100, 171), 32: (96, 160), 256: (256, 512)}
"""Widths of the residual stream and of the FFN, by number of elements in a block."""
WIDE_TYPE = "q4_K"
"""A type with the widest blocks."""

WEIGHT_TYPES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K")
WEIGHT_TYPES += ("q4_K", "q5_K", "q6_K", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
WEIGHT_TYPES += ("iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4")
NEED_IMPORTANCES = ("iq1_s", "iq2_xxs", "iq2_xs")
"""Types without quantisation unless there is an importance matrix: blocks are random bits."""
SLOW = ("iq1_m", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs")
"""Types that are slow to quantise: blocks are drawn from a small pool."""
_N_POOL = 64


def _type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_of(type_name: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[_type(type_name)][0])


def sized(kind: str, type_name: str) -> Shape:
    """Returns the shape of a kind with widths that fit a weight type."""
    shape = (SHAPES | ONE_HEAD | UNEVEN)[kind]
    n_embd, n_ff = WIDTHS[block_of(type_name)]
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, n_ff=n_ff // 2, n_ff_shared=experts.n_ff_shared and n_ff // 2)
        if experts.n_ff % block_of(type_name):
            experts = replace(experts, n_ff=n_embd, n_ff_shared=experts.n_ff_shared and n_embd)
    n_per_layer = shape.n_per_layer and max(block_of(type_name), 20)
    return replace(shape, n_embd=n_embd, n_ff=n_ff, experts=experts, n_per_layer=n_per_layer)


def _values(
    name: str, sizes: tuple[int, ...], random: np.random.Generator, decay_bias: float
) -> NDArray[np.float32]:
    noise = random.standard_normal(sizes, np.float32)
    if name == Tensor.ROPE_FREQS:
        return rope_divisors(sizes[0])
    if name.endswith(NEAR_ONE):
        return 1 + np.float32(0.2) * noise
    if name.endswith("ssm_a"):
        return -np.exp(np.float32(0.5) * noise)
    if len(sizes) == 1:
        bias = decay_bias if name.endswith("ssm_dt.bias") else 0.0
        return np.float32(bias) + np.float32(0.2) * noise
    if name.startswith("token_embd"):
        return np.float32(0.5) * noise
    return noise / np.float32(math.sqrt(sizes[-1]))


def _drawn(type_name: str, n_rows: int, n_columns: int, random: np.random.Generator) -> Any:
    """Returns random blocks with scales that give a matrix's usual values."""
    n_elements, n_bytes = gguf.GGML_QUANT_SIZES[_type(type_name)]
    blocks = random.integers(0, 256, (n_rows * n_columns // n_elements, n_bytes), dtype=np.uint8)
    for scale in (1.0, None):  # the first pass measures the size of values
        if scale is None:
            found = gguf.dequantize(blocks.reshape(n_rows, -1), _type(type_name))
            scale = 1 / (found.std() * math.sqrt(n_columns))
        blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(n_rows, -1)


@cache
def _pool(type_name: str) -> NDArray[np.uint8]:
    """Returns blocks with values between those of the narrowest and the widest matrix."""
    values = np.random.default_rng(1).standard_normal((_N_POOL, block_of(type_name)), np.float32)
    return quantize(values / np.float32(math.sqrt(WIDTHS[block_of(type_name)][1])), type_name)


def _stored(
    name: str, values: NDArray[np.float32], type_name: str, random: np.random.Generator
) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    """Returns a tensor's stored data and type: quantised if its rows are whole blocks."""
    loose = ("conv1d", "gate_inp", ".bias")
    is_matrix = values.ndim >= 2 and not any(part in name for part in loose)
    n_columns = values.shape[-1]
    if not is_matrix or type_name == "f32" or n_columns % block_of(type_name):
        return values, _type("f32")
    rows = np.ascontiguousarray(values).reshape(-1, n_columns)
    if type_name in NEED_IMPORTANCES:
        data = _drawn(type_name, len(rows), n_columns, random)
    elif type_name in SLOW:
        data = _pool(type_name)[random.integers(_N_POOL, size=values.size // block_of(type_name))]
    else:
        data = quantize(rows, type_name)
    return data.reshape(*values.shape[:-1], -1), _type(type_name)


def _add(writer: gguf.GGUFWriter, meta: Metadata) -> None:
    add: dict[str, Any] = {
        "uint32": writer.add_uint32,
        "float32": writer.add_float32,
        "bool": writer.add_bool,
        "string": writer.add_string,
        "array": writer.add_array,
    }
    for key, (kind, value) in meta.values.items():
        if key != Key.GENERAL_ARCHITECTURE:
            add[kind](key, value)


def write_small(
    path: Path,
    kind: str,
    type_name: str,
    *,
    is_wide: bool = False,
    decay_bias: float = 0.0,
) -> Path:
    """Writes a model of SHAPES, ONE_HEAD or UNEVEN with matrices of type_name.

    is_wide: rows of 256, whole blocks of every type. decay_bias: far below 0 for recurrent states
    that decay slowly.
    """
    shape = sized(kind, WIDE_TYPE if is_wide else type_name)
    meta = metadata(shape, kind, "f32")
    if shape.arch in HAVE_SECTIONS:
        meta.array(Key.ROPE_DIMENSION_SECTIONS, [3, 3, 2, 0])
    invented_vocabulary(meta, shape.n_vocab)
    return _write(path, shape, meta, type_name, decay_bias)


def write_small_drafter(
    path: Path, kind: str, type_name: str, target: Path, target_type: str
) -> Path:
    """Writes a random drafter for a model of write_small(), with the widths of target_type."""
    of = sized(kind, target_type)
    shape = Shape(
        **_SHARED | {"tied": True, "arch": Arch.DFLASH, "n_layer": 2},
        n_embd=of.n_embd,
        n_ff=WIDTHS[block_of(type_name)][1],
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        rope_dims=64,
        taps=(0, 1),
        multi_rope=of.arch in HAVE_SECTIONS,
    )
    meta = metadata(shape, f"drafter of {kind}", "f32")
    copied_vocabulary(meta, target)
    return _write(path, shape, meta, type_name)


def retyped(source: Path, path: Path, type_name: str) -> Path:
    """Copies a GGUF file with matrices in another type, if their rows are whole blocks of it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields[Key.GENERAL_ARCHITECTURE].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != Key.GENERAL_ARCHITECTURE:
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    random = np.random.default_rng(0)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        data, kind_of_data = _stored(tensor.name, values, type_name, random)
        writer.add_tensor(tensor.name, data, raw_dtype=kind_of_data)
    return _finished(writer, path)


def _write(
    path: Path,
    shape: Shape,
    meta: Metadata,
    type_name: str,
    decay_bias: float = 0.0,
) -> Path:
    writer = gguf.GGUFWriter(path, shape.arch)
    _add(writer, meta)
    random = np.random.default_rng(0)
    for name, sizes in tensors(shape):
        values = _values(name, sizes, random, decay_bias)
        data, kind_of_data = _stored(name, values, type_name, random)
        writer.add_tensor(name, data, raw_dtype=kind_of_data)
    return _finished(writer, path)


def _finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
