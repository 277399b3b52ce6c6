"""Answers under asyncio: equal to others, many at once, cancelled; log-probabilities; plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_gguf
from dflash_gguf import AsyncDecoder, Decoder, native

PROMPTS = [f"def f{i}(a, b):\n    return" for i in range(6)]
LONG = {"max_tokens": None, "ignore_eos": True, "draft": "none"}


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with dflash_gguf.load("python-tiny", n_ctx=1024, n_threads=1, n_parallel=2) as loaded:
        yield loaded


def test_many_at_once_are_answered_as_alone(decoder: Decoder) -> None:
    expected = [decoder.generate(prompt, max_tokens=24).text for prompt in PROMPTS]

    async def answers() -> list[str]:
        many = AsyncDecoder(decoder)
        found = await asyncio.gather(*(many.generate(p, max_tokens=24) for p in PROMPTS))
        return [result.text for result in found]

    assert asyncio.run(answers()) == expected


def test_a_template_gets_the_variables_of_a_chat(decoder: Decoder) -> None:
    template = "{{ messages[0].content }}{{ more }}"
    asked = {"template": template, "chat_template_kwargs": {"more": "(a, b):"}, "max_tokens": 12}

    async def answer() -> str:
        return (await AsyncDecoder(decoder).chat("def f", **asked)).text

    assert asyncio.run(answer()) == decoder.chat("def f", **asked).text


def test_ctrl_c_ends_calls_that_compute_a_text(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = decoder.tokenize("x = 1\n" * 200)
    expected = decoder.logits(tokens[:20])
    decoder.reset()

    def stop(done: int, total: int) -> None:
        if done < total:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native, "interruptible", stop)
        with pytest.raises(KeyboardInterrupt):
            decoder.logits(tokens)
        with pytest.raises(KeyboardInterrupt):
            decoder.save_prefix(tmp_path / "prefix", tokens)
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(decoder.logits(tokens[:20]), expected)


def test_a_stream_yields_the_text_and_the_loop_goes_on(decoder: Decoder) -> None:
    expected = decoder.chat("hi", template="chatml", max_tokens=24)

    async def read() -> tuple[str, str, int]:
        n_turns = 0

        async def count() -> None:
            nonlocal n_turns
            while True:
                await asyncio.sleep(0)
                n_turns += 1

        counting = asyncio.create_task(count())
        async with await AsyncDecoder(decoder).chat_stream(
            "hi", template="chatml", max_tokens=24
        ) as stream:
            text = "".join([step.text async for step in stream])
        counting.cancel()
        return text, stream.result().text, n_turns

    text, of_result, n_turns = asyncio.run(read())
    assert text == of_result == expected.text
    assert n_turns > 10


def test_cancelling_ends_the_answer_and_waiting_loses_no_step(decoder: Decoder) -> None:
    async def life() -> None:
        many = AsyncDecoder(decoder)
        task = asyncio.create_task(many.generate(PROMPTS[0], **LONG))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 2
        assert not decoder._scheduler.running
        stream = many.stream(PROMPTS[1], max_tokens=60, draft="none", ignore_eos=True)
        tokens: list[int] = []
        while True:
            try:
                tokens += (await asyncio.wait_for(stream.__anext__(), 1e-4)).tokens
            except asyncio.TimeoutError:
                continue
            except StopAsyncIteration:
                break
        assert tuple(tokens) == stream.result().tokens
        assert len(tokens) == 60

    asyncio.run(life())


def test_errors_reach_the_caller(decoder: Decoder) -> None:
    with pytest.raises(TypeError, match="decoder is 'smollm2': give a Decoder, or await"):
        AsyncDecoder("smollm2")  # type: ignore[arg-type]

    async def life() -> None:
        many = AsyncDecoder(decoder)
        with pytest.raises(ValueError, match="the prompt is empty"):
            await many.generate([])
        with pytest.raises(ValueError, match="temperature is -1"):
            await many.generate("a", temperature=-1)
        with pytest.raises(ValueError, match="has not begun"):
            many.stream("a").result()

    asyncio.run(life())


def test_one_at_a_time_wait_for_each_other_and_closing_is_final() -> None:
    async def life() -> None:
        decoder = await AsyncDecoder.load("python-tiny", n_ctx=512, n_threads=1)
        async with decoder:
            stream = decoder.stream(PROMPTS[0], max_tokens=8)
            found = await asyncio.gather(
                *(decoder.generate(prompt, max_tokens=8) for prompt in PROMPTS),
                stream.__anext__(),
            )
            assert all(found)
            assert [step async for step in stream]
            unfinished = asyncio.create_task(decoder.generate(PROMPTS[0], **LONG))
            await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="closed before this answer was finished"):
            await unfinished
        await decoder.close()
        with pytest.raises(dflash_gguf.Error, match="the decoder is closed"):
            await decoder.generate("a")

    asyncio.run(life())


def test_wrong_arguments_are_named(decoder: Decoder) -> None:
    for gib, why in (("24G", "must be a number"), (-1, "at least"), (float("nan"), "finite")):
        with pytest.raises(ValueError, match=f"vram_gib is .*{why}"):
            dflash_gguf.plan("python-tiny", vram_gib=gib)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a text or a list of token ids"):
        decoder.generate(b"Hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompts is 'hello', must be a list"):
        decoder.generate_batch("hello")
    for call, name, hint in (
        (decoder.generate, "max_new_tokens", "max_tokens"),
        (decoder.chat, "temperatur", "temperature"),
    ):
        with pytest.raises(TypeError, match=f"{name} is no setting of an answer; .* {hint}\\?"):
            call("a", **{name: 1}, **({"template": "chatml"} if call == decoder.chat else {}))
    for function in (dflash_gguf.load, dflash_gguf.plan, dflash_gguf.fit):
        with pytest.raises(TypeError, match="ctx is no option of loading; did you mean n_ctx"):
            function("python-tiny", ctx=8)
        with pytest.raises(TypeError, match="must be a LoadConfig"):
            function("python-tiny", config={"n_ctx": 8})


def test_stop_texts_are_for_all_prompts_or_a_list_for_each(decoder: Decoder) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    stops = [["\n", ":"], ["("]]
    shared = decoder.generate_batch(PROMPTS[:2], stop=stops[0], **settings)
    own = decoder.generate_batch(PROMPTS[:2], stop=stops, **settings)
    for i, prompt in enumerate(PROMPTS[:2]):
        alone = decoder.generate(prompt, stop=stops[0], **settings)
        assert shared[i].tokens == alone.tokens
        assert own[i].tokens == decoder.generate(prompt, stop=stops[i], **settings).tokens


def test_results_have_the_log_probabilities_of_their_tokens(decoder: Decoder) -> None:
    settings = {"max_tokens": 6, "n_probs": 2}
    whole = decoder.generate(PROMPTS[0], **settings)
    assert len(whole.logprobs) == len(whole.tokens) > 2
    for token, chances in zip(whole.tokens, whole.logprobs, strict=True):
        assert chances.top[0] == (token, chances.log_prob)  # greedy
        assert len(chances.top) == 2
    assert whole.to_dict()["logprobs"][0]["log_prob"] == round(whole.logprobs[0].log_prob, 6)
    first, second = decoder.generate_batch(PROMPTS[:2], **settings)
    assert first.logprobs == whole.logprobs
    assert len(second.logprobs) == len(second.tokens)
    assert decoder.generate(PROMPTS[0], max_tokens=4).logprobs == ()


@pytest.mark.parametrize("n_tokens", [1, 2, 33, 150])
def test_prompts_are_scored_as_their_rows_say(decoder: Decoder, n_tokens: int) -> None:
    prompt = (decoder.tokenize(PROMPTS[0]) * 20)[:n_tokens]
    rows = decoder.logits(prompt).astype(np.float64)
    rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(
        1, keepdims=True
    )
    settings = {"n_probs": 3, "prompt_logprobs": True, "cache_prompt": False}
    found = decoder.generate(prompt, max_tokens=4, **settings)
    assert len(found.prompt_logprobs) == n_tokens - 1
    for row, token, chances in zip(rows, prompt[1:], found.prompt_logprobs, strict=False):
        assert chances.log_prob == pytest.approx(row[token], abs=1e-6)
        assert [i for i, _ in chances.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert found.tokens == decoder.generate(prompt, max_tokens=4).tokens
    silent = decoder.generate(prompt, max_tokens=0, **settings)
    assert silent.prompt_logprobs == found.prompt_logprobs
    both = decoder.generate_batch([prompt, PROMPTS[1]], max_tokens=4, **settings)
    assert both[0].prompt_logprobs == found.prompt_logprobs
    with pytest.raises(ValueError, match="prompt_logprobs needs n_probs"):
        decoder.generate(prompt, prompt_logprobs=True, cache_prompt=False)


def test_leaving_the_block_of_a_stream_ends_it(decoder: Decoder) -> None:
    with decoder.stream(PROMPTS[0], **LONG) as stream:
        next(stream)
    assert stream.result().stop_reason == "cancelled"
    assert not decoder._scheduler.running


def test_a_plan_and_a_fit_from_python() -> None:
    plan = dflash_gguf.plan("python-tiny", n_ctx=1024)
    assert plan.missing_bytes == 0
    fitted = dflash_gguf.fit("python-tiny", vram_gib=1, n_ctx=1024)
    assert fitted.config.n_ctx == 1024
    assert fitted.reason
    config = dflash_gguf.LoadConfig(n_ctx=512, cache_type_k="q8_0")
    assert dflash_gguf.plan("python-tiny", config=config).needed_bytes < plan.needed_bytes
    fitted = dflash_gguf.fit("python-tiny", vram_gib=1, config=config)
    assert (fitted.config.n_ctx, fitted.config.cache_type_k) == (512, "q8_0")
    with pytest.raises(dflash_gguf.Error, match="weights and the shortest context need"):
        dflash_gguf.fit("python-tiny", vram_gib=0.001, n_gpu_layers=99)
