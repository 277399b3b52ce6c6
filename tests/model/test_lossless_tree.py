"""Verified trees do not change the tokens of plain decoding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import KINDS
from half_right import HalfRight
from pairs import N_CTX, Pair, make_pair, n_left, open_pair, random_tokens

from dflash_gguf.decoder import Decoder

BUDGETS = (1, 2, 7, 8, 9, 15, 16, 22, 31, 64, 255)
N_TOKENS = 36
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "0.3 with every cut": {"temperature": 0.3, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "0.7 with penalties": {"temperature": 0.7, "seed": 4, "repeat_penalty": 1.3},
    "1.0 from all tokens": {"temperature": 1.0, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    sliding = {
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    folder = tmp_path_factory.mktemp
    return {kind: make_pair(folder(kind), kind, block_size=16, **sliding) for kind in KINDS}


def open_decoder(pair: Pair) -> Decoder:
    sequence = open_pair(pair, draft_window=30)
    return Decoder(sequence, None)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_give_the_tokens_of_plain_decoding(
    pairs: dict[str, Pair], kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"max_tokens": N_TOKENS, **SETTINGS[name]}
    with open_decoder(pairs[kind]) as decoder:
        n_vocab = decoder.model.n_vocab
        prompt = random_tokens(37)
        plain = decoder.generate(prompt, draft="none", **config)
        left: Counter[int] = Counter()
        for number, budget in enumerate(BUDGETS):
            drafted = decoder.generate(
                prompt, draft="tree", tree_budget=budget, tree_main_chain=number % 2 == 1, **config
            )
            assert drafted.tokens == plain.tokens
            width = 1 + number % 4
            proposer = HalfRight(
                plain.tokens,
                len(prompt),
                lambda r: 3 + 5 * r % 13,
                width=width,
                rank=lambda i, width=width: (i // 3) % width,
                n_vocab=n_vocab,
            )
            with monkeypatch.context() as patch:
                patch.setattr(decoder._speculative, "proposers", [proposer])
                knowing = decoder.generate(prompt, draft="tree", tree_budget=budget, **config)
            assert knowing.tokens == plain.tokens
            assert n_left(decoder) == len(prompt) + N_TOKENS - 1
            left.update({n: x for n, x in enumerate(knowing.accept_histogram or ()) if n})
            again = decoder.logits([*prompt, *plain.tokens[:5]])[-1]
            assert again.argmax() == plain.tokens[5] or config != {"max_tokens": N_TOKENS}
        assert max(left) >= 5
        assert min(left) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_path_leaves_the_spine_at_every_depth(
    pairs: dict[str, Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right candidate is third at one depth, else first: all 15 tokens are accepted."""
    with open_decoder(pairs[kind]) as decoder:
        prompt = random_tokens(20, seed=2)
        plain = decoder.generate(prompt, draft="none", max_tokens=17)
        for depth in range(1, 16):
            proposer = HalfRight(
                plain.tokens,
                len(prompt),
                lambda _: 99,
                width=3,
                rank=lambda i, depth=depth: 2 if i == depth else 0,
                n_vocab=decoder.model.n_vocab,
            )
            # Equal scores favour short paths: two chains of 15 nodes need a hand-made tree.
            with monkeypatch.context() as patch:
                patch.setattr(decoder._speculative, "proposers", [proposer])
                patch.setattr("half_right.best_first_tree", spine_and_branch(depth))
                result = decoder.generate(prompt, draft="tree", tree_budget=60, max_tokens=17)
            assert result.tokens == plain.tokens
            assert (result.n_accepted, result.rounds) == (15, 1)
            more = decoder.generate(
                [*prompt, *plain.tokens, 3, 4], draft="none", max_tokens=8
            ).tokens
            decoder.reset()
            assert (
                decoder.generate([*prompt, *plain.tokens, 3, 4], draft="none", max_tokens=8).tokens
                == more
            )


def spine_and_branch(depth: int) -> Any:
    """Stands in for best_first_tree(): the main chain, and a copy that branches at `depth`."""
    from dflash_gguf.speculative.ddtree import chain
    from dflash_gguf.speculative.tree import Tree

    def build(root: int, candidates: Any, budget: int, *, main_chain: bool = False) -> Tree:  # noqa: ARG001
        tree = chain(root, candidates, 15)
        tokens, parents, depths = tree.tokens[:], tree.parents[:], tree.depths[:]
        parent = depth - 1
        for at in range(depth, 16):
            parents.append(parent)
            tokens.append(int(candidates.tokens[at - 1, 2 if at == depth else 0]))
            depths.append(at)
            parent = len(tokens) - 1
        return Tree(tokens, parents, depths, [0.0] * len(tokens))

    return build


def test_a_tree_at_the_end_of_the_context(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_decoder(pairs["llama"]) as decoder:
        prompt = random_tokens(N_CTX - 20)
        plain = decoder.generate(prompt, draft="none")
        assert plain.stop_reason == "context"
        proposer = HalfRight(
            plain.tokens,
            len(prompt),
            lambda r: r % 4,
            width=2,
            n_vocab=decoder.model.n_vocab,
        )
        for budget in (9, 64):
            assert decoder.generate(prompt, draft="tree", tree_budget=budget).tokens == plain.tokens
            with monkeypatch.context() as patch:
                patch.setattr(decoder._speculative, "proposers", [proposer])
                result = decoder.generate(prompt, draft="tree", tree_budget=budget)
            assert (result.tokens, result.stop_reason) == (plain.tokens, "context")


def test_automatic_drafting_gives_the_tokens_of_plain_decoding(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_decoder(pairs["qwen3"]) as decoder:
        prompt = random_tokens(30)
        for settings in SETTINGS.values():
            config = {"max_tokens": 200, **settings}
            plain = decoder.generate(prompt, draft="none", **config)
            proposer = HalfRight(
                plain.tokens,
                len(prompt),
                lambda r: 6 + 3 * r % 10,
                width=3,
                rank=lambda i: (i // 5) % 2,
                n_vocab=decoder.model.n_vocab,
            )
            assert decoder.generate(prompt, draft="auto", **config).tokens == plain.tokens
            with monkeypatch.context() as patch:
                patch.setattr(decoder._speculative, "proposers", [proposer])
                result = decoder.generate(prompt, draft="auto", **config)
            assert result.tokens == plain.tokens
            assert sum((result.rounds_by_draft or {}).values()) == result.rounds
