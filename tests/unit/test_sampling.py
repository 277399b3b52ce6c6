"""The sampler compared with a slow implementation, its noise, and its statistics."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import Error
from dflash_gguf.sampling.noise import DraftScorer, gumbel
from dflash_gguf.sampling.sampler import Sampler

N_DRAWS = 20_000
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 0},
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 0, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 10_000, "top_p": 0.5, "min_p": 0.0},
    {"top_k": 40, "top_p": 1.0, "min_p": 0.3},
    {"top_k": 40, "top_p": 0.0},
    {"min_p": 1.0},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    {"repeat_penalty": 0.7, "presence_penalty": -0.5, "repeat_last_n": 4},
]


def slow_distribution(
    logits: np.ndarray[Any, Any], seen: list[int], config: DecodeConfig
) -> dict[int, float]:
    """Returns the documented distribution, computed token by token in Python floats."""
    table = {token: float(value) for token, value in enumerate(logits)}
    window = seen[-config.repeat_last_n :] if config.repeat_last_n else []
    for token, count in Counter(window).items():
        value = table[token]
        value = value * config.repeat_penalty if value <= 0 else value / config.repeat_penalty
        table[token] = value - count * config.frequency_penalty - config.presence_penalty
    ranked = sorted(table, key=lambda token: (-table[token], token))
    if config.top_k > 0:
        ranked = ranked[: config.top_k]
    best = table[ranked[0]]
    total = sum(math.exp(table[token] - best) for token in ranked)
    if config.top_p < 1:
        mass, kept = 0.0, []
        for token in ranked:
            kept.append(token)
            mass += math.exp(table[token] - best) / total
            if mass >= config.top_p:
                break
        ranked = kept
    if config.min_p > 0:
        ranked = [t for t in ranked if table[t] >= best + math.log(config.min_p)] or ranked[:1]
    weights = [math.exp((table[token] - best) / config.temperature) for token in ranked]
    return {token: weight / sum(weights) for token, weight in zip(ranked, weights, strict=True)}


def row_of(n_vocab: int, seed: int, spread: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n_vocab) * spread).astype(np.float32)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("n_vocab", [1, 2, 41, 3001])
def test_chain_equals_the_slow_formulation(settings: dict[str, Any], n_vocab: int) -> None:
    config = DecodeConfig(temperature=0.7, seed=1, **settings)
    for trial in range(4):
        row = row_of(n_vocab, trial)
        untouched = row.copy()
        seen = np.random.default_rng(trial).integers(0, n_vocab, 12).tolist()
        kept, probabilities = Sampler(config).distribution(row, seen)
        expected = slow_distribution(row, seen, config)
        assert kept.tolist() == list(expected)
        assert probabilities == pytest.approx(list(expected.values()), rel=1e-5)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
        assert np.array_equal(row, untouched)
        assert Sampler(config).sample(row, seen, trial).token in expected


def slow_gumbel(seed: int, sequence: int, position: int, token: int) -> float:
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = 0
    for value in (seed, sequence, position):
        state = mix(((state ^ (value % 2**64)) + golden) & mask)
    bits = mix((state + (token + 1) * golden) & mask)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def test_noise_is_the_documented_hash() -> None:
    tokens = np.array([0, 1, 2, 151_935, 248_319])
    for seed in (0, 1, -1, 2**64 - 1, -(2**63), 0x0123_4567_89AB_CDEF):
        for sequence, position in ((0, 0), (0, 1), (1, 0), (7, 131_071)):
            expected = [slow_gumbel(seed, sequence, position, int(token)) for token in tokens]
            assert gumbel(seed, sequence, position, tokens) == pytest.approx(expected, rel=1e-13)


def test_first_value_of_the_noise_is_that_of_splitmix64() -> None:
    """Source: Vigna's splitmix64, whose first value for seed 1234567 is 6457827717110365317."""
    from dflash_gguf.sampling.noise import GOLDEN, _mixed

    state = np.array([(1234567 + GOLDEN) & (2**64 - 1)], dtype=np.uint64)
    assert _mixed(state) == 6457827717110365317


