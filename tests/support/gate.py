"""Compares drafted with plain answers of quantised models, where batch shapes may break ties."""

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
    """Compares a drafted answer with the plain one, and continues plainly after each difference.

    Returns the plain token's lead in logits at each difference, and the first drafted answer.
    config: settings of the plain answer, with a seed. drafted: changed settings of the drafted one.
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
    """Returns the lead of the next token over the second, in logits."""
    row = decoder.logits(tokens)[-1]
    margin = Sampler(config).sample(row, tokens, len(tokens)).margin
    return margin * (config.temperature or 1.0)
