"""Qwen3.5 and Qwen3.6 text models with experts as architecture `qwen35moe`."""

from __future__ import annotations

from ..checkpoint import Checkpoint, Config
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Key, Tensor
from .blocks import add_experts
from .common import Inventory, Options, of_block
from .qwen3moe import add_expert_counts, expert_count
from .qwen35 import AddFfn, text_metadata, text_tensors


def metadata(checkpoint: Checkpoint, options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen3.5 mixture-of-experts model."""
    result = text_metadata(checkpoint, options, Arch.QWEN35MOE)
    add_expert_keys(result, checkpoint.config)
    return result


def add_expert_keys(metadata: Metadata, config: Config) -> None:
    """Adds the metadata of the routed experts and of the shared expert."""
    add_expert_counts(metadata, config)
    shared = config.integer("shared_expert_intermediate_size")
    metadata.uint32(Key.EXPERT_SHARED_FEED_FORWARD_LENGTH, shared)


def tensors(checkpoint: Checkpoint, options: Options) -> list[TensorPlan]:
    """Returns plans to make GGUF tensors of a Qwen3.5 model with experts from its checkpoint."""
    return text_tensors(checkpoint, options, feed_forward(checkpoint.config))


def feed_forward(config: Config) -> AddFfn:
    """Returns a function that plans a block's routed experts, shared expert and router."""
    n_embd, n_experts = config.integer("hidden_size"), expert_count(config)
    n_ff = config.integer("moe_intermediate_size")
    n_shared = config.integer("shared_expert_intermediate_size")

    def add_block_ffn(inventory: Inventory, block: int, prefix: str) -> None:
        router = of_block(Tensor.FFN_GATE_INP, block)
        inventory.add(router, f"{prefix}.gate.weight", (n_experts, n_embd))
        add_experts(inventory, n_embd, n_ff, n_experts, block, f"{prefix}.experts")
        for template, part, shape in (
            (Tensor.FFN_GATE_INP_SHEXP, "shared_expert_gate", (1, n_embd)),
            (Tensor.FFN_GATE_SHEXP, "shared_expert.gate_proj", (n_shared, n_embd)),
            (Tensor.FFN_UP_SHEXP, "shared_expert.up_proj", (n_shared, n_embd)),
            (Tensor.FFN_DOWN_SHEXP, "shared_expert.down_proj", (n_embd, n_shared)),
        ):
            inventory.add(of_block(template, block), f"{prefix}.{part}.weight", shape)

    return add_block_ffn
