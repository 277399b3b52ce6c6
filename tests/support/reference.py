"""Logits of transformers and of the DFlash reference package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from numpy.typing import NDArray
from pairs import Pair
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # such small models gain nothing from more threads


def reference_logits(directory: Path, tokens: list[int]) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


class Reference:
    """The reference drafter with features that transformers computes for one token list."""

    def __init__(self, pair: Pair, tokens: list[int]) -> None:
        self.tokens = tokens
        self.target = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32)
        self.target.eval()
        self.drafter = DFlashDraftModel.from_pretrained(pair.drafter_dir, dtype=torch.float32)
        self.drafter.eval()
        settings = self.drafter.config.dflash_config
        self.embedding_scale = settings.get("input_embedding_scale", 1.0)
        self.embeddings: torch.Tensor = self.target.get_input_embeddings().weight
        self.head: torch.Tensor = self.target.get_output_embeddings().weight
        with torch.no_grad():
            states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        self.features = extract_context_feature(states, self.drafter.target_layer_ids)

    def draft_logits(
        self, position: int, n_draft: int, window: int | None = None
    ) -> NDArray[np.float32]:
        """Returns draft logits after tokens[position], float32 [n_draft, n_vocab].

        window: number of last features given to the drafter; None: all.
        """
        first = max(0, position - window) if window else 0
        block = [self.tokens[position], *[self.drafter.mask_token_id] * n_draft]
        with torch.no_grad():
            hidden = self.drafter(
                target_hidden=self.features[:, first:position],
                noise_embedding=self.embeddings[torch.tensor([block])] * self.embedding_scale,
                position_ids=torch.arange(first, position + len(block))[None],
            )
            logits = self.drafter.compute_logits(hidden[0, 1:], lambda x: x @ self.head.T)
        found: NDArray[np.float32] = logits.numpy()
        return found
