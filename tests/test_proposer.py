"""The drafter's candidates: greedy, under penalties and bans, with the target's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.core import Draft
from dflash_gguf.draft.calibration import Calibration, Calibrations, Features
from dflash_gguf.draft.proposer import DFlash
from dflash_gguf.draft.tree import Candidates
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
        best = np.take_along_axis(asked, order, axis=1)
        with np.errstate(all="ignore"):  # some rows are not finite
            return Draft(order.astype(np.int32), best, np.log(np.exp(asked).sum(axis=1)))


def propose(
    drafter: Drafter,
    sampler: Sampler,
    seen: Sequence[int] = (1,),
    n: int = 6,
    *,
    is_narrow: bool = True,
    calibrations: Calibrations | None = None,
    **settings: Any,
) -> Candidates:
    source = DFlash(drafter, calibrations or Calibrations(), **settings)
    found = source.propose(seen, n, sampler, is_narrow=is_narrow)
    assert found is not None
    return found


def rows(n: int = 6, seed: int = 0, scale: float = 2.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    noise = scale * np.random.default_rng(seed).standard_normal((n, N_VOCAB))
    return noise.astype(np.float32)


def by_target(sampler: Sampler, scores: Any, seen: Sequence[int]) -> list[int]:
    """What the target draws from the same rows along its own path."""
    path = list(seen)
    for row in scores:
        path.append(sampler.choose(row, path, len(path)).token)
    return path[len(seen) :]


def test_a_greedy_chain_takes_the_best_of_each_row_and_asks_for_no_more() -> None:
    drafter = Drafter(rows())
    found = propose(drafter, Sampler(DecodeConfig()), [5, 9])
    assert found.tokens.tolist() == [[token] for token in drafter.rows.argmax(1)]
    assert drafter.asked == [(9, 6, 1)]
    assert DFlash(drafter, Calibrations()).max_draft == 15


@pytest.mark.parametrize("config", [{}, {"temperature": 0.8, "seed": 5}])
def test_candidates_are_the_best_and_their_chances_fall(config: dict[str, Any]) -> None:
    drafter = Drafter(rows())
    found = propose(drafter, Sampler(DecodeConfig(**config)), is_narrow=False)
    assert drafter.asked == [(1, 6, 32)]
    assert found.tokens.shape == found.log_chances.shape == (6, 32)
    best = np.argsort(-drafter.rows, axis=1)[:, :32]
    assert (np.sort(found.tokens) == np.sort(best)).all()
    assert (np.diff(found.log_chances) <= 0).all()
    assert (np.exp(found.log_chances).sum(axis=1) < 1.0).all()
    if not config:
        q = drafter.rows - np.log(np.exp(drafter.rows).sum(axis=1))[:, None]
        expected = np.take_along_axis(q, found.tokens, 1)
        np.testing.assert_allclose(found.log_chances, expected, atol=1e-5)


def certain(sampled: bool) -> Calibrations:
    """Calibrations of a drafter that is the target: its noise tells all."""
    known = Calibrations()
    for key in ((0.3, False), (1.0, False), (1.0, True), (0.0, True)):
        calibration = known.of(*key)
        calibration._prior = np.array([1.0 / key[0] if sampled and key[0] else 1.0, 0, 1, 50, 0])
    return known


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 0.3},
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
        known = certain("temperature" in config)
        found = propose(drafter, sampler, seen, calibrations=known, n_ranked=150)
        assert found.tokens[:, 0].tolist() == by_target(sampler, drafter.rows, seen)


def test_shared_noise_agrees_more_often_than_the_best_logit_and_learns_how_much() -> None:
    calibrations = Calibrations()
    n_learned = n_best = 0
    for seed in range(600):
        sampler = Sampler(DecodeConfig(temperature=1.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0))
        target = rows(1, seed)
        drafter = Drafter(target + rows(1, seed + 1000, scale=0.5))
        drawn = sampler.choose(target[0], [1], 1).token
        source = DFlash(drafter, calibrations)
        found = source.propose([1], 1, sampler, is_narrow=True)
        assert found is not None
        source.observe([drawn])
        if seed >= 200:
            n_learned += found.tokens[0, 0] == drawn
            n_best += drafter.rows[0].argmax() == drawn
    assert n_learned > 1.5 * n_best
    a, _, c, _, _ = calibrations.of(1.0, False).weights(1)[0]
    assert c > 0.8
    assert a > 0.5


def test_noise_that_tells_nothing_is_left_out() -> None:
    calibrations = Calibrations()
    for seed in range(300):
        sampler = Sampler(DecodeConfig(temperature=1.0, seed=seed))
        target = rows(1, seed)
        drafter = Drafter(target)
        source = DFlash(drafter, calibrations)
        source.propose([1], 1, sampler, is_narrow=False)
        source.observe(
            [int((target[0] + np.random.default_rng(seed).gumbel(size=N_VOCAB)).argmax())]
        )
    assert calibrations.of(1.0, False).weights(1)[0, 2] < 0.1


def test_what_the_target_chose_is_looked_up_until_the_draft_ends() -> None:
    drafter, known = Drafter(rows()), Calibrations()
    source, sampler = DFlash(drafter, known), Sampler(DecodeConfig())
    source.observe([1, 2])
    expected = Calibration()
    for n_tokens in (1, 3, 6, 7):
        found = propose(drafter, sampler, is_narrow=False)
        features = Features(propose(drafter, sampler, is_narrow=False).log_chances)
        source.propose([1], 6, sampler, is_narrow=False)
        chosen = [*found.tokens[:5, 2].tolist(), 199, 5]  # 199 is no candidate
        source.observe(chosen[:n_tokens])
        expected.observe(features, [2, 2, 2, 2, 2, 32][:n_tokens])
        source.observe([1, 2])
    assert 199 not in drafter.rows[5].argsort()[-32:]
    np.testing.assert_allclose(known.of(0.0, False).weights(6), expected.weights(6), atol=1e-5)


def test_banned_tokens_are_not_proposed() -> None:
    drafter = Drafter(rows())
    best = drafter.rows.argmax(1).tolist()
    found = propose(drafter, Sampler(DecodeConfig(), banned=best))
    assert not set(found.tokens[np.isfinite(found.log_chances)]) & set(best)


def test_candidates_that_are_all_banned_are_proposed_as_they_are() -> None:
    drafter = Drafter(rows(2))
    banned = np.argsort(-drafter.rows[0])[:32].tolist()
    found = propose(drafter, Sampler(DecodeConfig(), banned=banned), n=2)
    assert found.tokens[0, 0] == drafter.rows[0].argmax()
    assert found.tokens[1, 0] not in banned


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_said_and_draft_nothing(bad: float) -> None:
    drafter = Drafter(rows())
    drafter.rows[2] = bad
    source, sampler = DFlash(drafter, Calibrations()), Sampler(DecodeConfig())
    for is_narrow in (True, False):
        with pytest.warns(RuntimeWarning, match="the drafter's scores are not finite numbers"):
            assert source.propose([1], 6, sampler, is_narrow=is_narrow) is None
    assert source.propose([1], 2, sampler, is_narrow=True) is not None
