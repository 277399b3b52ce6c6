"""dflash-bench: prompt files, settings, the replay, and the whole command on a tiny pair."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import make_pair

from dflash_gguf.bench import replay
from dflash_gguf.bench.command import main
from dflash_gguf.bench.measure import branched
from dflash_gguf.bench.prompts import Prompt, read_prompts
from dflash_gguf.bench.settings import DEFAULT, Setting, parse_settings
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.native import Draft
from dflash_gguf.speculative.cost_model import CostModel, Round


def test_prompt_files_hold_texts_or_tokens(tmp_path: Path) -> None:
    lines = '{"prompt": "ä b", "task": 3}\n\n{"tokens": [1, 2]}\n'
    plain, packed = tmp_path / "some.jsonl", tmp_path / "more.jsonl.gz"
    plain.write_text(lines, encoding="utf-8")
    packed.write_bytes(gzip.compress(lines.encode()))
    expected = [Prompt("some 1", "ä b"), Prompt("some 2", None, (1, 2)), Prompt("more 1", "ä b")]
    assert read_prompts([str(plain), str(packed)])[:3] == expected
    assert len(read_prompts([str(plain), str(packed)], 1)) == 2


BAD = {
    "": "holds no prompt",
    "\n \n": "holds no prompt",
    "hello": "line 1 is not JSON",
    "[1]": "line 1 needs a",
    '{"prompt": 3}': "line 1 needs a",
    '{"prompt": ""}': "line 1 needs a",
    '{"tokens": []}': "line 1 needs a",
    '{"tokens": [1, true]}': "line 1 needs a",
    '{"tokens": [1], "prompt": "x"}': "line 1 needs a",
    '{"prompt": "x"}\n{': "line 2 is not JSON",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_prompt_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        read_prompts([str(path)])
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(ValueError, match="is not a prompt file"):
        read_prompts([str(path)])


def test_settings_have_names() -> None:
    found = parse_settings(DEFAULT, 15)
    assert ",".join(map(str, found)) == DEFAULT
    assert parse_settings("chain 8,chain 20, chain 15", 9) == [
        Setting("chain", 8),
        Setting("chain", 9),
    ]
    assert Setting("chain", 4).fields == {"draft": "chain", "draft_max": 4}
    assert Setting("tree", 9).fields == {"draft": "tree", "tree_budget": 9}
    assert Setting("auto").fields == {"draft": "auto"}
    for text in ("", "chain", "chain x", "tree 0", "tree 256", "none 3", "bush 4", "tree -1"):
        with pytest.raises(ValueError, match=r"is no setting|must have 1 to"):
            parse_settings(text, 15)


def test_ratios_and_their_interval() -> None:
    mean, low, high = ratio_interval([1.0, 2.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert 1.0 <= low < mean < high <= 4.0


@pytest.mark.parametrize("n", [1, 2, 3, 8, 24, 64, 256])
def test_measured_trees_are_trees(n: int) -> None:
    parents = branched(n)
    assert len(parents) == n
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert n < 4 or len(set(parents)) < n


def known_costs(rows: Callable[[int], float], draft: Callable[[int], float]) -> CostModel:
    costs = CostModel()
    for _ in range(2):
        costs.observe(Round(0, n_tokens=1, pass_s=rows(1)))
        for n in (1, 2, 3, 5, 7, 11, 15):
            for is_tree in (False, True):
                done = Round(0, n_positions=n, is_top1=not is_tree, n_drafted=n, is_tree=is_tree)
                done.n_tokens, done.draft_s, done.pass_s = 1, draft(n), rows(n + 1)
                costs.observe(done)
    return costs


def recorded(hits: float, n_tokens: int = 200) -> replay.Record:
    """An answer of random tokens, whose drafts put the right one first that often, else second."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, n_tokens + 16).tolist()
    drafts = []
    for at in range(n_tokens - 1):
        right = np.array(tokens[at + 1 : at + 16])[:, None]
        found = np.concatenate([right, 1000 + np.tile(np.arange(31), (15, 1))], axis=1)
        missed = rng.random(15) >= hits
        found[missed, :2] = found[missed, 1::-1]
        logits = np.tile([5.0, *np.linspace(2, -4, 31)], (15, 1)).astype(np.float32)
        drafts.append({15: Draft(found.astype(np.int32), logits, np.logaddexp.reduce(logits, 1))})
    return replay.Record(100, tokens[:n_tokens], drafts)


def test_a_replay_takes_what_the_record_would_have_accepted() -> None:
    perfect, costs = recorded(1.0), known_costs(lambda rows: 1.0 + rows, lambda n: 0.5 * n)
    seconds, rounds = replay.play(perfect, Setting("chain", 4), costs, replay.Learned(), 63)
    assert all(done.n_accepted == done.n_drafted for done in rounds)
    assert sum(done.n_tokens for done in rounds) == 199
    assert seconds == pytest.approx(sum(6.0 + 2.0 for _ in rounds[:-1]) + rounds[-1].seconds)
    plain, _ = replay.play(perfect, Setting("none"), costs, replay.Learned(), 63)
    assert plain == pytest.approx(199 * 2.0)
    second = recorded(0.0)
    _, rounds = replay.play(second, Setting("chain", 4), costs, replay.Learned(), 63)
    assert {done.n_accepted for done in rounds} == {0}
    _, rounds = replay.play(second, Setting("tree", 40), costs, replay.Learned(), 63)
    assert np.mean([done.n_accepted for done in rounds]) > 1


