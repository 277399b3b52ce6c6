"""The gate of quantised models: equal tokens, or a tie that another batch shape may break."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import dflash_gguf
from dflash_gguf.sampling.sampler import Sampler


def margins_at_differences(
    decoder: dflash_gguf.Decoder,
    prompt: Sequence[int],
    config: dflash_gguf.DecodeConfig,
    **drafted: Any,
) -> tuple[list[float], dflash_gguf.Result]:
    """Compares an answer with drafts with the plain one, going on after every difference.

    config: with a seed and without a draft. drafted: what the other answer differs in.

    Returns:
        For each difference how clearly the plain token had won, in logits; and the first answer
        with drafts. After a difference the comparison goes on from the plain answer: position,
        history and noise of the tokens that follow are the same.
    """
    decoder.reset()
    goal = decoder.generate(prompt, config).tokens
    found: list[float] = []
    first: dflash_gguf.Result | None = None
    done = 0
    while done < len(goal):
        decoder.reset()
        left = dataclasses.replace(config, max_tokens=len(goal) - done, **drafted)
        result = decoder.generate([*prompt, *goal[:done]], left)
        first = first or result
        same = zip(result.tokens, goal[done:], strict=False)
        n_equal = next((i for i, (a, b) in enumerate(same) if a != b), len(result.tokens))
        done += n_equal + 1
        if n_equal < len(result.tokens):
            found.append(_margin(decoder, [*prompt, *goal[: done - 1]], config))
    if first is None:
        raise ValueError("the plain answer is empty")
    return found, first


def _margin(
    decoder: dflash_gguf.Decoder, tokens: list[int], config: dflash_gguf.DecodeConfig
) -> float:
    """How clearly the token after `tokens` wins, in logits."""
    row = decoder.logits(tokens)[-1]
    margin = Sampler(config).sample(row, tokens, len(tokens)).margin
    return margin * (config.temperature or 1.0)