def chi_square_limit(degrees: int) -> float:
    """Returns a bound exceeded by chance once in 30,000 (Wilson and Hilferty, z = 4)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3)


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 8, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.3, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.0, "min_p": 0.2, "repeat_penalty": 1.2, "presence_penalty": 0.5},
    ],
    ids=str,
)
def test_draws_follow_the_processed_distribution(settings: dict[str, Any]) -> None:
    sampler = Sampler(DecodeConfig(seed=2024, **settings))
    row, seen = row_of(60, 5, spread=1.5), [3, 3, 9, 17]
    kept, probabilities = sampler.distribution(row, seen)
    drawn = Counter(sampler.sample(row, seen, position).token for position in range(N_DRAWS))
    assert set(drawn) <= set(kept.tolist())
    counts = np.array([drawn[token] for token in kept.tolist()], dtype=np.float64)
    expected = probabilities * N_DRAWS
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert chi_square(counts, expected) < chi_square_limit(len(counts) - 1)


@pytest.mark.parametrize("axis", ["position", "sequence", "seed", "token"])
def test_noise_of_neighbours_is_independent(axis: str) -> None:
    n = N_DRAWS // 2
    tokens = np.arange(2)
    if axis == "token":
        pairs = np.stack([gumbel(1, 0, i, tokens) for i in range(n)])
    else:
        base = {"seed": 1, "sequence": 0, "position": 0}
        column = np.array(
            [gumbel(**(base | {axis: base[axis] + i}), tokens=tokens[:1])[0] for i in range(2 * n)]
        )
        pairs = column.reshape(n, 2)
    uniform = np.exp(-np.exp(-pairs))
    assert abs(np.corrcoef(uniform.T)[0, 1]) < 4 / math.sqrt(n)
    cells = np.bincount((uniform[:, 0] * 8).astype(int) * 8 + (uniform[:, 1] * 8).astype(int))
    assert len(cells) == 64
    assert chi_square(cells, np.full(64, n / 64)) < chi_square_limit(63)


def test_draws_at_different_positions_are_independent() -> None:
    config = DecodeConfig(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0, seed=11)
    row = np.zeros(100, dtype=np.float32)
    row[[2, 30, 31, 90]] = (5.0, 5.0, 5.0, 5.0)
    place = {2: 0, 30: 1, 31: 2, 90: 3}
    draws = [place[Sampler(config).sample(row, [], position).token] for position in range(N_DRAWS)]
    pairs = np.bincount(np.array(draws[0::2]) * 4 + np.array(draws[1::2]), minlength=16)
    assert chi_square(pairs, np.full(16, N_DRAWS / 32)) < chi_square_limit(15)


def test_draws_repeat_and_depend_on_every_argument() -> None:
    row = np.zeros(50_000, dtype=np.float32)
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def draw(seed: int, sequence: int, position: int) -> int:
        return (
            Sampler(DecodeConfig(seed=seed, **settings), sequence=sequence)
            .sample(row, [], position)
            .token
        )

    assert draw(1, 0, 0) == draw(1, 0, 0)
    assert len({draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)}) == 4
    assert draw(-1, 0, 0) == draw(2**64 - 1, 0, 0)


def test_a_seed_is_drawn_and_kept_when_none_is_given() -> None:
    config = DecodeConfig(temperature=1.0)
    seeds = {Sampler(config).seed for _ in range(8)}
    assert len(seeds) > 1
    sampler = Sampler(config)
    assert Sampler(DecodeConfig(temperature=1.0, seed=sampler.seed)).sample(
        row_of(500, 0), [], 3
    ) == sampler.sample(row_of(500, 0), [], 3)


def awkward_rows(n_vocab: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(n_vocab)
    ties = rng.integers(-2, 3, n_vocab).astype(np.float32)
    holes = row_of(n_vocab, 1)
    holes[rng.random(n_vocab) < 0.7] = -np.inf
    alone = np.full(n_vocab, -np.inf, dtype=np.float32)
    alone[n_vocab // 2] = -3.0
    holes[n_vocab // 3] = -1.0
    far = row_of(n_vocab, 2)
    far[-1] = 60.0
    steep = row_of(n_vocab, 3, spread=30.0)
    return [row_of(n_vocab, 0), ties, holes, alone, far, steep, np.zeros(n_vocab, np.float32)]


@pytest.mark.parametrize("settings", [*SETTINGS, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("n_vocab", [1, 2, 63, 64, 65, 3001, 30_000])
def test_the_draw_is_the_best_of_what_is_kept(settings: dict[str, Any], n_vocab: int) -> None:
    """Compares the core with numpy's sorting and noise."""
    for number, row in enumerate(awkward_rows(n_vocab)):
        config = DecodeConfig(**{"temperature": 0.8, "seed": number, **settings})
        seen = np.random.default_rng(number).integers(0, n_vocab, 9).tolist()
        sampler = Sampler(config)
        adjusted = sampler.scorer.adjusted_among(np.arange(n_vocab), row, seen)
        ids = np.argsort(-adjusted, kind="stable")
        values = adjusted[ids].astype(np.float64)
        if config.temperature == 0.0:
            scores, ids = values, ids[:2]
        else:
            ids, values = ids[values > -np.inf], values[values > -np.inf]
            if config.top_k > 0:
                ids, values = ids[: config.top_k], values[: config.top_k]
            mass = np.exp(values - values[0])
            n_mass = len(values)
            if config.top_p < 1.0:
                n_mass = int(np.searchsorted(mass.cumsum(), config.top_p * mass.sum())) + 1
            n_likely = int((values >= values[0] + np.log(config.min_p or 1e-300)).sum())
            n = max(1, min(n_mass, n_likely))
            ids, values = ids[:n], values[:n]
            scores = (values - values[0]) / config.temperature + gumbel(number, 0, 77, ids)
        order = np.argsort(-scores, kind="stable")
        found = sampler.sample(row, seen, 77)
        assert found.token == ids[order[0]], number
        if len(order) > 1 and scores[order[1]] > -np.inf:
            margin = scores[order[0]] - scores[order[1]]
            assert found.margin == pytest.approx(margin, rel=1e-9, abs=1e-9)
        n_best = sampler.n_best
        for n in (n_best, n_best + len(seen), 64) if 0 < n_best < n_vocab else ():
            best = np.argsort(-row, kind="stable")[:n].astype(np.int32)
            if n < n_best:
                continue
            try:
                assert sampler._core.sample(row[best], seen, 77, best) == (
                    found.token,
                    found.margin,
                )
            except Error as error:
                assert "do not suffice" in str(error)
                assert config.has_penalties
                assert n < n_best + len(seen) or number in (1, 2, 3, 6)  # rows with ties


