"""A decoder on tiny models computes one token of a repeated prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import BatchEntry, Engine, Model, Rows


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_repeated_prompt_computes_one_token_and_has_the_same_bits(
    tiny_gguf: Callable[[str], Path], kind: str
) -> None:
    model = Model(str(tiny_gguf(kind)), LoadConfig(n_ctx=256, n_ubatch=32, n_threads=1))
    decoder = Decoder(native.Sequence(Engine(model)), None)
    rows: list[NDArray[np.float32]] = []
    run = decoder.engine.run

    def watched(items: Sequence[BatchEntry]) -> list[Rows]:
        found = run(items)
        if decoder.sequence.position == len(prompt) and not items[0].is_verify:
            rows.append(found[0].logits(0))
        return found

    decoder.engine.run = watched  # type: ignore[assignment,method-assign]
    prompt = np.random.default_rng(2).integers(0, model.n_vocab, 100).tolist()
    changed = [*prompt[:-1], (prompt[-1] + 1) % model.n_vocab]
    counts, answers = [], []
    for tokens in (prompt, prompt, changed, prompt):
        result = decoder.generate(tokens, max_tokens=5)
        counts.append(result.n_prefilled)
        answers.append((result.tokens, rows[-1]))
    assert counts == [100, 1, 1, 1]
    decoder.reset()
    answers.append((decoder.generate(changed, max_tokens=5).tokens, rows[-1]))
    assert len(rows) == len(answers)
    for a, b in ((0, 1), (0, 3), (2, 4)):
        assert answers[a][0] == answers[b][0]
        if kind == "qwen35":
            np.testing.assert_array_equal(answers[a][1], answers[b][1])
