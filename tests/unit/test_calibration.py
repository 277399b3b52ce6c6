"""Calibration: estimated acceptance comes true whatever scores the drafter gives."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.speculative.calibration import (
    BOUNDS,
    MEMORY,
    PRECISION,
    PRIORS,
    PULL,
    Calibration,
    Calibrations,
    Features,
    Top1Acceptance,
)

K = 8


def claims(rng: np.random.Generator, n: int = 1, sharp: float = 2.0) -> np.ndarray:
    """Returns a drafter's log-probabilities of its K best of 100 tokens, [n, K]."""
    logits = sharp * rng.standard_normal((n, 100))
    log_q = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -np.sort(-log_q, axis=1)[:, :K]


def outcome(rng: np.random.Generator, log_q: np.ndarray, power: float) -> int:
    """Returns a candidate index drawn from q ** power, or K for any other token."""
    q = np.exp(log_q)
    probs = np.append(q, max(1.0 - q.sum(), 0.0)) ** power
    return int(rng.choice(K + 1, p=probs / probs.sum()))


def test_before_anything_is_seen_the_drafter_is_believed() -> None:
    log_q = claims(np.random.default_rng(0), 5)
    np.testing.assert_allclose(Calibration().log_probs(Features(log_q)), log_q, atol=1e-12)


