"""Qwen3MoeForCausalLM as architecture `qwen3moe`."""

from __future__ import annotations

from ..checkpoint import Checkpoint, Config
from ..errors import ConvertError
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_experts
from .common import (
    Inventory,
    Options,
    add_rope,
    add_transformer,
    dims_of,
    of_block,
    refuse_sliding_window,
    require_silu,
)
from .qwen3 import add_attention_and_norms


def metadata(checkpoint: Checkpoint, _options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen3 mixture-of-experts model."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    require_silu(config)
    refuse_sliding_window(config)
    require_uniform_experts(config)
    result = Metadata(Arch.QWEN3MOE)
    add_transformer(result, config, dims, dims.n_layer)
    add_rope(result, config)
    add_expert_counts(result, config)
    return result


def expert_count(config: Config) -> int:
    """Returns the number of routed experts, from the newer or the older config key."""
    name = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return config.integer(name)


def add_expert_counts(
    metadata: Metadata,
    config: Config,
    *,
    used: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
) -> None:
    """Adds metadata of experts: count, used per token, width. used, width: config.json keys."""
    count, n_used = expert_count(config), config.integer(used)
    if n_used > count:
        raise ConvertError(f"{config.path}: {n_used} experts per token, but there are only {count}")
    metadata.uint32(Key.EXPERT_COUNT, count)
    metadata.uint32(Key.EXPERT_USED_COUNT, n_used)
    metadata.uint32(Key.EXPERT_FEED_FORWARD_LENGTH, config.integer(width))


def require_uniform_experts(config: Config) -> None:
    """Raises ConvertError for dense layers or unnormalised router weights: GGUF lacks keys."""
    if config.get("norm_topk_prob", False) is not True:
        raise ConvertError(
            f"{config.path}: norm_topk_prob is not true, which {config.architecture} requires in "
            "GGUF"
        )
    if config.get("mlp_only_layers", []) or config.integer("decoder_sparse_step", 1) != 1:
        raise ConvertError(
            f"{config.path}: mlp_only_layers or decoder_sparse_step ask for dense layers, "
            f"which {config.architecture} does not have in GGUF"
        )


def tensors(checkpoint: Checkpoint, _options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Qwen3 model with experts from its checkpoint."""
    config, dims = checkpoint.config, dims_of(checkpoint.config)
    n_experts, n_ff = expert_count(config), config.integer("moe_intermediate_size")
    inventory = Inventory(checkpoint)
    inventory.add(Tensor.TOKEN_EMBD, "model.embed_tokens.weight", (dims.n_vocab, dims.n_embd))
    inventory.add(Tensor.OUTPUT_NORM, "model.norm.weight", (dims.n_embd,))
    inventory.add_head(dims.n_embd, dims.n_vocab, config)
    for block in range(dims.n_layer):
        add_attention_and_norms(inventory, dims, block)
        mlp = f"model.layers.{block}.mlp"
        router = of_block(Tensor.FFN_GATE_INP, block)
        inventory.add(router, f"{mlp}.gate.weight", (n_experts, dims.n_embd))
        add_experts(inventory, dims.n_embd, n_ff, n_experts, block, f"{mlp}.experts")
    return inventory.finish()