def test_greedy_takes_the_lowest_id_of_the_best_and_reports_the_margin() -> None:
    row = np.array([1.0, 4.0, 4.0, 3.5], dtype=np.float32)
    choice = Sampler(DecodeConfig()).sample(row, [], 0)
    assert (choice.token, choice.margin) == (1, 0.0)
    row[2] = 0.0
    assert Sampler(DecodeConfig()).sample(row, [], 0).margin == 0.5
    assert Sampler(DecodeConfig()).sample(row[:1], [], 0).margin == math.inf


def test_greedy_follows_penalties() -> None:
    row = np.array([1.0, 4.0, 3.9], dtype=np.float32)
    config = DecodeConfig(repeat_penalty=1.1)
    assert not DraftScorer(config).is_argmax
    assert Sampler(config).sample(row, [0, 1], 2).token == 2
    assert DraftScorer(DecodeConfig()).is_argmax


def test_margin_is_the_distance_to_the_second_score() -> None:
    row = row_of(1000, 3)
    config = DecodeConfig(temperature=0.5, seed=3)
    kept, _ = Sampler(config).distribution(row, [])
    scores = row[kept].astype(np.float64) / 0.5 + gumbel(3, 0, 9, kept)
    choice = Sampler(config).sample(row, [], 9)
    ranked = np.sort(scores)
    assert choice.token == kept[np.argmax(scores)]
    assert choice.margin == pytest.approx(ranked[-1] - ranked[-2])
    assert Sampler(DecodeConfig(temperature=0.5, top_k=1)).sample(row, [], 9).margin == math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    row = row_of(40, 1)
    best = int(row.argmax())
    sampler = Sampler(DecodeConfig(temperature=temperature, seed=1), banned=[best, 10**6])
    drawn = {sampler.sample(row, [], position).token for position in range(500)}
    assert best not in drawn
    assert best not in sampler.distribution(row, [])[0]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0}], ids=str)
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.nan, "the logits hold NaN"),
        (np.inf, "the logits hold +inf"),
        (-np.inf, "no token is left to sample: every logit is -inf"),
    ],
)
def test_damaged_rows_are_refused(settings: dict[str, Any], value: float, sentence: str) -> None:
    for top_k in (0, 40):
        row = np.full(5000, -np.inf, dtype=np.float32) if value < 0 else row_of(5000, 0)
        row[4321] = value
        with pytest.raises(ValueError, match=sentence.replace("+", r"\+")):
            Sampler(DecodeConfig(top_k=top_k, **settings)).sample(row, [], 0)


def test_tokens_without_probability_are_not_kept() -> None:
    row = np.full(5000, -np.inf, dtype=np.float32)
    row[[7, 4000]] = 1.0
    for settings in ({}, {"top_k": 0}, {"min_p": 0.0}, {"top_k": 0, "min_p": 0.0}):
        config = DecodeConfig(temperature=1.0, **settings)  # type: ignore[arg-type]
        assert Sampler(config).distribution(row, [])[0].tolist() == [7, 4000]


