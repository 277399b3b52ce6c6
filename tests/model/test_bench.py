"""The whole dflash-bench command on a tiny pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import make_pair

from dflash_gguf.bench.command import main
from dflash_gguf.speculative.cost_model import CostModel


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
    plain = ["-f", prompts, "--settings", "none,auto", "-n", "4", "--limit", "1"]
    assert main([*tiny, *plain, "--plot", str(tmp_path / "plain.png")]) == 0
    capsys.readouterr()
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
    assert CostModel.from_dict(lines[-1]["costs"]).knows_plain()
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
    for pair, sentence in (
        (
            ["--pair", "one.gguf"],
            "--pair one.gguf: give a model and its drafter, or one known name",
        ),
        (["-m", "one.gguf"], "-m one.gguf: give a model and its drafter, or one known name"),
        (["--url", "http://x", "-md", "d.gguf"], "-md d.gguf is a drafter: give its target"),
        (["--url", "http://x", "--diagnose"], "--diagnose measures files: leave it out with --url"),
        (["--url", "http://x", "--plot", "x.png"], "--plot measures files"),
        (["--url", "http://x", "--settings", "none"], "--settings measures files"),
        (["--url", "http://x", "-np", "2"], "--parallel measures files"),
        (["--url", "http://x", "-c", "100"], "--ctx-size measures files"),
        (["--pair", "smollm2", "--concurrency", "2"], "--concurrency measures a server"),
        (["--pair", "smollm2", "--reuse"], "--reuse measures a server"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*pair, "-f", prompts])
        assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_bad_arguments_are_one_sentence(
    tiny: list[str], prompts: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, sentence in (
        (["-f", prompts, "--settings", "bush 3"], "'bush 3' is no setting"),
        (["-f", prompts, "--parallel", "0,1"], "--parallel 0,1: must be numbers like 1,4,8"),
        (["-f", prompts, "--parallel", "1000"], "n_parallel is 1000"),
        (["-f", prompts, "--sweep", "--replay"], "exclude each other"),
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
