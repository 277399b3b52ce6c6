"""Masks of allowed tokens: drafted text equals plain text under any masks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pairs import load_target, make_pair, random_tokens

from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import BatchEntry, Engine, LoadConfig, Sequence
from dflash_gguf.sampling.sampler import Sampler
from dflash_gguf.speculative.tree import Tree

N_TEXT, N_CTX = 24, 256
Mask = NDArray[np.uint32]


def words_of(allowed: NDArray[np.bool_]) -> Mask:
    """Packs flags of tokens into 32-bit words, lowest bit first."""
    flags = np.zeros((len(allowed) + 31) // 32 * 32, dtype=np.uint8)
    flags[: len(allowed)] = allowed
    return np.packbits(flags, bitorder="little").view("<u4")


def random_mask(text: list[int], n_vocab: int) -> Mask:
    """Returns a mask of at least one token that depends on the text only, like a grammar's."""
    random = np.random.default_rng(text)
    allowed = random.random(n_vocab) < random.choice([0.02, 0.3, 0.9])
    allowed[random.integers(n_vocab)] = True
    return words_of(allowed)


class Answer:
    """A masked text of one sequence, decoded plainly or by trees."""

    def __init__(self, engine: Engine, prompt: list[int], config: DecodeConfig) -> None:
        self.engine, self.sequence = engine, Sequence(engine)
        self.text, self.n_prompt, self.sampler = list(prompt), len(prompt), Sampler(config)
        self.sequence.prefill(prompt[:-1])

    def mask(self, more: list[int]) -> Mask:
        return random_mask([*self.text, *more], self.engine.model.n_vocab)

    @property
    def answer(self) -> list[int]:
        return self.text[self.n_prompt : self.n_prompt + N_TEXT]


def decode_plainly(answers: list[Answer]) -> None:
    while any(len(x.answer) < N_TEXT for x in answers):
        engine = answers[0].engine
        engine.run([BatchEntry(x.sequence, x.text[-1:]) for x in answers])
        masks = [x.mask([])[None] for x in answers]
        requests = [
            x.sampler.sample_request(x.sequence, x.text, 1)._replace(masks=mask)
            for x, mask in zip(answers, masks, strict=True)
        ]
        for x, tokens in zip(answers, engine.sample(requests), strict=True):
            x.text += tokens


def decode_by_trees(answers: list[Answer], guess: Callable[[Answer, int], int]) -> list[int]:
    """Returns the accepted nodes of each round. guess(x, i): likely token i of text x."""
    accepted = []
    while any(len(x.answer) < N_TEXT for x in answers):
        engine, trees, masks = answers[0].engine, [], []
        for x in answers:
            likely = [guess(x, len(x.text) + i) for i in range(3)]
            tokens, parents = [x.text[-1], *likely, 7], [-1, 0, 1, 2, 0]
            trees.append(Tree.of(tokens, parents))
            paths_to = ([], *(likely[:n] for n in (1, 2, 3)), [7])
            masks.append(np.array([x.mask(path) for path in paths_to]))
        entries = [
            BatchEntry(x.sequence, tree.tokens, parents=tree.parents, is_verify=True)
            for x, tree in zip(answers, trees, strict=True)
        ]
        engine.run(entries)
        requests = [
            x.sampler.sample_request(x.sequence, x.text, len(tree))._replace(masks=mask)
            for x, tree, mask in zip(answers, trees, masks, strict=True)
        ]
        paths = []
        for x, tree, tokens in zip(answers, trees, engine.sample(requests), strict=True):
            paths.append((x.sequence, tree.accepted(tokens)))
            accepted.append(len(tokens) - 1)
            x.text += tokens
        engine.commit(paths)
    return accepted


def engine_of(folder: Path, kind: str, n_parallel: int) -> Engine:
    model = load_target(make_pair(folder, kind).target)
    config = LoadConfig(
        n_ctx=N_CTX, n_threads=2, n_parallel=n_parallel, cache_type_k="f32", cache_type_v="f32"
    )
    engine = Engine(model, N_CTX, config=config)
    engine.reserve_verify(5 * n_parallel)
    return engine


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masked_texts_are_the_same_drafted_and_plainly(
    tmp_path: Path, kind: str, n_parallel: int, temperature: float
) -> None:
    engine = engine_of(tmp_path, kind, n_parallel)
    configs = [
        DecodeConfig(temperature=temperature, seed=i, top_k=(0, 40, 5)[i % 3], repeat_penalty=1.1)
        for i in range(n_parallel)
    ]
    prompts = [random_tokens(9 + i, seed=i) for i in range(n_parallel)]

    def begin() -> list[Answer]:
        return [Answer(engine, *x) for x in zip(prompts, configs, strict=True)]

    plain = begin()
    decode_plainly(plain)
    for x in plain:
        for i, token in enumerate(x.answer):
            mask = random_mask(x.text[: x.n_prompt + i], engine.model.n_vocab)
            assert mask[token // 32] >> (token % 32) & 1
        x.sequence.close()
    right = {tuple(x.text[: x.n_prompt]): x.text for x in plain}
    drafted = begin()

    def guess(x: Answer, at: int) -> int:
        text = right[tuple(x.text[: x.n_prompt])]
        return text[at] if at < len(text) and at % 3 else 5

    accepted = decode_by_trees(drafted, guess)
    assert [x.answer for x in drafted] == [x.answer for x in plain]
    assert sum(accepted) > N_TEXT / 4
    engine.close()


def test_masks_that_allow_nothing_sample_nothing_and_other_sizes_are_refused(
    tmp_path: Path,
) -> None:
    engine = engine_of(tmp_path, "llama", 1)
    answer = Answer(engine, random_tokens(5), DecodeConfig(temperature=0.0))
    engine.run([BatchEntry(answer.sequence, answer.text[-1:])])
    request = answer.sampler.sample_request(answer.sequence, answer.text, 1)
    with pytest.raises(ValueError, match=r"masks have the shape \[1, 3\], must have \[1, 14\]"):
        engine.sample([request._replace(masks=np.ones((1, 3), dtype=np.uint32))])
    assert engine.sample([request._replace(masks=np.zeros((1, 14), dtype=np.uint32))]) == [[]]
    assert engine.sample([request])[0]
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_one_token_left_cost_what_others_cost(temperature: float) -> None:
    """All tokens of a row with one token left, as under a constraint, had been sorted."""
    sampler = Sampler(DecodeConfig(temperature=temperature))
    whole = np.random.default_rng(1).standard_normal(256_000).astype(np.float32)
    alone = np.where(np.arange(256_000) == 7, whole, np.float32(-np.inf))

    def seconds(row: NDArray[np.float32]) -> float:
        started = time.perf_counter()
        sampler.sample(row, [], 3)
        return time.perf_counter() - started

    assert min(seconds(alone) for _ in range(20)) < 10 * min(seconds(whole) for _ in range(20))
