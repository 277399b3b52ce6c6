"""The drafter's candidates: greedy, under penalties and bans, with the target's noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import Draft, DraftRequest
from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.sampling.sampler import Sampler
from dflash_gguf.speculative.calibration import Calibration, Calibrations, Features
from dflash_gguf.speculative.ddtree import PositionCandidates
from dflash_gguf.speculative.proposers.dflash import N_RANKED, DFlash
from dflash_gguf.speculative.proposers.proposer import (
    CHAIN,
    MAIN_CHAIN,
    TREE,
    SpeculativeState,
    draft_for_all,
)
from dflash_gguf.speculative.tree import Tree

N_VOCAB = 200


class Drafter:
    """A drafter whose rows depend on the position only; records its calls."""

    max_draft = 15

    def __init__(self, rows: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.rows = rows
        self.engine: Any = None
        self.asked: list[tuple[int, int, int]] = []

    def draft(self, last_token: int, n_draft: int, k: int = 1, _drafter: int = 0) -> Draft:
        self.asked.append((last_token, n_draft, k))
        asked = self.rows[:n_draft]
        order = np.argsort(-asked, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(asked, order, axis=1)
        with np.errstate(all="ignore"):
            return Draft(order.astype(np.int32), best, np.log(np.exp(asked).sum(axis=1)))


class Passes:
    """An engine that drafts for each sequence in turn, and records the requests per pass."""

    max_verify = 2 * 7

    def __init__(self) -> None:
        self.n_requests: list[int] = []

    def draft(self, requests: Sequence[DraftRequest], k: int, _drafter: int = 0) -> list[Draft]:
        self.n_requests.append(len(requests))
        assert sum(request.n_draft + 1 for request in requests) <= self.max_verify
        return [cast(Drafter, x.sequence).draft(x.last_token, x.n_draft, k) for x in requests]


def request_of(
    drafter: Drafter,
    sampler: DraftScorer,
    seen: Sequence[int] = (1,),
    n: int = 6,
    shape: str = CHAIN,
) -> SpeculativeState:
    return SpeculativeState(
        drafter, seen, sampler, n_left=99, n_room=99, n_positions=n, n_nodes=n, shape=shape
    )


def propose(
    drafter: Drafter,
    sampler: DraftScorer,
    seen: Sequence[int] = (1,),
    n: int = 6,
    *,
    shape: str = CHAIN,
) -> Tree:
    source = DFlash(drafter.max_draft)
    (found,) = source.propose([request_of(drafter, sampler, seen, n, shape)])
    assert found is not None
    return found


def ranked(
    drafter: Drafter,
    sampler: DraftScorer,
    seen: Sequence[int] = (1,),
    calibrations: Calibrations | None = None,
    n_ranked: int = N_RANKED,
) -> PositionCandidates:
    source = DFlash(drafter.max_draft)
    source.calibrations = calibrations or Calibrations()
    request = request_of(drafter, sampler, seen, 6, TREE)
    (draft,) = draft_for_all([request], [n_ranked])
    (found,) = source._ranked([(request, draft)])
    return found


def rows(n: int = 6, seed: int = 0, scale: float = 2.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    noise = scale * np.random.default_rng(seed).standard_normal((n, N_VOCAB))
    return noise.astype(np.float32)


def by_target(sampler: Sampler, scores: Any, seen: Sequence[int]) -> list[int]:
    """Returns the target's samples from the same rows along its own path."""
    path = list(seen)
    for row in scores:
        path.append(sampler.sample(row, path, len(path)).token)
    return path[len(seen) :]


def test_a_greedy_chain_takes_the_best_of_each_row_and_asks_for_no_more() -> None:
    drafter = Drafter(rows())
    found = propose(drafter, DraftScorer(DecodeConfig()), [5, 9])
    assert found.tokens == [9, *drafter.rows.argmax(1).tolist()]
    assert found.is_chain
    assert drafter.asked == [(9, 6, 1)]
    probs = np.exp(found.log_probs[1:])
    assert probs == pytest.approx(DFlash(15).expected_path_probs(DraftScorer(DecodeConfig()))[:6])


def test_several_sequences_are_asked_at_once() -> None:
    drafters, passes = [Drafter(rows(seed=seed)) for seed in range(3)], Passes()
    for drafter in drafters:
        drafter.engine = passes
    source, sampler = DFlash(15), DraftScorer(DecodeConfig())
    requests = [request_of(drafter, sampler, [seed]) for seed, drafter in enumerate(drafters)]
    requests[1].shape = TREE
    found = source.propose(requests)
    for seed, (tree, drafter) in enumerate(zip(found, drafters, strict=True)):
        assert tree is not None
        assert tree.tokens[0] == seed
        assert tree.tokens[1] == drafter.rows[0].argmax()
        assert drafter.asked == [(seed, 6, 1 if seed == 2 else 32)]
    assert passes.n_requests == [2, 1]


@pytest.mark.parametrize("config", [{}, {"temperature": 0.8, "seed": 5}])
def test_candidates_are_the_best_and_their_chances_fall(config: dict[str, Any]) -> None:
    drafter = Drafter(rows())
    found = ranked(drafter, DraftScorer(DecodeConfig(**config)))
    assert drafter.asked == [(1, 6, 32)]
    assert found.tokens.shape == found.log_probs.shape == (6, 32)
    best = np.argsort(-drafter.rows, axis=1)[:, :32]
    assert (np.sort(found.tokens) == np.sort(best)).all()
    assert (np.diff(found.log_probs) <= 0).all()
    assert (np.exp(found.log_probs).sum(axis=1) < 1.0).all()
    if not config:
        q = drafter.rows - np.log(np.exp(drafter.rows).sum(axis=1))[:, None]
        expected = np.take_along_axis(q, found.tokens, 1)
        np.testing.assert_allclose(found.log_probs, expected, atol=1e-5)


