"""Suffix drafts on tiny models keep the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CLASSES
from half_right import HalfRight
from pairs import make_pair, open_pair, random_tokens
from proposers import request_of

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Engine, Model, Sequence

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "0.7 with penalties": {"temperature": 0.7, "seed": 4, "repeat_penalty": 1.3},
    "0.3 from few": {"temperature": 0.3, "seed": 5, "top_k": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", CLASSES)
def test_copies_give_the_tokens_of_plain_decoding(tmp_path: Path, kind: str, name: str) -> None:
    config = {"max_tokens": 40, **SETTINGS[name]}
    pair = make_pair(tmp_path, kind, block_size=16)
    with Decoder(open_pair(pair, draft_window=30), None) as decoder:
        (copy,) = (x for x in decoder._speculative.proposers if x.name == "suffix")
        prompt = random_tokens(30)
        n_copied = 0
        for number in range(3):
            plain = decoder.generate(prompt, draft="none", **config)
            half = HalfRight(
                plain.tokens,
                len(prompt),
                lambda r: r % 5,
                width=2,
                rank=lambda i: i // 4 % 2,
                n_vocab=decoder.model.n_vocab,
            )
            decoder._speculative.proposers = [copy, half]
            # The indexed text contains the answer, with every ninth token changed.
            spoilt = [t if i % 9 else t + 1 for i, t in enumerate(plain.tokens)]
            for draft, types in (
                ("chain", "suffix"),
                ("tree", "suffix"),
                ("tree", "suffix,half right"),
                ("auto", "suffix"),
                ("auto", None),
            ):
                copy.forget(decoder.sequence)
                texts = request_of([*prompt[-2:], *spoilt], decoder.sequence)
                copy.start(texts)
                found = decoder.generate(prompt, draft=draft, draft_type=types, **config)
                assert found.tokens == plain.tokens, (draft, types)
                n_copied += found.candidates_by_proposer.get("suffix", (0, 0))[1]
                if types == "suffix,half right":
                    assert {"suffix", "half right"} == set(found.candidates_by_proposer)
                    taken = [taken for _, taken in found.candidates_by_proposer.values()]
                    assert max(taken) <= found.n_accepted <= sum(taken)
            prompt = [*prompt, *plain.tokens, *random_tokens(3, seed=number)]
        assert n_copied > 60


def test_without_a_drafter_copies_draft(tiny_gguf: Callable[[str], Path]) -> None:
    config = LoadConfig(n_ctx=256, n_threads=1, n_gpu_layers=0)
    with Decoder(Sequence(Engine(Model(str(tiny_gguf("llama")), config))), None) as decoder:
        plain = decoder.generate([1, 2, 3], draft="none", max_tokens=100)
        found = decoder.generate([1, 2, 3], draft="chain", max_tokens=100, draft_max=9)
        assert found.tokens == plain.tokens
        assert list(found.candidates_by_proposer) == ["suffix"]
        assert found.draft == "chain"
        again = decoder.generate([1, 2, 3], draft="chain", max_tokens=100, draft_max=9)
        assert again.tokens == plain.tokens
        assert again.n_accepted > 80
        decoder.forget_texts()
        assert decoder.generate([1, 2, 3], draft="auto", max_tokens=100).tokens == plain.tokens


@pytest.mark.parametrize("way", ["cancelled", "closed"])
def test_texts_are_whole_after_an_answer_was_left(
    tiny_gguf: Callable[[str], Path], way: str
) -> None:
    config = LoadConfig(n_ctx=256, n_threads=1, n_gpu_layers=0)
    with Decoder(Sequence(Engine(Model(str(tiny_gguf("llama")), config))), None) as decoder:
        plain = decoder.generate([1, 2, 3], draft="none", max_tokens=60)
        for n in (1, 4, 9, 2):
            left = iter([False] * n)
            stop = (lambda left=left: next(left, True)) if way == "cancelled" else None
            stream = decoder.stream([1, 2, 3], draft="chain", max_tokens=60, cancelled=stop)
            for number, _ in enumerate(stream):
                if way == "closed" and number == n:
                    stream.close()
                    break
            found = decoder.generate([1, 2, 3], draft="chain", max_tokens=60)
            assert found.tokens == plain.tokens
