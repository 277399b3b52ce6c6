"""The predicted speed of a model on a GPU and the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_gguf.memory import speed

GB = 10**9


def predicted(
    on_gpu: float, on_cpu: float = 0.0, drafter: Any = None, n_expert: int = 0, **fields: Any
) -> float:
    """Predicts with GB in each place. fields: of a mixture of experts, 1 of n_expert is used."""
    values: dict[str, Any] = {
        "on_gpu": True,
        "n_expert": n_expert,
        "n_expert_used": 1,
        "expert_bytes": 0,
        "cpu_expert_bytes": 0,
        "n_layer": 10,
        "config": SimpleNamespace(n_cpu_moe=0),
        "device_bytes": on_gpu * GB,
        "cpu_split_bytes": on_cpu * GB / 2,
        "mapped_bytes": on_cpu * GB / 2,
    }
    model: Any = SimpleNamespace(**(values | fields))
    found = speed.tokens_per_s(model, [] if drafter is None else [drafter])
    assert found is not None
    return found


def drafter_of(
    on_gpu: float, on_cpu: float = 0.0, block_size: int = 16, kind: str = "dflash"
) -> Any:
    return SimpleNamespace(
        kind=kind,
        copied_bytes=(on_gpu + on_cpu) * GB,
        cpu_split_bytes=on_cpu * GB,
        mapped_bytes=0,
        block_size=block_size,
    )


def test_a_plain_step_reads_all_weights_once() -> None:
    assert predicted(16) == pytest.approx(1 / (16 / 400 + 50e-6))
    assert predicted(8, 8) == pytest.approx(1 / (8 / 400 + 8 / 50 + 100e-6))


def test_a_chain_of_15_gains_as_published() -> None:
    rate = speed.ACCEPTANCE
    assert (1 - rate**16) / (1 - rate) == pytest.approx(7.67, rel=0.01)
    assert predicted(16, drafter=drafter_of(1)) / predicted(17) == pytest.approx(7.67, rel=0.02)


def test_the_fastest_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predicted(2, 14, drafter_of(1)) > predicted(2, 14)
    monkeypatch.setattr(speed, "ACCEPTANCE", 0.0)
    assert predicted(2, 14, drafter_of(1)) == predicted(2, 14)
    assert predicted(16, drafter=drafter_of(1, block_size=2)) == predicted(16)


def test_a_drafter_on_the_cpu_costs_as_much_as_layers_of_its_size() -> None:
    on_cpu = predicted(16, 0, drafter_of(0, 1))
    assert on_cpu == pytest.approx(predicted(15, 1, drafter_of(1)))
    assert predicted(14.7, 1.3, drafter_of(1)) < on_cpu  # layers are moved whole
    assert on_cpu > predicted(16)


def test_a_step_reads_the_experts_that_a_token_uses() -> None:
    mixture = predicted(16, n_expert=8, expert_bytes=12 * GB)
    assert mixture == pytest.approx(predicted(4 + 12 / 8))
    split = {"expert_bytes": 12 * GB, "cpu_expert_bytes": 8 * GB}
    assert predicted(8, 8, n_expert=8, **split) == pytest.approx(predicted(4 + 4 / 8, 8 / 8))


def test_rows_of_a_verify_read_more_experts() -> None:
    experts = {"n_expert": 8, "expert_bytes": 15 * GB}
    plain, drafted = predicted(16, **experts), predicted(16, drafter=drafter_of(0.1), **experts)
    assert plain < drafted < 0.4 * plain * predicted(16, drafter=drafter_of(0.1)) / predicted(16)
    n_tokens = (1 - speed.ACCEPTANCE**16) / (1 - speed.ACCEPTANCE)
    read = 1 + 15 * (1 - (7 / 8) ** 16)
    assert drafted == pytest.approx(n_tokens / ((read + 0.1) / 400 + 100e-6))


def test_experts_on_the_cpu_cost_waits_there_and_back_in_each_layer() -> None:
    split = {"n_expert": 8, "expert_bytes": 8 * GB, "cpu_expert_bytes": 8 * GB}
    for n_cpu_moe, n_waits in ((4, 2 + 8), (10**6, 2 + 20)):
        found = predicted(8, 8, config=SimpleNamespace(n_cpu_moe=n_cpu_moe), **split)
        assert found == pytest.approx(1 / (8 / 400 + 1 / 50 + n_waits * 50e-6))


def test_no_speed_is_predicted_without_a_gpu() -> None:
    model: Any = SimpleNamespace(on_gpu=False)
    assert speed.tokens_per_s(model, []) is None


def test_a_speed_has_three_digits() -> None:
    told = [speed.rounded(x) for x in (0.512, 68.34, 174.4, 14682.0)]
    assert told == ["0.512", "68.3", "174", "14,700"]


def test_an_mtp_layer_is_read_once_a_drafted_token() -> None:
    layer = drafter_of(0.25, block_size=8, kind="mtp")
    rows = (1 - 0.89**4) / (1 - 0.89)
    seconds = 16 / 400 + 50e-6 + 3 * (0.25 / 400 + 50e-6)
    assert predicted(16, drafter=layer) >= rows / seconds
    assert predicted(16, drafter=layer) < predicted(16, drafter=drafter_of(0.25, block_size=8))
