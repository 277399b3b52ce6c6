"""Chains: greedy, under penalties and bans, and with the target's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.proposer import Chain, Draft
from dflash_gguf.sampling import Sampler

N_VOCAB = 200


class Drafter:
    """Rows depend on the position only; keeps what it was asked."""

    max_draft = 15

    def __init__(self, rows: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.rows = rows
        self.asked: list[tuple[int, int, int]] = []

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        self.asked.append((last_token, n_draft, k))
        asked = self.rows[:n_draft]
        order = np.argsort(-asked, axis=1, kind="stable")[:, :k]
        logits = np.take_along_axis(asked, order, axis=1)
        with np.errstate(invalid="ignore"):
            log_sum_exp = np.logaddexp.reduce(asked, axis=1)
        return Draft(order.astype(np.int32), logits, log_sum_exp)


def rows(n: int = 6, seed: int = 0, scale: float = 2.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    noise = scale * np.random.default_rng(seed).standard_normal((n, N_VOCAB))
    return noise.astype(np.float32)


def by_target(sampler: Sampler, scores: Any, seen: Sequence[int]) -> list[int]:
    """What the target draws from the same rows along its own path."""
    path = list(seen)
    for row in scores:
        path.append(sampler.choose(row, path, len(path)).token)
    return path[len(seen) :]


def test_greedy_takes_the_best_of_each_row_and_asks_for_no_more() -> None:
    drafter = Drafter(rows())
    chain = Chain(drafter)
    assert chain.propose([5, 9], 6, Sampler(DecodeConfig())) == drafter.rows.argmax(1).tolist()
    assert drafter.asked == [(9, 6, 1)]
    assert chain.max_draft == 15


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 0.3},
        {"temperature": 1.0},
        {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 20},
        {"temperature": 1.0, "repeat_penalty": 1.5, "presence_penalty": 0.5},
        {"repeat_penalty": 3.0, "frequency_penalty": 1.0},
    ],
)
def test_a_perfect_drafter_draws_what_the_target_draws(config: dict[str, Any]) -> None:
    for seed in range(30):
        sampler = Sampler(DecodeConfig(seed=seed, **config), banned=[3, 77])
        drafter = Drafter(rows(seed=seed))
        seen = list(np.random.default_rng(seed).integers(N_VOCAB, size=40))
        found = Chain(drafter, n_ranked=60).propose(seen, 6, sampler)
        assert found == by_target(sampler, drafter.rows, seen)


def test_shared_noise_agrees_more_often_than_the_best_logit() -> None:
    n_shared = n_best = 0
    for seed in range(400):
        sampler = Sampler(DecodeConfig(temperature=1.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0))
        target = rows(1, seed)
        drafter = Drafter(target + rows(1, seed + 1000, scale=0.5))
        drawn = sampler.choose(target[0], [1], 1).token
        n_shared += Chain(drafter).propose([1], 1, sampler) == [drawn]
        n_best += drafter.rows[0].argmax() == drawn
    assert n_shared > 1.5 * n_best


def test_banned_tokens_are_not_proposed() -> None:
    drafter = Drafter(rows())
    best = drafter.rows.argmax(1).tolist()
    found = Chain(drafter).propose([1], 6, Sampler(DecodeConfig(), banned=best))
    assert not set(found) & set(best)


def test_candidates_that_are_all_banned_are_proposed_as_they_are() -> None:
    drafter = Drafter(rows(2))
    banned = np.argsort(-drafter.rows[0])[:32].tolist()
    found = Chain(drafter).propose([1], 2, Sampler(DecodeConfig(), banned=banned))
    assert found[0] == drafter.rows[0].argmax()
    assert found[1] not in banned


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_said_once_and_draft_nothing(bad: float) -> None:
    drafter = Drafter(rows())
    drafter.rows[2] = bad
    chain = Chain(drafter)
    with pytest.warns(RuntimeWarning, match="the drafter's scores are not finite numbers"):
        assert chain.propose([1], 6, Sampler(DecodeConfig())) == []
    assert chain.propose([1], 6, Sampler(DecodeConfig())) == []
    assert len(chain.propose([1], 2, Sampler(DecodeConfig()))) == 2
