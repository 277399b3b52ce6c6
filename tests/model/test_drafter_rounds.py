"""Rounds of overfitted drafters accept as many tokens as those of the reference package.

Drafters are shaped like published ones: gpt-oss's have biases and YaRN, Gemma's have windows in all
layers but the last and a logit soft cap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from chains import chain, plain
from device import DEVICE
from pairs import Pair, load_target, make_pair, open_pair, overfit, random_tokens
from transformers import AutoModelForCausalLM

from dflash_gguf.native import Engine, Sequence

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="a near tie may fall otherwise there")

N_ANSWER, N_TOKENS = 240, 90
BLOCK = 8
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
}
OF_GPT_OSS: dict[str, Any] = {"attention_bias": True, "rope_parameters": YARN}
OF_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", OF_GPT_OSS),
    "gemma4, raw embeddings": ("gemma4", OF_GEMMA),
    "gemma4moe, scaled embeddings": (
        "gemma4moe",
        {**OF_GEMMA, "dflash_config": {"input_embedding_scale": 96**0.5}},
    ),
}


def reference_rounds(pair: Pair, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Returns the reference's tokens after the prompt, and the tokens of each round."""
    target = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32)
    drafter = dflash.model.DFlashDraftModel.from_pretrained(pair.drafter_dir, dtype=torch.float32)
    done = dflash.model.dflash_generate(
        drafter.eval(), target.eval(), torch.tensor([prompt]), N_TOKENS, None, return_stats=True
    )
    return done.output_ids[0, len(prompt) :].tolist(), done.acceptance_lengths


@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_those_of_the_reference(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    kind, drafter = CASES[case]
    pair = make_pair(tmp_path, kind, block_size=BLOCK, **drafter)
    text = random_tokens(1)
    text += plain(Sequence(Engine(load_target(pair.target))), text, N_ANSWER)
    trained = overfit(pair, kind, tmp_path / "trained.gguf", text[:1], text[1:], share=0.7)
    assert len(set(text)) > N_ANSWER // 5
    sequence = open_pair(trained)
    for n in (5, 90):
        expected, produced = reference_rounds(trained, text[:n])
        tokens, accepted = chain(sequence, text[:n], N_TOKENS + 1, BLOCK - 1)
        assert tokens[:N_TOKENS] == expected[:N_TOKENS] == text[n : n + N_TOKENS]
        n_whole = len(produced) - 1  # the reference's last round is cut by the token limit
        assert [x + 1 for x in accepted[:n_whole]] == produced[:n_whole]
        print(f"{case}: tau {sum(produced) / len(produced):.2f} after {n} tokens")
        assert sum(produced) >= 2 * len(produced)
        assert len(set(produced[:-1])) >= 4
