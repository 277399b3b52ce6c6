"""Blocks to train a drafter on, and where the drafter may look from them.

A block is an anchor, which is a token the drafter is given, and the tokens behind it, which it is
to guess at once from masks. All blocks of a sequence are computed in one pass over its features.
Source: DFlash (arXiv 2602.06036), section on training; z-lab/dflash, model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several sequences, `n` a sequence, each of `size` places.

    tokens: int64 [sequences, n * size], what is given: anchors and masks.
    wanted: int64 [sequences, n, size - 1], the tokens behind each anchor.
    positions: int64 [sequences, n_tokens + n * size], of the features and then of the blocks.
    mask: bool [sequences, 1, n * size, n_tokens + n * size], what each place of a block may see:
        the features before its anchor, and its own block in both directions.
    """

    tokens: Tensor
    wanted: Tensor
    positions: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same on another device."""
        return Blocks(
            self.tokens.to(device),
            self.wanted.to(device),
            self.positions.to(device),
            self.mask.to(device),
        )


def make_blocks(tokens: Tensor, anchors: Tensor, size: int, mask_token: int) -> Blocks:
    """Blocks at given places.

    tokens: int64 [sequences, n_tokens]. anchors: int64 [sequences, n], each with size - 1 tokens
    behind it.
    """
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
    """Random anchors [sequences, n], of answers that span first..last (int64 [sequences]).

    Any token of the answer whose block ends inside it is as likely as another; a shorter answer is
    one whose sequence must be left out before.
    """
    room = (last - (size - 1) - first + 1).clamp(min=1)
    uniform = torch.rand((len(first), n), generator=generator)
    return first[:, None] + (uniform * room[:, None]).long()


def place_weights(size: int, decay: float) -> Tensor:
    """Weights [size - 1] of a block's places: exp(-k / decay), as a wrong token ends the draft."""
    return torch.exp(-torch.arange(size - 1) / decay)
