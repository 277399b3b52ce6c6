"""Compares drafted with plain answers of quantised models, where batch shapes may break ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dflash_gguf
from dflash_gguf.sampling.sampler import Sampler


def margins_at_differences(
    decoder: dflash_gguf.Decoder,
    prompt: Sequence[int],
    config: dflash_gguf.DecodeConfig,
    plain: Sequence[int] | None = None,
    **drafted: Any,
) -> tuple[list[float], dflash_gguf.Result]:
    """Compares one answer as `margins_of_batch` does; returns margins and first drafted answer."""
    goals = None if plain is None else [plain]
    margins, (first,) = margins_of_batch(decoder, [prompt], config, goals, **drafted)
    return margins, first


def margins_of_batch(
    decoder: dflash_gguf.Decoder,
    prompts: Sequence[Sequence[int]],
    config: dflash_gguf.DecodeConfig,
    plain: Sequence[Sequence[int]] | None = None,
    **drafted: Any,
) -> tuple[list[float], list[dflash_gguf.Result]]:
    """Compares a batch of drafted answers with plain answers of each prompt alone.

    Each answer continues plainly after a difference. Returns the plain token's lead in logits at
    each difference, and the first drafted answers. config: settings of the plain answers, with a
    seed. plain: tokens of the plain answers, if they are known. drafted: changed settings of the
    drafted answers; a list has a value for each prompt.
    """
    goals = list(plain or ())
    for prompt in prompts[len(goals) :]:
        decoder.reset()
        goals.append(decoder.generate(prompt, config).tokens)
    found: list[float] = []
    first: list[dflash_gguf.Result] = []
    done = [0] * len(prompts)
    while left := [i for i, goal in enumerate(goals) if done[i] < len(goal)]:
        decoder.reset()
        settings: dict[str, Any] = {
            name: [value[i] for i in left] if isinstance(value, list) else value
            for name, value in drafted.items()
        }
        settings["max_tokens"] = [len(goals[i]) - done[i] for i in left]
        begun = [[*prompts[i], *goals[i][: done[i]]] for i in left]
        results = decoder.generate_batch(begun, config, **settings)
        first = first or results
        for i, result in zip(left, results, strict=True):
            same = zip(result.tokens, goals[i][done[i] :], strict=False)
            n_equal = next((n for n, (a, b) in enumerate(same) if a != b), len(result.tokens))
            done[i] += n_equal + 1
            if n_equal < len(result.tokens):
                found.append(_margin(decoder, [*prompts[i], *goals[i][: done[i] - 1]], config))
    if len(first) < len(prompts):
        raise ValueError("a plain answer is empty")
    return found, first


def _margin(
    decoder: dflash_gguf.Decoder, tokens: list[int], config: dflash_gguf.DecodeConfig
) -> float:
    """Returns the lead of the next token over the second, in logits."""
    row = decoder.logits(tokens)[-1]
    margin = Sampler(config).sample(row, tokens, len(tokens)).margin
    return margin * (config.temperature or 1.0)
