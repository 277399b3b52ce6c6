"""A new drafter for a target, and how it computes blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, build_target_layer_ids
from torch import Tensor
from transformers import Qwen3Config

from .blocks import Blocks


def new_drafter(
    target_config: Any,
    *,
    n_layers: int,
    n_taps: int,
    block_size: int,
    mask_token: int,
    seed: int,
    n_ff: int | None = None,
) -> DFlashDraftModel:
    """A random drafter of the target's width; its taps are spread as in the reference.

    n_ff: width of its feed-forward, the target's if not given.

    Raises:
        ValueError: the target has too few layers for so many taps.
    """
    config = target_config.get_text_config()
    n_target = config.num_hidden_layers
    taps = _taps(n_target, n_taps)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    torch.manual_seed(seed)
    return DFlashDraftModel(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=n_ff or config.intermediate_size,
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            num_target_layers=n_target,
            block_size=block_size,
            dflash_config={"mask_token_id": mask_token, "target_layer_ids": taps},
        )
    )


def _taps(n_target: int, n_taps: int) -> list[int]:
    """Layers whose outputs the drafter reads; the last one's cannot be read.

    The reference leaves out some of the first and last layers. A target of few layers has none to
    spare, and all of them are used.
    """
    if not 1 <= n_taps < n_target:
        raise ValueError(f"{n_taps} taps do not fit into a target of {n_target} layers")
    taps = sorted(set(build_target_layer_ids(n_target, n_taps)))
    if len(taps) == n_taps and taps[0] >= 0 and taps[-1] <= n_target - 2:
        return [int(tap) for tap in taps]
    return [i * (n_target - 2) // max(1, n_taps - 1) for i in range(n_taps)]


def even_start(drafter: DFlashDraftModel, head: Tensor) -> None:
    """Makes a new drafter's first logits about one apart, whatever the scale of its target's head.

    head: [n_vocab, hidden]. Else hundreds of steps go by before they are.
    """
    drafter.norm.weight.data.fill_(1.0 / float(head.float().norm(dim=1).mean()))


def take_weights(drafter: DFlashDraftModel, folder: Path) -> None:
    """Gives a new drafter the weights of one that was trained before.

    Raises:
        ValueError, OSError: there is none, or it has other sizes.
    """
    trained = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    weights, mine = trained.state_dict(), drafter.state_dict()
    for name, weight in mine.items():
        if name not in weights or weights[name].shape != weight.shape:
            raise ValueError(f"{folder}: its {name} is not {list(weight.shape)} as is needed here")
    if len(weights) != len(mine) or trained.target_layer_ids != drafter.target_layer_ids:
        raise ValueError(f"{folder}: has other layers, or reads others of its target")
    drafter.load_state_dict(weights)


class BlockModel(torch.nn.Module):
    """A drafter with its target's embeddings and head, which it borrows and never changes."""

    def __init__(self, drafter: DFlashDraftModel, embeddings: Tensor, head: Tensor) -> None:
        """embeddings, head: [n_vocab, hidden]. The head may be stored in 16 bits."""
        super().__init__()
        self.drafter = drafter
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def forward(self, blocks: Blocks, features: Tensor, head: Tensor | None = None) -> Tensor:
        """Logits of every place behind an anchor, [sequences, blocks, size - 1, n_vocab].

        head: some rows of the target's, for the logits of these words only.
        """
        rows = self.head if head is None else head
        hidden = self.drafter(
            target_hidden=features,
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
