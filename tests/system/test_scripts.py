"""Scripts that fetch llama.cpp and measure against it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepen import deepened
from small_models import retyped
from vocabularies import smollm2_file

from dflash_gguf import bundled
from dflash_gguf.backend_build import sources

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_first_builds_at_once_share_a_cache(tmp_path: Path) -> None:
    running = [start("build_peer.py", "--cache", str(tmp_path)) for _ in range(2)]
    results = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    (folder,) = {Path(output.splitlines()[-1]) for output, _ in results}
    tool = folder / "llama-speculative-simple"
    shown = subprocess.run([str(tool), "--help"], capture_output=True, text=True)
    assert "draft-dflash" in shown.stdout
    assert sorted(tmp_path.iterdir()) == sorted([folder, sources.fetch(tmp_path)])


def test_an_unknown_tool_is_one_sentence() -> None:
    process = start("build_peer.py", "llama-nonsense")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert errors.splitlines() == ["llama.cpp has no tool named 'llama-nonsense'"]


def last_line(name: str, *arguments: str) -> dict[str, object]:
    process = start(name, *arguments)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    found: dict[str, object] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.model
def test_a_random_drafter_runs_in_both_engines(tmp_path: Path) -> None:
    target, drafter = str(smollm2_file()), str(tmp_path / "drafter.gguf")
    writer = start("synthetic_gguf.py", "smollm2-dflash", drafter, "--target", target)
    _, errors = writer.communicate(timeout=600)
    assert writer.returncode == 0, errors
    short = ["-t", "1", "--draft-max", "3"]
    few = ["--part", "accepted", *short, "--prompts", "1", "--max-tokens", "8"]
    rounds = last_line("draft.py", target, drafter, *few)["results"]
    assert isinstance(rounds, dict)
    # Random drafts are never accepted, so both engines need one round per token.
    assert rounds["our_rounds"] == rounds["their_rounds"] == 7
    bench = [target, drafter, "--part", "a", *short, "--pairs", "1", "--rounds", "1"]
    work = last_line("draft.py", *bench)["results"]
    assert isinstance(work, dict)
    assert set(work) == {"0", "2"}  # plain steps, and rounds that accept 2 tokens
    assert all(work["2"][engine]["round"] > 0 for engine in ("ours", "llama.cpp"))


@pytest.mark.model
def test_the_shipped_pair_drafts_in_llama_cpp_what_it_drafts_here(tmp_path: Path) -> None:
    """Logits of the f32 pair differ by 3e-6, so a tie may change a round (probability: 0.3 %)."""
    file = tmp_path / "prompts.jsonl"
    lister = start("pair.py", "--list", str(file), "--prompts", "6")
    _, errors = lister.communicate(timeout=600)
    assert lister.returncode == 0, errors
    flags = [
        "--part",
        "accepted",
        "-f",
        str(file),
        "--draft-max",
        "7",
        "--max-tokens",
        "64",
        "-t",
        "1",
        "--kv",
        "f32",
    ]
    files = [str(retyped(x, tmp_path / x.name, "f32")) for x in (bundled.TARGET, bundled.DRAFTER)]
    found: dict[str, Any] = last_line("draft.py", *files, *flags)["results"]
    assert found["compared"] > 30
    assert found["equal"] >= found["compared"] - 1
    assert found["equal_texts"] >= found["answers"] - 1


def test_an_mtp_layer_is_accepted_as_often_as_in_llama_cpp(tmp_path: Path) -> None:
    """Weights in Q8_0: the engines round differently, so texts may part where two tokens tie."""
    model = deepened(tmp_path / "mtp.gguf", layers=1, width=1, whole_head=True)
    file = tmp_path / "prompts.jsonl"
    lister = start("pair.py", "--list", str(file), "--prompts", "8")
    _, errors = lister.communicate(timeout=600)
    assert lister.returncode == 0, errors
    for n_draft in (1, 3):
        flags = ["--part", "accepted", "-f", str(file), "--draft-max", str(n_draft), "-t", "1"]
        found: dict[str, Any] = last_line("draft.py", str(model), *flags)["results"]
        print(
            f"drafts of {n_draft}: tau {found['our_tau']:.3f}, llama.cpp's {found['their_tau']:.3f}"
        )
        assert found["compared"] > 100
        assert found["equal"] >= 0.98 * found["compared"]
        assert found["our_tau"] >= 0.99 * found["their_tau"]


def test_our_converter_takes_no_more_memory_than_the_peers() -> None:
    """Observed peak memory: 180 MB for our converter, 535 MB for llama.cpp's."""
    process = start("converter.py", "--runs", "1")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["memory_ratio"] <= 1


def test_the_loop_beside_a_simulated_model_takes_a_part_of_a_round() -> None:
    found = last_line("host.py", "--tokens", "300")["settings"]
    assert isinstance(found, dict)
    assert set(found) == {"none", "chain", "tree", "auto"}
    assert found["tree"]["tokens_a_round"] > found["chain"]["tokens_a_round"] > 3
    assert all(0 < row["host_share"] < 1 for row in found.values())


@pytest.mark.model
def test_many_sequences_run_in_both_engines() -> None:
    short = ["-n", "1", "3", "--rounds", "2", "--runs", "1"]
    found = last_line("many.py", str(smollm2_file()), *short)
    rounds = found["rounds"]
    assert isinstance(rounds, list)
    assert [row["n"] for row in rounds] == [1, 3]
    assert all(row["ours"] > 0.0 and row["llama.cpp"] > 0.0 for row in rounds)


@pytest.mark.model
def test_the_gallery_shows_each_answer_beside_a_beginning_of_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    flags = ["--kinds", "chat,prose", "--tokens", "24", "--runs", "1", "-t", "1"]
    writer = start("gallery.py", str(page), *flags)
    _, errors = writer.communicate(timeout=600)
    assert writer.returncode == 0, errors
    assert page.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    rows = [x.split(" | ") for x in page.read_text(encoding="utf-8").splitlines() if " | " in x]
    heads = [row for row in rows if row[0].startswith("drafted, 24 tokens after ")]
    assert len(heads) == 2
    texts = [row for row in rows if row not in heads]
    assert texts and all(left.rstrip().startswith(right) for left, right in texts)