@pytest.mark.parametrize("hits", [0.3, 0.9])
@pytest.mark.parametrize("per_row", [0.01, 1.0])
def test_auto_is_held_against_the_best(hits: float, per_row: float) -> None:
    records = [recorded(hits), recorded(hits)]
    costs = known_costs(lambda rows: 5.0 + per_row * rows, lambda _: 0.5)
    speeds = replay.evaluate(records, parse_settings(DEFAULT, 15), costs, 63)
    ratios = replay.against_best(speeds)
    assert ratios[1] > 0.85
    assert max(max(rates) for rates in speeds.values()) >= speeds["none"][0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pair = make_pair(tmp_path_factory.mktemp("pair"), "llama", block_size=8)
    return ["--pair", str(pair.target), str(pair.drafter), "-c", "256", "-t", "1"]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"tokens": [3 + i, 9, 14]}) + "\n" for i in range(3)))
    return str(path)


def output(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_the_command_prints_a_line_an_answer_and_a_summary(
    tiny: list[str], prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "curve.png"
    flags = ["-f", prompts, "--settings", "none,chain 3,tree 6,auto", "-n", "20"]
    assert main([*tiny, *flags, "--plot", str(image)]) == 0
    lines, err = output(capsys)
    assert len(lines) == 3 * 4 + 1
    for line in lines[:-1]:
        assert line["n_equal"] == line["n_tokens"] == 20
        assert line["pair"] == "target + drafter"
    summary = lines[-1]["summary"]
    assert [entry["setting"] for entry in summary] == ["none", "chain 3", "tree 6", "auto"]
    assert summary[0]["ratio"] == [1.0, 1.0, 1.0]
    assert all(entry["equal"] == entry["prompts"] == 3 for entry in summary)
    assert "| tree 6 |" in err
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_command_replays(
    tiny: list[str], prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-f", prompts, "--limit", "2", "--settings", "none,chain 3,tree 6,auto", "-n", "12"]
    assert main([*tiny, *flags, "--replay"]) == 0
    lines, err = output(capsys)
    assert len(lines) == 3
    assert set(lines[0]["tokens_per_s"]) == {"none", "chain 3", "tree 6", "auto"}
    assert lines[-1]["auto_by_best"]["least"] == pytest.approx(
        min(line["auto_by_best"] for line in lines[:2]), abs=1e-4
    )
    assert CostModel.from_dict(lines[-1]["costs"]).knows_plain
    assert "auto by the best of each prompt: mean" in err


def test_the_command_sweeps_pairs_and_prompt_files(
    tiny: list[str], prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other, image = tmp_path / "other.jsonl", tmp_path / "sweep.png"
    other.write_text(json.dumps({"tokens": [5, 6, 7, 8]}) + "\n")
    flags = ["-f", prompts, "-f", str(other), "--limit", "2", "-n", "8", "--plot", str(image)]
    assert main([*tiny, "--pair", *tiny[1:3], *flags, "--sweep"]) == 0
    lines, err = output(capsys)
    entries = lines[-1]["sweep"]
    assert [(e["class"], e["setting"], e["prompts"]) for e in entries] == [
        (name, setting, 2 * n)
        for name, n in (("ids", 2), ("other", 1))
        for setting in ("none", "auto")
    ]
    assert "| pair | setting | ids | other |" in err
    assert err.count("| target + drafter |") == 2
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_many_answers_at_once(
    tiny: list[str], prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "parallel.png"
    flags = ["-f", prompts, "-n", "6", "--parallel", "1,3", "--plot", str(image)]
    assert main([*tiny, *flags]) == 0
    lines, err = output(capsys)
    assert [(line["n"], line["setting"]) for line in lines] == [
        (n, setting) for n in (1, 3) for setting in ("none", "auto")
    ]
    assert all(line["tokens_per_s"] > 0 for line in lines)
    assert [line["ratio"] is None for line in lines] == [True, False] * 2
    assert "| target + drafter | 3 | auto |" in err
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_pair_has_a_name(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-f", prompts, "--limit", "1", "--settings", "none,chain 3", "-n", "8"]
    assert main(["--pair", "python-tiny", *flags]) == 0
    lines, _ = output(capsys)
    assert lines[0]["pair"] == "python-tiny-q8_0 + python-tiny-dflash-q8_0"
    assert main(["--pair", "one.gguf", *flags]) == 1
    sentence = "error: --pair one.gguf: must be a model and its drafter, or one name\n"
    assert capsys.readouterr().err == sentence


def test_bad_arguments_are_one_sentence(
    tiny: list[str], prompts: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, sentence in (
        (["-f", prompts, "--settings", "bush 3"], "'bush 3' is no setting"),
        (["-f", prompts, "--parallel", "0,1"], "--parallel 0,1: must be numbers like 1,4,8"),
        (["-f", prompts, "--parallel", "1000"], "n_parallel is 1000"),
        (["-f", prompts, "--sweep", "--replay"], "--sweep, --parallel and --replay exclude"),
        (["-f", prompts, "--limit", "0"], "--limit is 0, must be at least 1"),
        (["-f", prompts, "-n", "1"], "--predict is 1, must be at least 2"),
        (["-f", str(tmp_path / "none.jsonl")], "none.jsonl: No such file"),
        (["-f", prompts, "--temp", "nan"], "temperature is nan, must be finite"),
    ):
        code = main([*tiny, *flags, "-n", "4"] if "-n" not in flags else [*tiny, *flags])
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("error: ")
        assert sentence in err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tiny: list[str],
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*tiny, "-f", prompts, "--plot", "x.png"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: a plot needs matplotlib: pip install 'dflash-gguf[bench]'\n")
