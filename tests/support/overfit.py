"""Trains a tiny drafter on one answer of a random target, so that most drafts are accepted.

Training data are the answer and the target's hidden states. Blocks at random positions are trained
in parallel: the attention mask gives each block some of the features before it and its own mask
tokens (in sliding layers only the earlier ones).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from transformers import AutoModelForCausalLM

N_BLOCKS = 48  # blocks per training step
N_SEEN = 80  # fewest features visible to a block


def blocks_at(
    starts: torch.Tensor, n_context: int, size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns position ids [blocks, context + size] and masks [blocks, 1, size, context + size].

    The first mask is for full layers, the second for sliding layers, which are causal.
    """
    context = torch.arange(n_context).expand(len(starts), -1)
    positions = torch.cat([context, starts[:, None] + torch.arange(size)], dim=1)
    windows = torch.randint(N_SEEN, 4 * N_SEEN, starts.shape)
    past = (context < starts[:, None]) & (context >= (starts - windows)[:, None])
    seen = torch.cat([past, torch.ones(len(starts), size, dtype=torch.bool)], dim=1)
    full = seen[:, None, :].expand(-1, size, -1)
    distance = positions[:, n_context:, None] - positions[:, None, :]
    near = full & (distance >= 0) & (distance < (window or n_context + size))
    return positions, full[:, None], near[:, None]


def mask_by_layer(drafter: DFlashDraftModel) -> dict[str, torch.Tensor]:
    """Makes sliding layers use the mask masks["sliding"], which the caller sets."""
    masks: dict[str, torch.Tensor] = {}

    def choose(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": masks["sliding"]}

    for layer in drafter.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.register_forward_pre_hook(choose, with_kwargs=True)
    return masks


def train(
    folder: Path,
    target_dir: Path,
    drafter_dir: Path,
    prompt: list[int],
    answer: list[int],
    share: float,
) -> None:
    """Trains a drafter until it knows `share` of the answer; writes it to `folder`.

    Raises RuntimeError if it does not learn.
    """
    torch.set_num_threads(1)  # such small models gain nothing from more threads
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(drafter_dir, dtype=torch.float32)
    tokens = torch.tensor([*prompt, *answer])
    with torch.no_grad():
        states = target(tokens[None], output_hidden_states=True).hidden_states
    features = extract_context_feature(states, drafter.target_layer_ids)
    masks, window = mask_by_layer(drafter), drafter.config.sliding_window
    scale = drafter.config.dflash_config.get("input_embedding_scale", 1.0)
    embeddings = scale * target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    known = 0.0
    for step in range(600):
        size = (drafter.block_size, drafter.block_size // 2)[step % 2]
        starts = torch.randint(len(prompt), len(tokens) - size, (N_BLOCKS,))
        places = starts[:, None] + torch.arange(size)
        block = torch.full((N_BLOCKS, size), drafter.mask_token_id)
        block[:, 0] = tokens[starts]
        positions, mask, masks["sliding"] = blocks_at(starts, len(tokens), size, window)
        hidden = drafter(
            target_hidden=features.expand(N_BLOCKS, -1, -1),
            noise_embedding=embeddings[block],
            position_ids=positions,
            attention_mask=mask,
        )
        logits = drafter.compute_logits(hidden[:, 1:], lambda x: x @ head.T).flatten(0, 1)
        wanted = tokens[places[:, 1:]].flatten()
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        known = 0.9 * known + 0.1 * float((logits.argmax(-1) == wanted).float().mean())
        if known > share:
            drafter.save_pretrained(folder)
            return
    raise RuntimeError(f"the drafter knows {known:.0%} of the answer after 600 steps")
