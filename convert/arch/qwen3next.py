"""Qwen3NextForCausalLM (Qwen3-Next, Qwen3-Coder-Next) as architecture `qwen3next`.

Qwen3.5's network with experts. One projection of Gated DeltaNet holds queries, keys, values and
gates, ordered by key head; GGUF has two projections, with all heads of a kind together. Value
heads keep their order; so do betas and alphas, which are ordered by key head too.
"""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..plan import Metadata, TensorPlan
from ..schema import Arch, Tensor
from .common import Inventory, Options, of_block
from .qwen3moe import require_uniform_experts
from .qwen35 import LinearDims, negated_exp, text_metadata, text_tensors
from .qwen35moe import add_expert_keys, feed_forward


def metadata(checkpoint: Checkpoint, options: Options) -> Metadata:
    """Returns the GGUF metadata of a Qwen3-Next model."""
    require_uniform_experts(checkpoint.config)
    result = text_metadata(checkpoint, options, Arch.QWEN3NEXT, has_sections=False)
    add_expert_keys(result, checkpoint.config)
    return result


def tensors(checkpoint: Checkpoint, options: Options) -> list[TensorPlan]:
    """Returns plans to make the GGUF tensors of a Qwen3-Next model from its checkpoint."""
    return text_tensors(checkpoint, options, feed_forward(checkpoint.config), _add_linear_attention)


def _add_linear_attention(
    inventory: Inventory, n_embd: int, linear: LinearDims, block: int, prefix: str
) -> None:
    source = f"{prefix}.linear_attn"
    channels = 2 * linear.keys + linear.values

    def name(template: str) -> str:
        return of_block(template, block)

    joint = f"{source}.in_proj_qkvz.weight"
    rows = inventory.view(joint, (channels + linear.values, n_embd))
    by_key = rows.reshape(linear.n_key, -1, n_embd)
    d, last = linear.key_dim, 2 * linear.key_dim + linear.values // linear.n_key
    kinds = (slice(d), slice(d, 2 * d), slice(2 * d, last))
    parts = [head[kind] for kind in kinds for head in by_key]
    inventory.add_parts(name(Tensor.ATTN_QKV), (channels, n_embd), parts, [joint])
    parts = [head[last:] for head in by_key]
    inventory.add_parts(name(Tensor.ATTN_GATE), (linear.values, n_embd), parts, [joint])
    both = f"{source}.in_proj_ba.weight"
    inventory.add(name(Tensor.SSM_BETA_ALPHA), both, (2 * linear.n_value, n_embd))
    inventory.add(
        name(Tensor.SSM_CONV1D),
        f"{source}.conv1d.weight",
        (channels, 1, linear.kernel),
        write_shape=(channels, linear.kernel),
    )
    inventory.add(name(Tensor.SSM_DT_BIAS), f"{source}.dt_bias", (linear.n_value,))
    inventory.add(name(Tensor.SSM_A), f"{source}.A_log", (linear.n_value,), apply=negated_exp)
    inventory.add(name(Tensor.SSM_NORM), f"{source}.norm.weight", (linear.value_dim,))
    inventory.add(name(Tensor.SSM_OUT), f"{source}.out_proj.weight", (n_embd, linear.values))
