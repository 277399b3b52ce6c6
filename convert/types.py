"""Selects the ggml type of each tensor as llama.cpp does; tensors in MXFP4 blocks keep theirs.

Source: conversion/base.py, prepare_tensors, for f32, f16, bf16 and q8_0; `llama-quantize` without
importance matrix for other types (src/llama-quant.cpp, llama_tensor_get_type_impl).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .plan import TensorPlan
from .schema import Arch, Tensor

# Values of general.file_type (llama.h, enum llama_ftype).
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "bf16": 32,
    "mxfp4_moe": 38,
}
# ggml type of most tensors by outtype, if the two names differ.
BASE_TYPES = {"q4_k_m": "q4_K", "q5_k_m": "q5_K", "q6_k": "q6_K"}

# Values and bytes of a block by ggml type. TYPE_IDS: values of enum ggml_type (ggml.h).
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q4_K": (256, 144),
    "q5_K": (256, 176),
    "q6_K": (256, 210),
    "bf16": (1, 2),
    "mxfp4": (32, 17),
    "i64": (1, 8),
}
TYPE_IDS = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q4_K": 12,
    "q5_K": 13,
    "q6_K": 14,
    "bf16": 30,
    "mxfp4": 39,
    "i64": 27,
}
_FALLBACKS = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
_ALWAYS_F32 = re.compile(r"_norm\.weight$|\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d)\.weight$")


def row_bytes(type_name: str, n_columns: int) -> int:
    """Returns the bytes of a row of values in a ggml type."""
    elements, size = BLOCKS[type_name]
    return n_columns // elements * size


def block_of(name: str) -> int:
    """Returns the block index in a tensor name, -1 for a tensor outside the blocks."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def choose_types(
    plans: Sequence[TensorPlan], outtype: str, arch: str, n_blocks: int, n_experts: int
) -> dict[str, str]:
    """Returns the ggml type of each tensor. n_blocks: includes multi-token-prediction blocks."""
    loose = [plan for plan in plans if plan.packed is None]
    stored = {plan.name: plan.packed.type for plan in plans if plan.packed is not None}
    if outtype in ("f32", "f16", "bf16", "q8_0"):
        return stored | {plan.name: _simple(plan, outtype) for plan in loose}
    return stored | _Mixture(loose, outtype, arch, n_blocks, n_experts).types


def _stays_f32(plan: TensorPlan, n_dims: int) -> bool:
    is_weight = plan.name.endswith(".weight")
    return n_dims < 2 or not is_weight or _ALWAYS_F32.search(plan.name) is not None


def _simple(plan: TensorPlan, outtype: str) -> str:
    if _stays_f32(plan, len(plan.shape)):
        return "f32"
    return outtype if plan.n_columns % BLOCKS[outtype][0] == 0 else "f16"


class _Mixture:
    """Type selection of llama-quantize, which depends on the tensors visited before."""

    def __init__(
        self, plans: Sequence[TensorPlan], outtype: str, arch: str, n_blocks: int, n_experts: int
    ) -> None:
        self.outtype = outtype
        self.base = BASE_TYPES.get(outtype, outtype)
        self.n_blocks = n_blocks
        self.n_experts = n_experts
        self.is_tied = all(plan.name != Tensor.OUTPUT for plan in plans)
        self.is_70b = arch == Arch.LLAMA and n_blocks == 80
        self.n_values = sum(_is_attention_value(plan.name) for plan in plans)
        self.i_value = 0
        self.i_down = 0
        # llama-quantize visits tensors outside blocks, then block after block, each sorted by name.
        ordered = sorted(plans, key=lambda plan: (block_of(plan.name), plan.name))
        self.types = {plan.name: self._choose(plan) for plan in ordered}

    def _choose(self, plan: TensorPlan) -> str:
        # Vectors stay float32; ggml ignores leading dimensions of 1 when it counts dimensions.
        if _stays_f32(plan, 1 + sum(size > 1 for size in plan.shape[:-1])):
            return "f32"
        if plan.name == Tensor.PER_LAYER_MODEL_PROJ:
            return "f16"
        return self._fallback(self._preferred(plan), plan.n_columns)

    def _preferred(self, plan: TensorPlan) -> str:
        name = plan.name
        tables = (Tensor.TOKEN_EMBD, Tensor.PER_LAYER_TOKEN_EMBD)
        if name == Tensor.OUTPUT or (self.is_tied and name in tables):
            return "q8_0" if plan.n_columns % BLOCKS[self.base][0] else "q6_K"
        if _is_attention_value(name):
            return self._attention_value()
        if name.endswith("attn_k.weight") and self.n_experts == 8:
            return "q8_0"
        if "ffn_down" in name:
            layer = block_of(name) if self.n_experts > 1 else self.i_down
            self.i_down += 1
            if self.outtype in ("q4_k_m", "q5_k_m") and _more_bits(layer, self.n_blocks):
                return "q6_K"
        if name.endswith("attn_output.weight") and self.n_experts == 8:
            return "q5_K" if self.outtype == "q4_k_m" else self.base
        return self.base

    def _attention_value(self) -> str:
        chosen = self.base
        if self.outtype in ("q4_k_m", "q5_k_m") and _more_bits(self.i_value, self.n_values):
            chosen = "q6_K"
        if self.is_70b and chosen == "q4_K":
            chosen = "q5_K"
        if self.n_experts == 8:
            chosen = "q8_0"
        self.i_value += 1
        return chosen

    @staticmethod
    def _fallback(chosen: str, n_columns: int) -> str:
        if n_columns % BLOCKS[chosen][0] == 0:
            return chosen
        chosen = _FALLBACKS.get(chosen, chosen)
        return chosen if n_columns % BLOCKS[chosen][0] == 0 else "f16"


def _is_attention_value(name: str) -> bool:
    return name.endswith(("attn_v.weight", "attn_qkv.weight"))


def _more_bits(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
