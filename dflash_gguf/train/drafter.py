"""Makes a new drafter for a target, and computes the drafter's logits in training."""

from __future__ import annotations

from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, build_target_layer_ids
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from .blocks import Blocks
from .target import Sizes


def new_drafter(
    target: Sizes,
    *,
    n_layers: int,
    n_taps: int,
    block_size: int,
    mask_token: int,
    seed: int,
    n_ff: int | None = None,
    n_head_kv: int | None = None,
) -> DFlashDraftModel:
    """Returns a random drafter; ValueError for too many taps, or for a wrong number of K/V heads.

    n_ff, n_head_kv: None for the target's.
    """
    n_head_kv = n_head_kv or target.n_head_kv
    if target.n_head % n_head_kv:
        raise ValueError(
            f"--kv-heads {n_head_kv}: the drafter has {target.n_head} heads; give a divisor"
        )
    torch.manual_seed(seed)
    return DFlashDraftModel(
        Qwen3Config(
            vocab_size=target.n_vocab,
            hidden_size=target.n_embd,
            intermediate_size=n_ff or target.n_ff,
            num_hidden_layers=n_layers,
            num_attention_heads=target.n_head,
            num_key_value_heads=n_head_kv,
            head_dim=target.head_dim,
            max_position_embeddings=target.n_ctx_train,
            rms_norm_eps=target.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": target.rope_base},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            num_target_layers=target.n_layer,
            block_size=block_size,
            dflash_config={
                "mask_token_id": mask_token,
                "target_layer_ids": _taps(target.n_layer, n_taps),
                "input_embedding_scale": 1.0,
            },
        )
    )


def _taps(n_target: int, n_taps: int) -> list[int]:
    """Returns the layers that z-lab's drafters read; in small targets, evenly spread layers."""
    if not 1 <= n_taps < n_target:
        raise ValueError(
            f"{n_taps} taps do not fit into a target of {n_target} layers; give fewer --taps"
        )
    taps = sorted(set(build_target_layer_ids(n_target, n_taps)))
    if len(taps) == n_taps and taps[0] >= 0 and taps[-1] <= n_target - 2:
        return [int(tap) for tap in taps]
    return [i * (n_target - 2) // max(1, n_taps - 1) for i in range(n_taps)]


def even_start(drafter: DFlashDraftModel, head: Tensor) -> None:
    """Sets a new drafter's output norm for logits of spread 1, which shortens the training."""
    drafter.norm.weight.data.fill_(1.0 / float(head.float().norm(dim=1).mean()))


def take_weights(drafter: DFlashDraftModel, folder: Path) -> Tensor | None:
    """Copies a trained drafter's weights into a new one; ValueError if sizes or taps differ.

    Returns the tokens that it can draft, None for all.
    """
    try:
        weights, mine = load_file(folder / "model.safetensors"), drafter.state_dict()
        taps = Qwen3Config.from_pretrained(folder).dflash_config["target_layer_ids"]
    except (SafetensorError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{folder}: is no folder of a DFlash drafter, or damaged") from None
    weights.pop("lm_head.weight", None)
    offsets = weights.pop("d2t", None)
    for name, weight in mine.items():
        if name not in weights or weights[name].shape != weight.shape:
            raise ValueError(
                f"{folder}: {name} is not {list(weight.shape)}; give the sizes of its training"
            )
    if len(weights) != len(mine) or taps != drafter.target_layer_ids:
        raise ValueError(
            f"{folder}: has other layers or taps; give the arguments that it was trained with"
        )
    drafter.load_state_dict(weights)
    if offsets is None:
        return None
    if offsets.dtype == torch.int64 and offsets.dim() == 1 and len(offsets):
        tokens = offsets + torch.arange(len(offsets))
        if 0 <= tokens.min() <= tokens.max() < drafter.config.vocab_size:
            return tokens
    raise ValueError(f"{folder}: its d2t is not a list of tokens of this target")


class BlockModel(torch.nn.Module):
    """A drafter with its target's embeddings and output head, which stay frozen."""

    def __init__(
        self,
        drafter: DFlashDraftModel,
        embeddings: Tensor,
        head: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """embeddings, head: [n_vocab, hidden]; head may have 16-bit floats.

        tokens: sorted ids that the drafter can draft, None for the whole vocabulary.
        """
        super().__init__()
        self.drafter, self.tokens = drafter, tokens
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("head", head if tokens is None else head[tokens], persistent=False)
        scale = torch.ones(drafter.fc.in_features)
        self.register_buffer("feature_scale", scale, persistent=False)

    def standardise(self, features: Tensor) -> None:
        """Sets a scale for each feature that gives it mean square 1; some are 1,000 times larger.

        features: a sample [n, taps * hidden].
        """
        self.feature_scale = features.float().square().mean(0).clamp(min=1e-12).rsqrt()

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights of a drafter of unscaled features, with the head if it lacks tokens.

        d2t: for each row of the head its token's id minus the row, as EAGLE-3 stores it.
        """
        weights = dict(self.drafter.state_dict())
        weights["fc.weight"] = weights["fc.weight"] * self.feature_scale
        if self.tokens is not None:
            weights["lm_head.weight"] = self.head
            weights["d2t"] = self.tokens - torch.arange(len(self.tokens))
        return weights

    def forward(self, blocks: Blocks, features: Tensor, head: Tensor | None = None) -> Tensor:
        """Returns logits of the blocks' positions after anchors [sequences, n, size - 1, words].

        head: rows of the target's output head, for logits of these vocabulary entries alone.
        """
        rows = self.head if head is None else head
        hidden = self.drafter(
            target_hidden=features * self.feature_scale,
            noise_embedding=torch.nn.functional.embedding(blocks.tokens, self.embeddings),
            position_ids=blocks.positions,
            attention_mask=blocks.mask,
        )
        size = self.drafter.block_size
        hidden = hidden.view(hidden.shape[0], -1, size, hidden.shape[-1])[:, :, 1:]
        logits: Tensor = self.drafter.compute_logits(
            hidden, lambda x: torch.nn.functional.linear(x, rows)
        )
        return logits
