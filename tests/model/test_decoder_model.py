"""The public API with a real model: core, tokenizer and decoding together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vocabularies import smollm2_file

import dflash_gguf
from dflash_gguf.sampling.sampler import Sampler

pytestmark = pytest.mark.model
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def decoder() -> Iterator[dflash_gguf.Decoder]:
    with dflash_gguf.load(smollm2_file(), n_ctx=256, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def fresh(decoder: dflash_gguf.Decoder) -> None:
    decoder.reset()


def test_greedy_tokens_are_the_best_of_a_plain_pass(decoder: dflash_gguf.Decoder) -> None:
    prompt = decoder.tokenize(PROMPT)
    result = decoder.generate(prompt, max_tokens=24)
    rows = decoder.logits([*prompt, *result.tokens])[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(result.tokens)), list(result.tokens)]
    assert (rows.max(axis=1) - chosen).max() < 0.05


def test_sampled_tokens_are_those_of_the_sampler_on_a_plain_pass(
    decoder: dflash_gguf.Decoder,
) -> None:
    config = dflash_gguf.DecodeConfig(
        max_tokens=24, temperature=0.8, seed=11, repeat_penalty=1.1, ignore_eos=True
    )
    prompt = decoder.tokenize(PROMPT)
    result = decoder.generate(prompt, config)
    tokens = [*prompt, *result.tokens]
    rows = decoder.logits(tokens)
    assert decoder.tokenizer is not None
    sampler = Sampler(config, banned=decoder.tokenizer.stop_tokens)
    for position in range(len(prompt), len(tokens)):
        choice = sampler.sample(rows[position - 1], tokens[:position], position)
        assert choice.token == tokens[position] or choice.margin < 0.1


def test_streamed_text_is_the_result_and_the_tokens_detokenized(
    decoder: dflash_gguf.Decoder,
) -> None:
    stream = decoder.stream("Emoji: 😀 😀 😀", max_tokens=16)
    text = "".join(step.text for step in stream)
    result = stream.result()
    assert text == result.text == decoder.detokenize(result.tokens)


def test_a_stop_text_cuts_the_answer(decoder: dflash_gguf.Decoder) -> None:
    whole = decoder.generate(PROMPT, max_tokens=32).text
    stop = whole[10:14]
    decoder.reset()
    cut = decoder.generate(PROMPT, max_tokens=32, stop=stop)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.stop_reason == "text"


def test_the_context_ends_an_answer(decoder: dflash_gguf.Decoder) -> None:
    prompt = (decoder.tokenize("a b c ") * 100)[:250]
    result = decoder.generate(prompt, ignore_eos=True)
    assert (result.stop_reason, result.n_tokens) == ("context", 7)
    with pytest.raises(ValueError, match="the prompt has 257 tokens, the context holds 256"):
        decoder.generate([1] * 257)


def test_a_conversation_computes_only_what_is_new(decoder: dflash_gguf.Decoder) -> None:
    messages = [{"role": "user", "content": "Hi!"}]
    first = decoder.chat(messages, max_tokens=16)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    second = decoder.chat(messages, max_tokens=16)
    assert second.n_prefilled < second.n_prompt - first.n_prompt
    assert second.text