def test_extreme_values_stay_finite_decisions() -> None:
    row = np.array([3e38, -3e38, 2.9e38, 0.0], dtype=np.float32)
    for settings in ({"top_k": 0}, {"top_k": 2}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}):
        choice = Sampler(DecodeConfig(temperature=1e-300, **settings)).sample(row, [], 0)  # type: ignore[arg-type]
        assert choice.token == 0


@pytest.mark.parametrize(
    "row", [np.zeros(3), np.zeros((1, 3), np.float32), np.zeros(0, np.float32)], ids=str
)
def test_wrong_arrays_are_refused(row: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="must be float32"):
        Sampler(DecodeConfig()).sample(row, [], 0)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    sampler = Sampler(DecodeConfig(repeat_penalty=1.1))
    for bad in (-1, 100):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 100"):
            sampler.sample(row_of(100, 0), [5, bad], 2)


@pytest.mark.parametrize("penalties", [{}, {"repeat_penalty": 1.3, "presence_penalty": 0.4}])
def test_biases_are_added_before_all_else(penalties: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 3, 500).astype(np.float32)
    seen = rng.integers(0, 500, 40).tolist()
    biases = {7: 5.0, 400: -2.5, int(logits.argmax()): -math.inf, 9_999: 3.0}
    biased = logits.copy()
    for token, bias in biases.items():
        if token < 500:
            biased[token] += np.float32(bias)
    for settings in ({"temperature": 0.9, "seed": 1}, {"temperature": 0.0}):
        with_bias = Sampler(DecodeConfig(logit_bias=biases, **settings, **penalties))
        without = Sampler(DecodeConfig(**settings, **penalties))
        for place in range(50):
            wanted = without.sample(biased, seen, place).token
            assert with_bias.sample(logits, seen, place).token == wanted
        ids = rng.permutation(500)[:64]
        found = with_bias.scorer.adjusted_among(ids, logits[ids], seen)
        np.testing.assert_array_equal(found, without.scorer.adjusted_among(ids, biased[ids], seen))
        assert not with_bias.scorer.is_argmax
        assert with_bias.n_best == 0


def test_settings_that_only_lower_logits_need_no_whole_row() -> None:
    lowering: list[dict[str, Any]] = [
        {"repeat_penalty": 1.1},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {7: -2.0, 8: -math.inf}},
    ]
    raising: list[dict[str, Any]] = [
        {"repeat_penalty": 0.9},
        {"presence_penalty": -0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {7: -2.0, 8: 0.1}},
    ]
    for settings in lowering:
        config = DecodeConfig(temperature=0.7, top_k=20, **settings)
        assert Sampler(config, banned=(3, 4)).n_best == 20
        assert Sampler(DecodeConfig(**settings)).n_best == 2  # greedy: the best, and its margin
    for settings in raising:
        assert Sampler(DecodeConfig(temperature=0.7, **settings)).n_best == 0
    assert Sampler(DecodeConfig(temperature=0.7, top_k=0)).n_best == 0
    assert Sampler(DecodeConfig()).n_best == 0  # greedy: the argmax


def test_chances_are_those_of_the_model_or_of_the_draw() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, 500).astype(np.float32)
    seen = [3, 3, 8]
    logs = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum())
    order = np.argsort(-logits, kind="stable")
    settings: dict[str, Any] = {"temperature": 1.4, "repeat_penalty": 1.2, "top_k": 6, "seed": 2}
    model = Sampler(DecodeConfig(n_probs=4, logit_bias={9: 4.0}, **settings))
    found = model.logprobs(logits, seen, 17)
    assert found.log_prob == pytest.approx(logs[17])
    assert [token for token, _ in found.top] == order[:4].tolist()
    assert [value for _, value in found.top] == pytest.approx(logs[order[:4]])
    draw = Sampler(DecodeConfig(n_probs=10, post_sampling_probs=True, **settings))
    ids, chances = draw.distribution(logits, seen)
    found = draw.logprobs(logits, seen, int(ids[1]))
    assert found.log_prob == pytest.approx(math.log(chances[1]))
    assert dict(found.top) == pytest.approx(dict(zip(ids.tolist(), np.log(chances), strict=True)))
    out = int(order[-1])
    assert draw.logprobs(logits, seen, out).log_prob == -math.inf
    none = Sampler(DecodeConfig(n_probs=0)).logprobs(logits, seen, 3)
    assert (none.top, none.log_prob) == ((), pytest.approx(logs[3]))
    every = Sampler(DecodeConfig(n_probs=10_000)).logprobs(logits, seen, 3)
    assert [token for token, _ in every.top] == order.tolist()
