"""The drafter's logits against the reference package, and drafters that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import Parts, edited
from numpy.typing import NDArray
from pairs import (
    N_UBATCH,
    Pair,
    Reference,
    draft_logits,
    load_target,
    make_pair,
    open_pair,
    random_tokens,
)

from dflash_gguf.core import Drafter, Error, Session

N_TOKENS = 240
# Of the range max - min of the logits.
LIMIT = 2e-3
LENGTHS = (1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 3 * N_UBATCH + 7)

SEVEN = {"num_hidden_layers": 7}
SLIDING, FULL = "sliding_attention", "full_attention"


def sliding(window: int, *layer_types: str, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(layer_types),
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": list(layer_types),
        **more,
    }


def taps(*ids: int) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": list(ids)}}


# kind, settings of the target, settings of the drafter
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, one layer, one tap": ("llama", {}, {"num_hidden_layers": 1, **taps(0)}),
    "qwen3, five layers, five taps": (
        "qwen3",
        SEVEN,
        {"num_hidden_layers": 5, "block_size": 16, **taps(0, 1, 3, 4, 5)},
    ),
    "qwen3moe, three layers, taps out of order": (
        "qwen3moe",
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 3, "block_size": 2, **taps(3, 0, 2)},
    ),
    "llama tied, sliding": (
        "llama",
        {"tie_word_embeddings": True},
        sliding(8, SLIDING, SLIDING, block_size=12),
    ),
    "qwen3, mixed, window longer than most contexts": (
        "qwen3",
        SEVEN,
        sliding(40, SLIDING, FULL, SLIDING, FULL, **taps(1, 2, 3, 4)),
    ),
    "llama, mixed, causal": ("llama", {}, sliding(6, FULL, SLIDING, is_causal=True)),
    "llama, mixed, not causal": (
        "llama",
        {},
        sliding(6, FULL, SLIDING, is_causal=False, block_size=16),
    ),
    "qwen3, full, causal": ("qwen3", {}, {"is_causal": True}),
    "qwen35, multimodal rope": ("qwen35", {}, {"num_hidden_layers": 3}),
    "qwen35moe, mixed": ("qwen35moe", {}, sliding(9, SLIDING, FULL)),
    "llama, other heads and rope": (
        "llama",
        {},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}  # fmt: skip


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"{what}: {error:.1e}")
    assert error <= LIMIT, what
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1), what)


class Comparison:
    """A session that walks along the reference's tokens and drafts where it stands."""

    def __init__(self, pair: Pair, window: int | None = None, **settings: Any) -> None:
        self.tokens = random_tokens(N_TOKENS)
        self.reference = Reference(pair, self.tokens)
        self.window = window
        self.session = open_pair(pair, **settings, **({"draft_window": window} if window else {}))
        assert self.session.drafter is not None
        self.block_size = self.session.drafter.block_size

    @property
    def position(self) -> int:
        return self.session.position

    def prefill(self, n: int) -> None:
        self.session.prefill(self.tokens[self.position : self.position + n])

    def decode(self, n: int) -> None:
        for _ in range(n):
            self.session.decode(self.tokens[self.position])

    def round(self, n_accepted: int, n_rows: int) -> None:
        right = self.tokens[self.position : self.position + n_accepted]
        self.session.verify([*right, *[5] * (n_rows - n_accepted)])
        self.session.commit(n_accepted)

    def check(self, n_draft: int | None = None) -> None:
        n = n_draft or self.block_size - 1
        at = self.position
        found = draft_logits(self.session, self.tokens[at], n)
        expected = self.reference.draft_logits(at, n, self.window)
        assert_close(found, expected, f"draft of {n} after {at} tokens")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_reference(tmp_path: Path, case: str) -> None:
    kind, target, drafter = CASES[case]
    at = Comparison(make_pair(tmp_path, kind, target, **drafter))
    for n in LENGTHS:
        at.session.reset()
        at.prefill(n)
        at.check()
        at.check(1)  # nothing of the first draft is left
    at.check(at.block_size // 2 or 1)
    for n_accepted in (1, 3, 0, 8, 2):
        at.round(n_accepted, 8)
        at.check()
    at.round(5, 5)
    at.prefill(N_UBATCH + 3)
    at.decode(2)
    at.check()


def test_many_plain_rounds_before_a_draft(tmp_path: Path) -> None:
    """More features than may wait are injected in batches."""
    at = Comparison(make_pair(tmp_path, "llama", {}, **sliding(32, FULL, SLIDING)))
    at.prefill(5)
    at.decode(150)
    at.check()
    at.round(4, 64)
    at.decode(63)
    at.round(3, 60)
    at.check()


@pytest.mark.parametrize("window", [1, 7, 48, 130])
def test_a_draft_sees_the_last_positions_only(tmp_path: Path, window: int) -> None:
    """Beyond the ring: the reference is given only what the ring holds."""
    pair = make_pair(tmp_path, "qwen3", {}, **sliding(32, FULL, SLIDING))
    at = Comparison(pair, window)
    for n in (window, 100):
        at.session.reset()
        at.prefill(n)
        at.check()
    at.round(6, 8)
    at.check()
    at.decode(90)
    at.check()
    at.prefill(30)
    at.check()
    at.decode(1)
    at.check()
