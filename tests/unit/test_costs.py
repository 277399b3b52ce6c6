"""The cost model: medians, interpolation, and costs saved between processes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dflash_gguf import _cache_dir
from dflash_gguf.speculative.calibration import Calibrations
from dflash_gguf.speculative.cost_model import N_TIMES, ROW, CostModel, Round, RunningMedian
from dflash_gguf.speculative.proposers.suffix import SuffixProposer
from dflash_gguf.speculative.runtime import CostFile


def test_a_median_follows_the_last_times() -> None:
    median = RunningMedian(2.0, 1.0)
    assert (median.value, median.is_sure) == (1.0, False)
    for ms in (4.0, 3.0):
        median.add(ms)
    assert (median.value, median.is_sure) == (2.5, True)
    for _ in range(N_TIMES):
        median.add(5.0)
    assert median.value == 5.0


def warm(
    costs: CostModel, position: int, n: int, draft: float, rows: float, *, is_tree: bool = False
) -> None:
    for _ in range(3):
        costs.observe(drafted(position, n, is_tree=is_tree, draft_s=draft, pass_s=rows))


def drafted(position: int, n: int, **more: Any) -> Round:
    is_top1 = n > 0
    given = {
        "proposer": "a",
        "n_positions": n,
        "n_draft_rows": n + 1,
        "is_top1": is_top1,
        "n_drafted": n,
        "n_tokens": 1,
        "sample_s": 0.5,
    }
    return Round(position, **{**given, **more})


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = CostModel()
    for _ in range(2):
        costs.observe(Round(0, n_tokens=1, pass_s=99.0))
    assert not costs.knows_plain()
    warm(costs, 0, 0, 0.0, 10.0)
    assert costs.knows_plain()
    assert costs.plain_s(0) == 10.5
    assert costs.pass_s(0, 4) == 10.0 * (1 + 3 * ROW)
    assert costs.draft_s("a", 4, True) == ROW * costs.plain_s(0)
    warm(costs, 0, 1, 4.0, 12.0)
    assert costs.expected_s(drafted(0, 1, n_tokens=2)) == 17.0
    assert (costs.draft_s("a", 4, True), costs.pass_s(0, 4)) == (6.0, 16.0)
    warm(costs, 0, 7, 10.0, 18.0)
    assert (costs.draft_s("a", 5, True), costs.pass_s(0, 5)) == (7.0, 15.0)
    assert (costs.draft_s("a", 16, True), costs.pass_s(0, 16)) == (
        18.0,
        pytest.approx(18 + 8 / 7 * 8),
    )
    assert costs.draft_s("a", 5, False) == 7.0
    warm(costs, 0, 3, 8.0, 9.0)
    assert (costs.pass_s(0, 4), costs.pass_s(0, 3)) == (12.0, 12.0)


def test_a_tree_costs_what_trees_were_measured_to_cost_more_than_chains() -> None:
    costs = CostModel()
    warm(costs, 0, 0, 0.0, 10.0)
    warm(costs, 0, 7, 4.0, 20.0)
    warm(costs, 0, 15, 4.0, 40.0)
    assert costs.pass_s(0, 8, True) == 20.0
    for _ in range(3):
        warm(costs, 0, 7, 4.0, 25.0, is_tree=True)
    assert costs.pass_s(0, 8) == 20.0
    assert costs.pass_s(0, 8, True) == 25.0
    assert costs.pass_s(0, 16, True) == 50.0
    costs.observe(drafted(0, 15, is_tree=True, pass_s=400.0))
    assert costs.pass_s(0, 16, True) == 50.0


def test_costs_are_kept_by_context_and_taken_from_the_nearest() -> None:
    costs = CostModel()
    warm(costs, 0, 0, 0.0, 10.0)
    warm(costs, 4000, 0, 0.0, 20.0)
    assert costs.pass_s(100, 1) == 10.0
    assert costs.pass_s(3000, 1) == 20.0
    assert costs.pass_s(100_000, 1) == 20.0
    warm(costs, 0, 7, 1.0, 15.0)
    assert costs.pass_s(100, 8) == 15.0
    assert costs.pass_s(4000, 8) == 25.0


def test_drafts_cost_by_the_rows_of_all_sequences() -> None:
    costs = CostModel()
    for n, seconds in ((3, 4.0), (15, 8.0)):
        warm(costs, 0, n, seconds, 10.0)
    assert costs.draft_s("a", 4, True) == 4.0
    assert costs.draft_s("a", 16, True) == 8.0
    for _ in range(3):
        costs.observe(drafted(0, 3, n_sequences=4, n_draft_rows=14, n_drafted=12, draft_s=12.0))
    assert costs.draft_s("a", 14, True) == 12.0
    assert costs.draft_s("a", 4, True) == 4.0


def test_plain_rounds_of_several_sequences_are_known_by_their_number() -> None:
    costs = CostModel()
    warm(costs, 0, 0, 0.0, 10.0)
    warm(costs, 0, 7, 4.0, 30.0)
    assert not costs.knows_plain(8)
    for _ in range(3):
        costs.observe(Round(0, n_sequences=8, n_tokens=8, pass_s=20.0, sample_s=4.0))
    assert [n for n in range(1, 12) if costs.knows_plain(n)] == [1, 5, 6, 7, 8]
    assert costs.plain_s(0, 8) == 20.0 + 8 * 0.5
    again = CostModel.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert again.plain_s(0, 8) == costs.plain_s(0, 8)
    assert again.knows_plain(8)


def several(n: int, n_drafted: int) -> Round:
    """Returns a pass of n sequences that costs 8, 0.5 per row, and 1 per further sequence."""
    pass_s = 8.0 + 0.5 * (n + n_drafted) + (n - 1)
    return Round(0, n_sequences=n, n_drafted=n_drafted, n_tokens=n, pass_s=pass_s)


def test_more_rows_cost_several_sequences_what_they_cost_one() -> None:
    costs = CostModel()
    for n_drafted in (0, 3, 7, 15):
        warm(costs, 0, n_drafted, 0.0, several(1, n_drafted).pass_s)
    for _ in range(3):
        costs.observe(several(8, 0))
    for n_drafted in (0, 1, 3, 16):
        told = costs.pass_s(0, 8 + n_drafted, n_sequences=8)
        assert told == pytest.approx(several(8, n_drafted).pass_s)
    for _ in range(3):
        costs.observe(several(8, 24))
    assert costs.pass_s(0, 32) == pytest.approx(several(1, 31).pass_s)
    assert costs.pass_s(0, 32, n_sequences=8) == pytest.approx(several(8, 24).pass_s)


def test_what_verifying_several_takes_beyond_is_a_factor() -> None:
    costs = CostModel()
    for n_drafted in (0, 3, 7, 15):
        warm(costs, 0, n_drafted, 0.0, several(1, n_drafted).pass_s)
    for n in (6, 8):
        for _ in range(3):
            costs.observe(several(n, 0))
    done = several(8, 7)
    done.pass_s *= 1.2
    for _ in range(5):
        costs.observe(done)
    again = CostModel.from_dict(json.loads(json.dumps(costs.to_dict())))
    for known in (costs, again):
        assert known.pass_s(0, 15, n_sequences=8) == pytest.approx(done.pass_s)
        assert known.pass_s(0, 12, n_sequences=8) == pytest.approx(1.2 * several(8, 4).pass_s)
        assert known.pass_s(0, 12, n_sequences=6) == pytest.approx(1.2 * several(6, 6).pass_s)
        assert known.pass_s(0, 12, True, 8) == pytest.approx(1.2 * several(8, 4).pass_s)
        assert known.pass_s(0, 12) == pytest.approx(several(1, 11).pass_s)
    trees = dataclasses.replace(done, is_tree=True, pass_s=1.5 * several(8, 7).pass_s)
    for _ in range(5):
        costs.observe(trees)
    assert costs.pass_s(0, 12, n_sequences=8) == pytest.approx(1.2 * several(8, 4).pass_s)
    assert costs.pass_s(0, 15, True, 8) == pytest.approx(trees.pass_s)


def test_plain_rounds_tell_of_more_rows_until_some_were_verified() -> None:
    costs = CostModel()
    for n in (1, 8):
        for _ in range(3):
            costs.observe(several(n, 0))
    assert costs.pass_s(0, 16, n_sequences=8) > costs.pass_s(0, 8, n_sequences=8) + 3.9
    for _ in range(5):
        costs.observe(several(8, 4))
    assert costs.plain_s(0, 8) == several(8, 0).pass_s
    assert costs.pass_s(0, 12, n_sequences=8) == several(8, 4).pass_s


def test_the_first_runs_of_a_shape_do_not_count() -> None:
    costs = CostModel()
    warm(costs, 0, 0, 0.0, 10.0)
    for pass_s in (99.0, 50.0):
        costs.observe(drafted(0, 7, draft_s=9.0, pass_s=pass_s))
    costs.observe(drafted(0, 7, draft_s=3.0, pass_s=20.0))
    assert (costs.draft_s("a", 8, True), costs.pass_s(0, 8)) == (3.0, 20.0)


def measured() -> CostModel:
    costs = CostModel()
    warm(costs, 0, 0, 0.0, 10.0)
    warm(costs, 900, 7, 4.0, 18.0)
    for _ in range(3):
        warm(costs, 0, 15, 4.0, 44.0, is_tree=True)
    costs.observe(drafted(0, 3, draft_s=9.0, pass_s=9.0))
    return costs


def test_a_table_survives_as_json() -> None:
    costs = measured()
    again = CostModel.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert again.to_dict() == costs.to_dict()
    assert 4 not in {rows for _, rows, *_ in costs.to_dict()["times"]}
    for rows, is_tree in ((1, False), (8, False), (16, True)):
        assert again.pass_s(0, rows, is_tree) == costs.pass_s(0, rows, is_tree)
    for _ in range(N_TIMES):
        again.observe(Round(0, pass_s=30.0, n_tokens=1))
    assert again.pass_s(0, 1) == 30.0


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / name for name in ("target.gguf", "drafter.gguf")]
    for path in paths:
        path.write_bytes(path.name.encode())
    return [str(path) for path in paths]


def test_costs_are_found_again_for_the_same_files_and_settings(files: list[str]) -> None:
    CostFile(files, "CPU", 2).store(measured(), {})
    assert CostFile(files, "CPU", 2).load()[0].to_dict() == measured().to_dict()
    assert not CostFile(files, "CPU", 4).load()[0].knows_plain()
    assert not CostFile(files[::-1], "CPU", 2).load()[0].knows_plain()
    Path(files[1]).write_bytes(b"Drafter.gguf")
    assert not CostFile(files, "CPU", 2).load()[0].knows_plain()


def test_what_proposers_learned_is_kept_beside(files: list[str]) -> None:
    CostFile(files).store(measured(), {"suffix": {"tried": [1.0, 2.0]}})
    assert CostFile(files).load()[1] == {"suffix": {"tried": [1.0, 2.0]}}


EMPTY: dict[str, Any] = CostModel().to_dict()
DAMAGED: list[Any] = [
    "",
    "{",
    "[]",
    "null",
    '{"identity": 1}',
    "\0" * 9,
    "[" * 100_000,
    {"times": []},
    {**EMPTY, "times": [["plain", 1, 0]]},
    {**EMPTY, "times": [["plain", "a", 0, 1]]},
    {**EMPTY, "times": [["plain", 0, 0, 1]]},
    {**EMPTY, "times": [["chains", 1, 0, -1]]},
    {**EMPTY, "times": [["plain", 1, 0, 0]]},
    {**EMPTY, "times": [["chains", 1, 0, "x"]]},
    {**EMPTY, "times": [["chains", 1, 0, 1e999]]},
    {**EMPTY, "times": [["chains", 1, 1e999, 1]]},
    {**EMPTY, "times": [[[1], 1, 0, 1]]},
    {**EMPTY, "times": 3},
    {**EMPTY, "sample": None},
    {**EMPTY, "factors": [[2, True, -1]]},
    {**EMPTY, "factors": [[2, True, 0]]},
    {**EMPTY, "times": [["chains", 1, 0, 1, -1]]},
    [1],
    3,
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_table_is_replaced(files: list[str], content: Any) -> None:
    kept = CostFile(files, "CPU")
    kept.store(measured(), {})
    (path,) = _cache_dir.cache_folder().iterdir()
    if isinstance(content, str):
        path.write_text(content)
    else:
        value = {"costs": content, "learned": {}}
        path.write_text(json.dumps({**json.loads(path.read_text()), "value": value}))
    assert not kept.load()[0].knows_plain()
    kept.store(measured(), {})
    assert kept.load()[0].knows_plain()
    assert list(path.parent.iterdir()) == [path]


def test_without_a_place_to_keep_it_nothing_is_kept(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    kept = CostFile(files, "CPU")
    kept.store(measured(), {})
    assert not kept.load()[0].knows_plain()


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    _cache_dir.write("a.json", 1, 2)
    assert _cache_dir.read("a.json", 1) is None
    assert not _cache_dir.cache_folder().is_dir()


def test_a_full_disk_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def no_space(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    _cache_dir.write("a.json", 1, 2)
    monkeypatch.setattr(json, "dumps", no_space)
    _cache_dir.write("a.json", 1, 3)
    assert _cache_dir.read("a.json", 1) == 2
    assert [path.name for path in _cache_dir.cache_folder().iterdir()] == ["a.json"]


SENSELESS: list[Any] = [[], [1], 3, None, "x", {"ranked": []}, {"ranked": {}, "spines": []}]
SENSELESS += [{"ranked": {}, "spines": {"0": [[10**400], [1]]}}, {"outcomes": []}]
SENSELESS += [{"outcomes": {"0": {}}}, {"dflash": [10**400, 1]}]
NO_NUMBER = {"prior": [math.nan] * 5, "weights": [], "information": []}
SENSELESS += [{"ranked": {"0": NO_NUMBER}, "spines": {}}]


@pytest.mark.parametrize("learned", SENSELESS)
def test_what_makes_no_sense_is_not_learned(learned: Any) -> None:
    for learn in (Calibrations.from_dict, SuffixProposer().learn):
        with pytest.raises(_cache_dir.SENSELESS):
            learn(learned)