def certain(sampled: bool) -> Calibrations:
    """Returns calibrations that trust the noise fully, as if drafter and target were equal."""
    known = Calibrations()
    for key in ((0.3, False), (1.0, False), (1.0, True), (0.0, True)):
        penalty = 1.5 if key[1] else 1.0
        calibration = known.of(DecodeConfig(temperature=key[0], repeat_penalty=penalty))
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
        found = ranked(drafter, sampler.scorer, seen, calibrations=known, n_ranked=150)
        assert found.tokens[:, 0].tolist() == by_target(sampler, drafter.rows, seen)


def learned(source: DFlash) -> Calibrations:
    return Calibrations.from_dict(source.to_dict())


def test_shared_noise_agrees_more_often_than_the_best_logit_and_learns_how_much() -> None:
    source = DFlash(15)
    n_learned = n_best = 0
    for seed in range(600):
        sampler = Sampler(DecodeConfig(temperature=1.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0))
        target = rows(1, seed)
        drafter = Drafter(target + rows(1, seed + 1000, scale=0.5))
        drawn = sampler.sample(target[0], [1], 1).token
        request = request_of(drafter, sampler.scorer, [1], 1)
        (found,) = source.propose([request])
        assert found is not None
        source.observe([request], [[drawn]])
        if seed >= 200:
            n_learned += found.tokens[1] == drawn
            n_best += drafter.rows[0].argmax() == drawn
    assert n_learned > 1.5 * n_best
    a, _, c, _, _ = learned(source).of(DecodeConfig(temperature=1.0)).weights(1)[0]
    assert c > 0.8
    assert a > 0.5


def test_noise_that_tells_nothing_is_left_out() -> None:
    source = DFlash(15)
    for seed in range(300):
        sampler = DraftScorer(DecodeConfig(temperature=1.0, seed=seed))
        target = rows(1, seed)
        request = request_of(Drafter(target), sampler, [1], 1)
        source.propose([request])
        drawn = int((target[0] + np.random.default_rng(seed).gumbel(size=N_VOCAB)).argmax())
        source.observe([request], [[drawn]])
    assert learned(source).of(DecodeConfig(temperature=1.0)).weights(1)[0, 2] < 0.1


def test_what_the_target_chose_is_looked_up_until_the_draft_ends() -> None:
    drafter, source, sampler = Drafter(rows()), DFlash(15), DraftScorer(DecodeConfig())
    request = request_of(drafter, sampler, shape=TREE)
    source.observe([request], [[1, 2]])
    expected = Calibration()
    for n_tokens in (1, 3, 6, 7):
        found = ranked(drafter, sampler)
        features = Features(found.log_probs)
        source.propose([request])
        chosen = [*found.tokens[:5, 2].tolist(), 199, 5]
        source.observe([request], [chosen[:n_tokens]])
        expected.observe(features, [2, 2, 2, 2, 2, 32][:n_tokens])
        source.observe([request], [[1, 2]])
    assert 199 not in drafter.rows[5].argsort()[-32:]
    weights = learned(source).of(DecodeConfig()).weights(6)
    np.testing.assert_allclose(weights, expected.weights(6), atol=1e-5)


def test_what_was_learned_goes_on_in_another_process() -> None:
    drafter, source, sampler = Drafter(rows()), DFlash(15), DraftScorer(DecodeConfig())
    for shape in (CHAIN, TREE):
        request = request_of(drafter, sampler, shape=shape)
        source.propose([request])
        source.observe([request], [drafter.rows.argmax(1).tolist()])
    again = DFlash(15)
    again.learn(json.loads(json.dumps(source.to_dict())))
    assert again.to_dict() == source.to_dict()
    assert (
        again.expected_path_probs(sampler)
        == source.expected_path_probs(sampler)
        != DFlash(15).expected_path_probs(sampler)
    )


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_banned_tokens_are_not_proposed(shape: str) -> None:
    drafter = Drafter(rows())
    best = drafter.rows.argmax(1).tolist()
    found = propose(drafter, DraftScorer(DecodeConfig(), banned=best), shape=shape)
    assert found.n_drafted == 6
    assert not set(found.tokens[1:]) & set(best)


def test_banned_tokens_leave_a_greedy_chain_brief() -> None:
    drafter = Drafter(rows())
    best = drafter.rows.argmax(1).tolist()[:2]
    found = propose(drafter, DraftScorer(DecodeConfig(), banned=best))
    allowed = drafter.rows.copy()
    allowed[:, best] = -np.inf
    assert found.tokens[1:] == allowed.argmax(1).tolist()
    assert drafter.asked == [(1, 6, 3)]


def test_candidates_that_are_all_banned_are_proposed_as_they_are() -> None:
    drafter = Drafter(rows(2))
    banned = np.argsort(-drafter.rows[0])[:32].tolist()
    for shape in (CHAIN, MAIN_CHAIN):
        found = propose(drafter, DraftScorer(DecodeConfig(), banned=banned), n=2, shape=shape)
        assert found.tokens[1] == drafter.rows[0].argmax()
        assert found.tokens[2] not in banned


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_said_and_draft_nothing(bad: float) -> None:
    drafter = Drafter(rows())
    drafter.rows[2] = bad
    source, sampler = DFlash(15), DraftScorer(DecodeConfig())
    for shape in (CHAIN, TREE):
        with pytest.warns(RuntimeWarning, match="the drafter's scores are not finite numbers"):
            assert source.propose([request_of(drafter, sampler, shape=shape)]) == [None]
    assert source.propose([request_of(drafter, sampler, n=2)]) != [None]
