"""Random schedules of concurrent answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from pairs import random_tokens

from dflash_gguf.decoder import Decoder
from dflash_gguf.stream import Stream


def play(
    many: Decoder, alone: Decoder, seed: int, n_passes: int, most_prompt: int, **settings: Any
) -> list[tuple[int, int]]:
    """Keeps all slots of an engine busy until it has run n_passes, and checks every answer.

    Expected answers come from `alone`. Returns the passes and built graphs so far after each step.
    """
    random = np.random.default_rng(seed)
    engine, pace = many.engine, many._scheduler._prefill_budget
    ran = type(pace).observe
    # A simulated clock makes prompt chunks, and so the built graphs, depend on the seed only.
    pace.observe = lambda _, n_filled: ran(pace, 1.0 + 0.01 * n_filled, n_filled)  # type: ignore[method-assign]
    live: list[tuple[Stream, list[int], dict[str, Any], list[int]]] = []
    ended, counts = [], [(0, 0)]
    first = engine.info()
    while counts[-1][0] < n_passes or live:
        while len(live) < engine.n_parallel and counts[-1][0] < n_passes:
            way = {
                "max_tokens": 1 + int(random.integers(40)),
                "temperature": 0.8 * int(random.integers(2)),
                "top_p": 1.0,  # no cuts, because tokens at the edge of a
                "min_p": 0.0,  # cut differ by rounding between devices
                "seed": int(random.integers(99)),
                "ignore_eos": True,
            }
            prompt = random_tokens(1 + int(random.integers(most_prompt)), seed=len(ended) % 20)
            live.append((many.stream(prompt, **way, **settings), prompt, way, []))
        for one in list(live):
            stream, _, way, drawn = one
            step = next(stream, None)
            if step is not None:
                drawn.extend(step.tokens)
            if step is None or random.integers(200) == 0:
                stream.close()
                live.remove(one)
                ended.append(one)
                way["max_tokens"] = max(1, len(drawn)) if step is not None else way["max_tokens"]
            info = engine.info()
            counts.append(
                (info.n_passes - first.n_passes, info.n_graphs_built - first.n_graphs_built)
            )
    for _, prompt, way, drawn in ended:
        expected = alone.generate(prompt, draft="none", **way).tokens
        assert tuple(drawn) == expected[: len(drawn)]
    assert len(ended) > engine.n_parallel
    return counts


def built_anew(counts: list[tuple[int, int]], n_warm: int) -> float:
    """Returns the number of graphs built per pass, after the first n_warm passes."""
    start = next(i for i, (n, _) in enumerate(counts) if n >= n_warm)
    passes, graphs = (end - begin for begin, end in zip(counts[start], counts[-1], strict=True))
    return graphs / passes
