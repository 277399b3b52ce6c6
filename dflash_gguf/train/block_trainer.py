"""Trains a block drafter (DFlash)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .acceptance import Acceptance, measure
from .blocks import Blocks, draw_anchors, make_blocks, place_weights
from .drafter import BlockModel
from .features import AnswerFeatures
from .fit import Recipe, Trainer, Update
from .parallel import precision
from .words import Softmax, Words

# A part of a step's work for one thread: indices of answers, and the answers' blocks.
BlockPiece = tuple[Sequence[int], Blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecipe(Recipe):
    """Hyper-parameters of a training on n_blocks blocks of each of n_sequences answers.

    decay: position k of a block has loss weight exp(-k / decay). distil: share of the loss that
    compares with the target's distribution, not with the answer's token. n_words: vocabulary
    entries in a step's softmax, 0 for all.
    """

    n_blocks: int = 16
    decay: float = 4.0
    distil: float = 0.0
    n_words: int = 0


class BlockTrainer(Trainer[BlockPiece]):
    """A DFlash drafter in training."""

    def __init__(
        self,
        model: BlockModel,
        data: AnswerFeatures,
        held_out: AnswerFeatures,
        recipe: BlockRecipe,
        folder: Path,
        device: torch.device,
    ) -> None:
        """Creates a trainer, with the state in folder/state.pt if there is one.

        Errors: as for Trainer.
        """
        self.model, self.device, self.blocks = model.to(device), device, recipe
        self.data, self.held_out = data, held_out
        self.size = model.drafter.block_size
        super().__init__(model.drafter, data.answers, recipe, folder, self.size)
        self.weights = place_weights(self.size, recipe.decay).to(device)
        self.words = Words(
            (a.tokens[a.n_prompt :] for a in data.answers),
            model.head.shape[0],
            recipe.n_words,
            model.tokens,
        )

    def tau(self) -> float:
        """Returns the tokens a round on the held-out answers."""
        return self.evaluate().tau

    def evaluate(self) -> Acceptance:
        """Returns the acceptance of the drafter's greedy drafts on the held-out answers."""
        self.model.eval()
        with torch.inference_mode(), precision(self.device):
            found = measure([(a.tokens, a.n_prompt) for a in self.held_out.answers], self.draft)
        self.model.train()
        return found

    def draft(self, places: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Returns the greedy draft after each (held-out answer, position of its last token)."""
        found: list[list[int]] = []
        for begin in range(0, len(places), 16):
            chosen = places[begin : begin + 16]
            tokens, features = self.held_out.batch([i for i, _ in chosen], self.size)
            anchors = torch.tensor([[place] for _, place in chosen])
            blocks = make_blocks(tokens, anchors, self.size, self.model.drafter.mask_token_id)
            logits = self.model(blocks.to(self.device), features.to(self.device))
            best = logits[:, 0].argmax(-1)
            found += (best if self.model.tokens is None else self.model.tokens[best.cpu()]).tolist()
        return found

    def update(self, chosen: Sequence[Sequence[int]]) -> Update[BlockPiece]:
        """Returns the blocks of an update, which the seed and the step determine."""
        recipe = self.blocks
        generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + self.step) % (1 << 63))
        pieces = [self._piece(piece, generator) for piece in chosen]
        wanted = torch.cat([blocks.wanted.flatten() for _, blocks in pieces])
        softmax = self.words.draw(wanted, generator).to(self.device, self.model.head)
        n = recipe.n_sequences * recipe.n_blocks
        scale = 1 / (n * float(self.weights.sum()))
        return Update(pieces, lambda piece: self._loss(piece, softmax), scale, n)

    def _piece(self, chosen: Sequence[int], generator: torch.Generator) -> BlockPiece:
        answers = [self.data.answers[i] for i in chosen]
        first = torch.tensor([a.n_prompt for a in answers])
        last = torch.tensor([len(a.tokens) - 1 for a in answers])
        anchors = draw_anchors(first, last, self.blocks.n_blocks, self.size, generator)
        tokens = self.data.tokens(chosen)
        return chosen, make_blocks(tokens, anchors, self.size, self.model.drafter.mask_token_id)

    def _loss(self, piece: BlockPiece, softmax: Softmax) -> tuple[Tensor, Tensor]:
        chosen, blocks = piece[0], piece[1].to(self.device)
        features = self.data.batch(chosen)[1].to(self.device)
        with precision(self.device):
            logits = self.model(blocks, features, softmax.head)
        wanted, is_known = softmax.places(blocks.wanted)
        log_probs = (logits.float() + softmax.shift).log_softmax(-1)
        losses = -log_probs.gather(-1, wanted[..., None])[..., 0]
        distil = self.blocks.distil
        if distil > 0:
            inputs = self.data.head_input(chosen, piece[1].places_before())
            with torch.no_grad(), precision(self.device):
                rows = self.model.head if softmax.head is None else softmax.head
                teacher = F.linear(inputs.to(self.device), rows).float() + softmax.shift
            compared = -(teacher.softmax(-1) * log_probs).sum(-1)
            losses = (1 - distil) * losses + distil * compared
        value = (losses * is_known * self.weights).sum()
        is_right = (logits.detach().argmax(-1) == wanted) & is_known
        right = is_right.float().sum((0, 1))
        return value, torch.cat([value.detach()[None], right])
