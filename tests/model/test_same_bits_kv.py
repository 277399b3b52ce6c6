"""On the CPU a row has the bits of plain decoding, however the rows before it came into the cache.

For every type of K and V, architecture and number of threads: prompts cut in any way or found, and
verifies of chains and trees.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CLASSES, KINDS, VOCAB_SIZE
from device import DEVICE
from gguf_files import make_gguf
from numpy.typing import NDArray
from pairs import go_back

from dflash_gguf.config import CACHE_TYPES, LoadConfig
from dflash_gguf.native import Engine, Model, Sequence

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the CPU's kernels are meant")

N_TOKENS = 700
TOKENS = np.random.default_rng(6).integers(0, VOCAB_SIZE, N_TOKENS).tolist()
PREFIXES = (0, 100, 600)
# Heads of whole vectors and blocks, rotated where they are quantised, and of neither.
HEADS: dict[str, dict[str, Any]] = {"64": {"head_dim": 64}, "40": {"head_dim": 40}}
HEADS["few"] = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
HEADS["few"] |= {"num_hidden_layers": 1}
HEADS["delta 12"] = {"linear_key_head_dim": 12, "linear_value_head_dim": 12}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(kind: str, heads: str = "64") -> Path:
        return make_gguf(tmp_path_factory.mktemp(kind + heads), kind, **HEADS[heads])

    return made


def start(path: Path, cache_type: str, n_threads: int = 1, **settings: Any) -> Sequence:
    config = {"n_ctx": N_TOKENS, "n_ubatch": 512, "n_gpu_layers": 0, **settings}
    config |= {"cache_type_k": cache_type, "cache_type_v": cache_type}
    return Sequence(Engine(Model(str(path), LoadConfig(n_threads=n_threads, **config))))


def steps(sequence: Sequence, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of plain decoding, row by row."""
    rows = np.stack([sequence.decode(token).logits() for token in tokens])
    assert np.isfinite(rows).all() and np.ptp(rows) > 0
    return rows


def cuts(random: np.random.Generator, n: int) -> list[int]:
    """Sizes of pieces that sum up to n, most of them small."""
    ends = sorted({*random.integers(1, n, 4).tolist(), *random.integers(1, n, 2).tolist(), n})
    return np.diff([0, *ends]).tolist()


def tree_beside(
    random: np.random.Generator, spine: list[int], n: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of n nodes with `spine` as a path, and where this lies."""
    tokens, parents, path = spine[:1], [-1], [0]
    while len(tokens) < n:
        rest = n - len(tokens) - (len(spine) - len(path))
        if len(path) < len(spine) and (rest == 0 or random.random() < 0.6):
            path.append(len(tokens))
            tokens.append(spine[len(path) - 1])
            parents.append(path[-2])
        else:
            tokens.append(int(random.integers(0, VOCAB_SIZE)))
            parents.append(int(random.integers(0, len(parents))))
    return tokens, parents, path


def check_verifies(
    sequence: Sequence,
    random: np.random.Generator,
    tokens: list[int],
    expected: NDArray[np.float32],
) -> None:
    """Chains and trees over `tokens`, whose plain steps gave `expected`; all are forgotten."""
    for n in (2, 3, 7, 16, 64):
        rows = sequence.verify(tokens[:n])
        for i in range(n):
            np.testing.assert_array_equal(rows.logits(i), expected[i], err_msg=f"chain of {n}, {i}")
        sequence.commit(0)
        spine = tokens[: max(2, n - n // 3)]
        nodes, parents, path = tree_beside(random, spine, n)
        rows = sequence.verify_tree(nodes, parents)
        for depth, node in enumerate(path):
            np.testing.assert_array_equal(
                rows.logits(node), expected[depth], err_msg=f"tree of {n}, depth {depth}"
            )
        sequence.commit(0)


def check_everything(path: Path, cache_type: str, n_threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    expected = steps(start(path, cache_type), TOKENS)
    sequence = start(path, cache_type, n_threads)
    sequence.engine.reserve_verify(64)
    for n in PREFIXES:
        sequence.reset()
        for size in cuts(random, n) if n > 0 else []:  # of no more than a micro-batch each
            at = sequence.position
            rows = sequence.logits(TOKENS[at : at + size])
            np.testing.assert_array_equal(rows, expected[at : at + size], err_msg=f"{at} + {size}")
        check_verifies(sequence, random, TOKENS[n:], expected[n:])
        # accepted: a path of a tree, then plain steps
        nodes, parents, spine = tree_beside(random, TOKENS[n : n + 9], 14)
        sequence.verify_tree(nodes, parents)
        sequence.commit_path(spine)
        found = steps(sequence, TOKENS[n + 9 : n + 12])
        np.testing.assert_array_equal(found, expected[n + 9 : n + 12])
    # found, with another answer behind it
    sequence.reset()
    sequence.prefill(TOKENS[:610])
    prompt = [*TOKENS[:600], *TOKENS[630:660]]
    n_kept = go_back(sequence, prompt)
    assert n_kept == (0 if sequence.engine.model.n_recurrent else 600)
    found = sequence.prefill(prompt[n_kept:]).logits()
    fresh = start(path, cache_type)
    fresh.prefill(TOKENS[:1])
    assert len(prompt) == 630
    for token in prompt[1:-1]:
        fresh.decode(token).argmax()
    np.testing.assert_array_equal(found, fresh.decode(prompt[-1]).logits())


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("kind", CLASSES)
def test_rows_are_plain_steps(models: Any, kind: str, cache_type: str) -> None:
    seed = 16 * KINDS.index(kind) + CACHE_TYPES.index(cache_type)
    check_everything(models(kind), cache_type, 1 + seed % 4, seed)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen35"])
def test_heads_that_fit_no_vector(models: Any, kind: str, cache_type: str) -> None:
    check_everything(models(kind, "40"), cache_type, 2, 3)


def test_states_that_fit_no_vector(models: Any) -> None:
    check_everything(models("qwen35", "delta 12"), "f16", 2, 4)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_after_33000_tokens(models: Any, cache_type: str) -> None:
    """Cuts that differ, on a number of threads that differs, then plain steps and verifies."""
    n = 33_000
    random = np.random.default_rng(2)
    tokens = random.integers(0, VOCAB_SIZE, n + 64).tolist()
    first, second = (
        start(models("llama", "few"), cache_type, n_threads, n_ctx=n + 64, n_ubatch=n_ubatch)
        for n_threads, n_ubatch in ((1, 512), (3, 500))
    )
    first.prefill(tokens[:n])
    for size in cuts(random, n):
        second.prefill(tokens[second.position : second.position + size])
    expected = steps(first, tokens[n:])
    second.engine.reserve_verify(64)
    check_verifies(second, random, tokens[n:], expected)
    np.testing.assert_array_equal(steps(second, tokens[n : n + 2]), expected[:2])
