"""The MTP layer of transformers for a Qwen3.5 target, and its training on one answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from dflash_gguf.train.mtp import chain_losses

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
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    known = 0.0
    known_by_step: list[float] = []

    def of_step(step: int, left: torch.Tensor) -> torch.Tensor:
        logits, wanted = (left @ head.T)[0, :-1], ids[0, step + 1 :]
        known_by_step.append(float((logits.argmax(-1) == wanted).float().mean()))
        return torch.nn.functional.cross_entropy(logits, wanted)

    for _ in range(400):
        known_by_step.clear()
        loss = chain_losses(model, embeddings, hidden, of_step)
        for is_known in known_by_step:
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