@pytest.mark.parametrize("power", [0.3, 1.0, 2.5])
def test_chances_come_true_of_a_drafter_that_is_too_sure_or_not_sure_enough(power: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    said, came = [], []
    for step in range(1500):
        log_q = claims(rng)
        place = outcome(rng, log_q[0], power)
        if step >= 500:
            said.append(np.exp(calibration.log_probs(Features(log_q))[0]))
            came.append(np.arange(K) == place)
        calibration.observe(Features(log_q), [place])
    said_all, came_all = np.array(said).ravel(), np.array(came).ravel()
    for low, high in ((0.02, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9)):
        inside = (said_all >= low) & (said_all < high)
        if inside.sum() > 100:
            assert came_all[inside].mean() == pytest.approx(said_all[inside].mean(), rel=0.2)
    assert calibration.weights(1)[0, 0] == pytest.approx(power, rel=0.35)


def test_outcomes_together_teach_what_they_do_one_by_one() -> None:
    rng, apart, together = np.random.default_rng(7), Calibration(), Calibration()
    for _ in range(100):
        lengths = rng.integers(1, 6, size=int(rng.integers(1, 9))).tolist()
        ends = np.cumsum([0, *lengths]).tolist()
        log_q = claims(rng, ends[-1])
        depths = np.concatenate([np.arange(n) for n in lengths])
        features = Features(log_q, depths=depths)
        expected = apart.log_probs(features)
        np.testing.assert_allclose(together.log_probs(features), expected, atol=1e-12)
        for calibration in (apart, together):
            calibration._extend(max(lengths))
        counts = [int(rng.integers(1, n + 1)) for n in lengths]
        rows = [first + at for first, n in zip(ends, counts, strict=False) for at in range(n)]
        places = [outcome(rng, log_q[row], 2.0) for row in rows]
        together.observe(features, places, rows, counts)
        for first, n in zip(np.cumsum([0, *counts]).tolist(), counts, strict=False):
            apart.observe(features, places[first : first + n], rows[first : first + n])
    np.testing.assert_allclose(together.weights(6), apart.weights(6), rtol=0, atol=1e-12)


def test_steps_are_newtons() -> None:
    """Compares the core's update steps with numpy's solver."""
    rng, calibration = np.random.default_rng(8), Calibration(is_sampled=True)
    weights, information = np.array([PRIORS[True]]), np.array([np.diag(PRECISION)])
    held, prior = np.diag(PRECISION), np.array(PRIORS[True])
    for _ in range(200):
        features = Features(claims(rng), rng.gumbel(size=(1, K)), np.arange(K)[None] >= 5)
        calibration.log_probs(features)
        assert features.log_probs is not None
        probs, values = np.exp(features.log_probs[0]), features.values[0]
        taken = int(rng.integers(K + 1))
        mean = probs @ values
        spread = (probs[:, None] * values).T @ values - np.outer(mean, mean)
        information[0] += spread + (held - information[0]) / MEMORY
        slope = values[taken] - mean + (prior - weights[0]) @ (PULL * held) / MEMORY
        step = np.linalg.solve(information[0], slope)
        weights[0] = np.clip(weights[0] + step, *BOUNDS)
        calibration.observe(features, [taken])
        np.testing.assert_allclose(calibration.weights(1), weights, rtol=0, atol=1e-10)


def test_few_outcomes_are_enough_to_doubt_a_drafter_that_is_always_wrong() -> None:
    rng, calibration = np.random.default_rng(2), Calibration()
    log_q = np.log([[0.9] + [0.01] * (K - 1)])
    for _ in range(8):
        calibration.observe(Features(log_q), [K])
    assert np.exp(calibration.log_probs(Features(log_q))[0, 0]) < 0.3
    for _ in range(200):
        calibration.observe(Features(claims(rng, sharp=4.0)), [K])
    assert np.exp(calibration.log_probs(Features(log_q))).sum() < 0.1


def test_a_deeper_depth_starts_from_the_one_before_and_then_goes_its_own_way() -> None:
    rng, calibration = np.random.default_rng(3), Calibration()
    for _ in range(300):
        log_q = claims(rng, 2)
        calibration.observe(Features(log_q[:1]), [outcome(rng, log_q[0], 2.0)])
    weights = calibration.weights(4)
    assert (weights == weights[0]).all()
    assert weights[0, 0] > 1.5
    for _ in range(600):
        log_q = claims(rng, 2)
        places = [outcome(rng, log_q[0], 2.0), outcome(rng, log_q[1], 0.3)]
        calibration.observe(Features(log_q), places)
    first, second, third = calibration.weights(3)
    assert first[0] > 1.5
    assert second[0] < 0.6
    assert (third == second).all()


def test_old_outcomes_fade() -> None:
    rng, calibration = np.random.default_rng(4), Calibration()
    for power in (3.0, 0.3):
        for _ in range(1500):
            log_q = claims(rng)
            calibration.observe(Features(log_q), [outcome(rng, log_q[0], power)])
    assert calibration.weights(1)[0, 0] < 0.5


def test_how_much_the_noise_tells_is_learned() -> None:
    found = []
    for shared in (True, False):
        rng, calibration = np.random.default_rng(5), Calibration(is_sampled=True)
        for _ in range(1500):
            log_q = claims(rng)
            noise = rng.gumbel(size=(1, K))
            drawn = noise if shared else rng.gumbel(size=(1, K))
            place = int((log_q + drawn).argmax())
            calibration.observe(Features(log_q, noise), [place])
        found.append(calibration.weights(1)[0])
    assert found[0][2] > 1.5
    assert found[1][2] < 0.1


def test_candidates_that_the_sampler_cuts_off_lose_their_chance() -> None:
    rng, calibration = np.random.default_rng(6), Calibration(is_sampled=True)
    for _ in range(400):
        log_q, noise = claims(rng), rng.gumbel(size=(1, K))
        is_cut = np.arange(K)[None] >= 3
        place = int((log_q + noise)[0, :3].argmax())
        calibration.observe(Features(log_q, noise, is_cut), [place])
    probs = np.exp(calibration.log_probs(Features(log_q, noise, is_cut)))[0]
    assert probs[3:].sum() < 0.02


def test_extreme_claims_stay_finite() -> None:
    calibration = Calibration(is_sampled=True)
    for log_q in (np.full((3, K), -np.inf), np.tile([0.0] + [-500.0] * (K - 1), (3, 1))):
        for place in (0, K - 1, K):
            features = Features(log_q, np.full((3, K), 30.0))
            calibration.observe(features, [place] * 3)
            assert np.isfinite(calibration.log_probs(features)).all()
            assert np.isfinite(calibration.weights(9)).all()


def test_every_way_to_draw_has_its_own() -> None:
    known = Calibrations()
    greedy = known.of(DecodeConfig())
    greedy.observe(Features(np.log([[0.5, 0.2]])), [0])
    assert known.of(DecodeConfig(seed=3)) is greedy
    assert known.of(DecodeConfig(repeat_penalty=1.1)) is not greedy
    assert known.of(DecodeConfig(temperature=0.7)).weights(1)[0, 2] > 0.0
    for temperature in np.linspace(0.1, 2.0, 200):
        known.of(DecodeConfig(temperature=temperature))
    assert len(known.to_dict()["ranked"]) < 20


def test_what_was_learned_survives_as_json() -> None:
    known = Calibrations()
    for config in (DecodeConfig(), DecodeConfig(temperature=0.7)):
        for place in (0, 0, 1, 0):
            known.of(config).observe(Features(np.log([[0.5, 0.2], [0.4, 0.3]])), [place])
            known.top1(config).observe([1, 2, 3], [1, 2 + place, 3])
    again = Calibrations.from_dict(json.loads(json.dumps(known.to_dict())))
    assert again.to_dict() == known.to_dict()
    assert again.top1(DecodeConfig()).paths(3) == known.top1(DecodeConfig()).paths(3)
    for bad in ({}, {"ranked": {}, "spines": {"0": [[1.0], [2.0]]}}, {"ranked": {"0": 3}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Calibrations.from_dict(bad)


def test_a_spine_learns_how_far_it_is_followed() -> None:
    spine = Top1Acceptance()
    first = spine.paths(3)
    assert first == pytest.approx([0.6, 0.36, 0.216])
    for _ in range(200):
        spine.observe([1, 2, 3], [1, 2, 9])
    paths = spine.paths(4)
    assert paths[1] > 0.9
    assert paths[2] < 0.15
    for _ in range(200):
        spine.observe([1] * 255, [2])
    assert spine.log_paths(255)[254] < -600.0
    spine = Top1Acceptance()
    for _ in range(200):
        spine.observe([1, 2], [1, 2])
    assert spine.paths(7)[6] > 0.85
    spine = Top1Acceptance()
    for _ in range(200):
        spine.observe([1, 2, 3], [9, 2, 3])
    assert spine.paths(3)[0] < 0.1
    assert spine.to_dict()[0][1:] == [0.0, 0.0]
    spine = Top1Acceptance()
    for _ in range(20):
        spine.observe([1, 2, 3], [1, 9])
    for _ in range(60):
        spine.observe([1], [1])  # shorter drafts: what deeper candidates did is forgotten
    assert spine.paths(3)[2] > 0.65
