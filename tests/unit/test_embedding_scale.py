"""The scale whose drafts are accepted further is kept; if both are equal, the raw one."""

from __future__ import annotations

import pytest

from dflash_gguf.speculative.proposers.embedding_scale import N_DRAFTS, ScaleTrial


@pytest.mark.parametrize(("accepted", "kept"), [((1, 3), 1), ((3, 1), 0), ((2, 2), 0)])
def test_the_better_scale_is_kept(accepted: tuple[int, int], kept: int) -> None:
    scales, used = (1.0, 64.0), list[float]()
    trial = ScaleTrial(used.append, scales)
    decided = []
    for _ in range(2 * N_DRAFTS):
        trial.begin()
        decided.append(trial.observe(accepted[scales.index(used[-1])]))
    assert decided == [False] * (2 * N_DRAFTS - 1) + [True]
    assert used[:4] == [1.0, 64.0, 1.0, 64.0]
    assert (trial.choice, used[-1]) == (kept, scales[kept])
    trial.begin()
    assert not trial.observe(9) and used[-1] == scales[kept]


def test_a_remembered_scale_is_used_and_a_wrong_one_refused() -> None:
    used: list[float] = []
    trial = ScaleTrial(used.append, (1.0, 64.0))
    with pytest.raises(ValueError, match="is not 0 or 1"):
        trial.choose("raw")
    trial.choose(1)
    trial.begin()
    assert used == [64.0]
