"""A second kind of drafter, whose steps depend on the path and whose state grows with the text."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import pytest
from pairs import make_pair, open_pair, overfit, random_tokens
from stepwise import Stepwise

from dflash_gguf.config import DecodeConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Engine
from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.proposers.proposer import Proposer, SpeculativeState
from dflash_gguf.speculative.tree import Tree

N_VOCAB = 300


class Timeline:
    """Stands for a sequence, as the key of its state."""


def ask(proposer: Proposer, texts: list[list[int]], timelines: list[Timeline]) -> list[Tree | None]:
    sampler = DraftScorer(DecodeConfig())
    return proposer.propose(
        [
            SpeculativeState(timeline, text, sampler, 99, 99, n_positions=4, n_nodes=9)
            for text, timeline in zip(texts, timelines, strict=True)
        ]
    )


def test_several_sequences_take_the_passes_of_one() -> None:
    texts = [random_tokens(n, seed=n) for n in (5, 17, 2)]
    timelines = [Timeline() for _ in texts]
    proposer = Stepwise(N_VOCAB)
    together = ask(proposer, texts, timelines)
    assert proposer.n_passes == 4
    alone = [ask(Stepwise(N_VOCAB), [text], [Timeline()])[0] for text in texts]
    assert together == alone
    assert len({tuple(tree.tokens) for tree in together if tree is not None}) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_it_drafts_from_the_present_prompt_alone(tmp_path: Path, kind: str) -> None:
    proposed: list[tuple[list[int], Tree]] = []

    class Watched(Stepwise):
        def propose(self, requests: Tokens[SpeculativeState]) -> list[Tree | None]:
            found = super().propose(requests)
            for request, tree in zip(requests, found, strict=True):
                assert tree is not None
                proposed.append((list(request.history), tree))
            return found

    with Decoder(open_pair(make_pair(tmp_path, kind, block_size=8)), None) as decoder:
        n_vocab = decoder.model.n_vocab
        proposer = Watched(n_vocab)
        first = random_tokens(30)
        prompts = [first, first[:12], [*first[:20], *random_tokens(9, seed=1)], first[:5], first]
        for draft in ("tree", "auto"):
            for prompt in prompts:
                plain = decoder.generate(prompt, draft="none", max_tokens=20)
                decoder._speculative.proposers = [proposer]
                found = decoder.generate(prompt, draft=draft, max_tokens=20)
                assert found.tokens == plain.tokens
                assert proposer.kept.position(decoder.sequence) <= len(prompt) + 20
        assert proposer.kept.n_truncated > 3
    assert len(proposed) > 50
    for seen, tree in proposed:
        fresh = Stepwise(n_vocab)
        request = SpeculativeState(Timeline(), seen, DraftScorer(DecodeConfig()), 99, 99)
        request.n_positions, request.n_nodes = max(tree.depths), len(tree) - 1
        assert fresh.propose([request]) == [tree]


class Knowing(Stepwise):
    """A proposer whose first candidate of each step is the token of a known text."""

    def __init__(self, n_vocab: int, text: list[int]) -> None:
        super().__init__(n_vocab)
        self._text = text

    def propose(self, requests: Tokens[SpeculativeState]) -> list[Tree | None]:
        trees = super().propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            assert tree is not None
            coming = self._text[len(request.history) :]
            for node, depth in enumerate(tree.depths):
                if node % 2:
                    tree.tokens[node] = coming[depth - 1] if depth <= len(coming) else 0
        return trees


@pytest.mark.parametrize("better", ["dflash", "stepwise"])
def test_the_better_of_two_drafters_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: str
) -> None:
    """Target passes are slowed down to the duration of a large model's."""
    pair, prompt = make_pair(tmp_path, "llama", block_size=8), random_tokens(1)
    with Decoder(open_pair(pair), None) as decoder:
        settings: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        plain = decoder.generate(prompt, draft="none", **settings).tokens
        n_vocab = decoder.model.n_vocab
    if better == "dflash":
        pair = overfit(pair, "llama", tmp_path / "trained.gguf", prompt, plain)
    run = Engine.run

    def slow_run(*args: Any) -> Any:
        time.sleep(0.003)
        return run(*args)

    monkeypatch.setattr(Engine, "run", slow_run)
    with Decoder(open_pair(pair), None) as decoder:
        known = Knowing(n_vocab, [*prompt, *plain] if better == "stepwise" else [])
        decoder._speculative.proposers = [*decoder._speculative.proposers[:1], known]
        for _ in range(3):
            found = decoder.generate(prompt, draft="auto", **settings)
            assert found.tokens == plain
    accepted = {name: n for name, (_, n) in found.candidates_by_proposer.items()}
    assert accepted[better] > 100
    other = "stepwise" if better == "dflash" else "dflash"
    assert accepted.get(other, 0) < 20
