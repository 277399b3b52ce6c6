"""Makes the blocks that a drafter is trained on, and their attention masks.

A block is an anchor, a token given to the drafter, and mask tokens for the positions after it,
which are predicted in one pass. All blocks of a sequence share one pass over its features. Source:
DFlash (arXiv 2602.06036), section on training; z-lab/dflash, model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several sequences, n for each sequence, each of `size` positions.

    tokens: input ids, anchors and masks, int64 [sequences, n * size]. wanted: the right ids after
    each anchor, int64 [sequences, n, size - 1]. positions: of features, then blocks, int64
    [sequences, n_tokens + n * size]. mask: visible features (before the anchor) and positions (the
    own block), bool [sequences, 1, n * size, n_tokens + n * size].
    """

    tokens: Tensor
    wanted: Tensor
    positions: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> Blocks:
        """Returns the blocks on another device."""
        return Blocks(
            self.tokens.to(device),
            self.wanted.to(device),
            self.positions.to(device),
            self.mask.to(device),
        )


def make_blocks(tokens: Tensor, anchors: Tensor, size: int, mask_token: int) -> Blocks:
    """Returns blocks at anchors, int64 [sequences, n], in tokens, int64 [sequences, n_tokens]."""
    n_sequences, n_tokens = tokens.shape
    n = anchors.shape[1]
    places = anchors[:, :, None] + torch.arange(size)
    flat = places.flatten(1)
    given = torch.full_like(flat, mask_token)
    given[:, ::size] = tokens.gather(1, anchors)
    wanted = tokens.gather(1, places[:, :, 1:].flatten(1)).view(n_sequences, n, size - 1)
    context = torch.arange(n_tokens).expand(n_sequences, -1)
    before = context[:, None, :] < anchors.repeat_interleave(size, 1)[:, :, None]
    owner = torch.arange(n).repeat_interleave(size)
    own = (owner[:, None] == owner[None, :]).expand(n_sequences, -1, -1)
    return Blocks(
        given,
        wanted,
        torch.cat([context, flat], 1),
        torch.cat([before, own], 2)[:, None],
    )


def draw_anchors(
    first: Tensor, last: Tensor, n: int, size: int, generator: torch.Generator
) -> Tensor:
    """Draws n random anchors for each answer, [sequences, n], whose blocks end inside the answer.

    first, last: first and last position of each answer of at least `size` tokens, int64
    [sequences].
    """
    room = (last - (size - 1) - first + 1).clamp(min=1)
    uniform = torch.rand((len(first), n), generator=generator)
    return first[:, None] + (uniform * room[:, None]).long()


def place_weights(size: int, decay: float) -> Tensor:
    """Returns loss weights [size - 1] exp(-k / decay), as a wrong token ends the draft."""
    return torch.exp(-torch.arange(size - 1) / decay)
