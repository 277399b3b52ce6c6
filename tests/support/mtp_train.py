"""The MTP layer of transformers for a Qwen3.5 target, and its training on one answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import MtpModel

N_STEPS = 3  # steps of a chain that are trained together

NAMES = {
    "mtp_block": "layers.0",
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "post_norm": "norm",
}
"""Names of checkpoints for the modules of transformers' MtpLayer."""


def stored_name(name: str) -> str:
    module, _, rest = name.partition(".")
    return f"mtp.{NAMES[module]}.{rest}"


def mtp_of(directory: Path) -> tuple[Any, Any]:
    """Returns a target and its MTP model with the weights of a checkpoint."""
    target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    target.config.num_mtp_layers = 1
    target.config.mtp_layer_types = ["full_attention"]
    model = MtpModel(target, 1).eval()
    stored = load_file(directory / "model.safetensors")
    layer = model.layers[0]
    layer.load_state_dict({name: stored[stored_name(name)] for name in layer.state_dict()})
    return target, model


def forward(model: Any, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the layer's final hidden states for rows of one sequence, [1, n, n_embd]."""
    positions = torch.arange(embeddings.shape[1])[None]
    masks = model.create_masks_for_mtp_layer(0, embeddings, DynamicCache(), positions)
    left: torch.Tensor = model.layers[0](
        embeddings,
        hidden,
        position_embeddings=model.rotary_emb(embeddings, position_ids=positions),
        position_ids=positions,
        past_key_values=None,
        **masks,
    )
    return left


def train(folder: Path, target_dir: Path, tokens: list[int], share: float) -> None:
    """Trains the MTP layer until it knows `share` of the tokens; writes the target to `folder`.

    Raises RuntimeError if it does not learn.
    """
    torch.set_num_threads(1)  # such small models gain nothing from more threads
    torch.manual_seed(0)
    target, model = mtp_of(target_dir)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states[-1]
    embeddings = target.get_input_embeddings().weight.detach()[ids]
    head = target.get_output_embeddings().weight.detach()
    parameters = model.layers[0].parameters()
    torch.set_grad_enabled(True)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    known = 0.0
    for _ in range(400):
        left, loss = hidden[:, :-1], torch.tensor(0.0)
        for step in range(1, N_STEPS + 1):
            left = forward(model, embeddings[:, step:], left[:, : len(tokens) - step])
            logits, wanted = (left @ head.T)[0, :-1], ids[0, step + 1 :]
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted)
            is_known = float((logits.argmax(-1) == wanted).float().mean())
            known = 0.9 * known + 0.1 * is_known
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if known > share:
            shutil.copytree(target_dir, folder)
            stored = load_file(folder / "model.safetensors")
            state = model.layers[0].state_dict().items()
            stored |= {stored_name(name): x.contiguous() for name, x in state}
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
            return
    raise RuntimeError(f"the layer knows {known:.0%} of the answer after 400 steps")
