"""Makes the blocks that a drafter is trained on, and their attention masks.

A block begins with an anchor, a token of the answer that the drafter is given; mask tokens follow,
whose positions the drafter predicts in one pass. All blocks of a sequence share one pass over its
features (hidden states of the target). Source: DFlash (arXiv 2602.06036), section on training;
z-lab/dflash, model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several sequences, n for each sequence, each of `size` positions.

    tokens: ids of anchors and mask tokens, int64 [sequences, n * size]. wanted: the answer's ids
    after each anchor, int64 [sequences, n, size - 1]. positions: RoPE positions of features, then
    of blocks, int64 [sequences, n_tokens + n * size]. mask: True where a row attends, to features
    before its anchor and to its block, bool [sequences, 1, n * size, n_tokens + n * size].
    """

    tokens: Tensor
    wanted: Tensor
    positions: Tensor
    mask: Tensor

    def places_before(self) -> Tensor:
        """Returns the places in the answers before each wanted token, from which it follows."""
        n, size = self.wanted.shape[1], self.wanted.shape[2] + 1
        return self.positions[:, -n * size :].unflatten(1, (n, size))[..., :-1]

    def to(self, device: torch.device) -> Blocks:
        """Returns the blocks on another device."""
        return Blocks(
            self.tokens.to(device),
            self.wanted.to(device),
            self.positions.to(device),
            self.mask.to(device),
        )


def make_blocks(tokens: Tensor, anchors: Tensor, size: int, mask_token: int) -> Blocks:
    """Returns the blocks at positions `anchors` [sequences, n] of tokens [sequences, n_tokens]."""
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
    """Draws n random positions [sequences, n] in each answer where whole blocks fit.

    first, last: first and last position of each answer, int64 [sequences]; it has at least `size`
    tokens.
    """
    room = (last - (size - 1) - first + 1).clamp(min=1)
    uniform = torch.rand((len(first), n), generator=generator)
    return first[:, None] + (uniform * room[:, None]).long()


def place_weights(size: int, decay: float) -> Tensor:
    """Returns loss weights exp(-k / decay) of a block's positions: early errors cost most."""
    return torch.exp(-torch.arange(size - 1) / decay)
