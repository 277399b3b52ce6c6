"""GptOssForCausalLM (gpt-oss-20b, gpt-oss-120b) as architecture `gpt-oss`.

Published checkpoints store experts in MXFP4 blocks, retrained ones in bfloat16, transposed.
Source: transformers, models/gpt_oss; llama.cpp, conversion/gpt_oss.py.
"""

from __future__ import annotations

import numpy as np

from .. import mxfp4
from ..checkpoint import Checkpoint, Config
from ..errors import ConvertError
from ..plan import Array, Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_attention
from .common import (
    Dims,
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
    require_silu,
    rope_parameters,
)
from .qwen3moe import add_expert_counts, expert_count

SLIDING, FULL = "sliding_attention", "full_attention"


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a gpt-oss model."""
    config, dims = checkpoint.config, _dims(checkpoint.config)
    require_silu(config)
    _require_alternating_layers(config, dims)
    result = Metadata(Arch.GPT_OSS)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config, truncates=False)
    add_expert_counts(result, config, width="intermediate_size")
    result.uint32(Key.ATTENTION_SLIDING_WINDOW, config.integer("sliding_window"))
    return result


def _dims(config: Config) -> Dims:
    dims = dims_of(config, 64)
    partial = rope_parameters(config).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ConvertError(
            f"{config.path}: partial_rotary_factor is {partial!r}, must be 1 for gpt-oss"
        )
    return dims


def _require_alternating_layers(config: Config, dims: Dims) -> None:
    """Raises ConvertError unless even layers have a window, as GGUF readers assume."""
    expected = [FULL if block % 2 else SLIDING for block in range(dims.n_layer)]
    if config.get("layer_types", expected) != expected:
        raise ConvertError(
            f"{config.path}: layer_types do not alternate from {SLIDING} to {FULL}, which gpt-oss "
            "requires"
        )


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a gpt-oss model from its checkpoint."""
    config, dims = checkpoint.config, _dims(checkpoint.config)
    n_experts = expert_count(config)
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,))
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block in range(dims.n_layer):
        prefix = f"model.layers.{block}"
        for name, source, size in (
            (Tensor.ATTN_NORM, "input_layernorm.weight", dims.n_embd),
            (Tensor.POST_ATTENTION_NORM, "post_attention_layernorm.weight", dims.n_embd),
            (Tensor.ATTN_SINKS, "self_attn.sinks", dims.n_head),
            (Tensor.FFN_GATE_INP_BIAS, "mlp.router.bias", n_experts),
        ):
            inventory.add(of_block(name, block), f"{prefix}.{source}", (size,))
        add_attention(inventory, dims, block, prefix)
        router = of_block(Tensor.FFN_GATE_INP, block)
        inventory.add(router, f"{prefix}.mlp.router.weight", (n_experts, dims.n_embd))
        _add_experts(inventory, config, dims, block, f"{prefix}.mlp.experts")
    return inventory.finish()


def _add_experts(inventory: Inventory, config: Config, dims: Dims, block: int, prefix: str) -> None:
    """Plans the expert tensors; the checkpoint alternates rows of gate and up, gate first."""
    n, n_embd, n_ff = expert_count(config), dims.n_embd, config.integer("intermediate_size")
    both, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    both_bias = inventory.view(f"{both}_bias", (n, 2 * n_ff))
    for first, weight, bias in (
        (0, Tensor.FFN_GATE_EXPS, Tensor.FFN_GATE_EXPS_BIAS),
        (1, Tensor.FFN_UP_EXPS, Tensor.FFN_UP_EXPS_BIAS),
    ):
        _add_matrix(
            inventory, of_block(weight, block), both, (n, 2 * n_ff, n_embd), slice(first, None, 2)
        )
        rows = [both_bias[:, first::2]]
        inventory.add_parts(of_block(bias, block), (n, n_ff), rows, [f"{both}_bias"])
    name = of_block(Tensor.FFN_DOWN_EXPS, block)
    _add_matrix(inventory, name, down, (n, n_embd, n_ff), slice(None))
    bias = of_block(Tensor.FFN_DOWN_EXPS_BIAS, block)
    inventory.add(bias, f"{down}_bias", (n, n_embd))


def _add_matrix(
    inventory: Inventory, name: str, source: str, shape: tuple[int, int, int], rows: slice
) -> None:
    """Plans a GGUF tensor of a slice of rows of the experts' matrices [n_experts, n_out, n_in]."""
    n, n_out, n_in = shape
    kept = len(range(n_out)[rows])
    if f"{source}_blocks" not in inventory.checkpoint:
        stored = inventory.view(source, (n, n_in, n_out))
        parts: list[Array] = [expert.T[rows] for expert in stored]
        inventory.add_parts(name, (n, kept, n_in), parts, [source])
        return
    if n_in % mxfp4.BLOCK:
        raise ConvertError(
            f"{inventory.checkpoint.directory}: {source} has rows of {n_in} values, which MXFP4's "
            f"blocks of {mxfp4.BLOCK} do not fill"
        )
    sources = (f"{source}_blocks", f"{source}_scales")
    n_blocks = n_in // mxfp4.BLOCK
    blocks = inventory.view(sources[0], (n, n_out, n_blocks, mxfp4.BLOCK // 2), packed=True)
    exponents = inventory.view(sources[1], (n, n_out, n_blocks), packed=True)
    blocks, exponents = blocks[:, rows], exponents[:, rows]
    inventory.plans.append(
        TensorPlan(
            name,
            (n, kept, n_in),
            (np.broadcast_to(np.uint8(0), (n * kept, 0)),),
            sources=sources,
            packed=mxfp4.packed_rows(name, blocks, exponents),
        )
    )
