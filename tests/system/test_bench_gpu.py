"""scripts/bench_gpu.py on the CPU with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import agreement
import pytest
from fake_backend import compiled_device
from gpu.child import Child
from gpu.files import write_pair
from gpu.ggml_device import copied_gb_per_s
from gpu.limits import Moved, head_bytes
from gpu.setting import QUICK, Setting

from dflash_gguf import native
from dflash_gguf.backend_build.build import module_path
from dflash_gguf.backend_build.sources import installed_version
from dflash_gguf.config import LoadConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_gpu.py"


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    flags = ["--quick", "-t", "1", "--folder", str(folder), *arguments]
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = start(folder, "--device", "CPU", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_part(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns a part's lines without its last line, which must report no error."""
    *found, end = (line for line in lines if line["part"] == name)
    assert set(end) == {"part", "seconds_in_all"}, end
    return found


@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_outputs_are_checked_before_the_work(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    name = "pipe" if flag == "--out" else "missing/x.png"
    done = start(tmp_path, "--device", "CPU", "--parts", "device", flag, str(tmp_path / name))
    assert done.returncode == 2
    assert f"error: {flag} {tmp_path}" in done.stderr


def test_every_part_measures(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    parts = "device,chain,plain,sweep,memory,prefill"
    lines = run(tmp_path, "--parts", parts, "--out", str(out))
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    (device,) = of_part(lines, "device")
    assert device["device"] == "CPU"
    assert device["copied_gb_per_s"] > 0
    (written,) = of_part(lines, "files")
    assert written["bytes"] == sum((tmp_path / name).stat().st_size for name in written["written"])
    alone, both, ratio = of_part(lines, "plain")
    assert both == {**alone, "llama.cpp_tokens_per_s": ANY, "ratio": ANY}
    assert ratio["interval"][0] <= ratio["ratio"] <= ratio["interval"][1]
    (tools,) = of_part(lines, "tools")
    assert (Path(tools["folder"]) / "peer-rounds").is_file()
    chains = of_part(lines, "chain")
    assert [x["accepted"] for x in chains] == [2, 4, 8, 2, 4, 8]
    for ours, with_theirs in zip(chains[:3], chains[3:], strict=True):
        assert with_theirs == {**ours, "llama.cpp": ANY, "ratio": ANY, "interval": ANY}
    sweep = of_part(lines, "sweep")
    sizes = [("chain", n) for n in QUICK.chains] + [("tree", n) for n in QUICK.budgets]
    assert [(x["kind"], x["size"]) for x in sweep] == [("plain", 0), *sizes]
    for line in sweep:
        inside = line["submit_ms"] + line["wait_ms"]
        assert 0 < line["outside_ms"] < line["ms"]["round"]
        assert inside + line["outside_ms"] == pytest.approx(line["ms"]["round"], abs=0.01)
        assert line["arena_grew_bytes"] == line["read_bytes"] == 0
    *_, last = memory = of_part(lines, "memory")
    filled = [x["position"] for x in memory if "tokens_per_s" in x and "kind" not in x]
    assert len(filled) == 8
    assert sorted(filled) == filled
    assert filled[-1] < last["position"]
    assert memory[0]["planned_bytes"] == last["allocated_bytes"]
    assert last["position"] <= last["n_ctx"] == QUICK.n_long
    assert last["position"] > QUICK.n_long / 4  # rounds may end well before the context is full
    prompts = of_part(lines, "prefill")
    assert [x["tokens"] for x in prompts] == list(QUICK.prompts) * 2
    assert all(("ratio" in x) == (index >= len(QUICK.prompts)) for index, x in enumerate(prompts))


def test_the_device_agrees_with_the_cpu_where_it_is_the_cpu(tmp_path: Path) -> None:
    names = ("tiny-qwen3moe", "tiny-qwen35moe")
    setting = Setting("CPU", None, tmp_path, QUICK, threads=1)
    lines = list(agreement.compare(setting, names))
    assert [x["architecture"] for x in lines] == ["qwen3moe", "qwen35moe"]
    for line in lines:
        assert max(line[x] for x in ("prompt", "serial", "chain", "tree", "after_trees")) < 1e-5
        assert line["cousins"] > 20
        assert line["mistaken_cousins"] == 0
        assert line["compared_cousins"] == line["cousins"]
        assert line["drafter_same_of_8"] == 8
        for way in ("greedy_chain", "greedy_tree", "sampled_chain", "sampled_tree"):
            assert line[way]["differences"] == 0
            assert line[way]["tokens_a_round"] > 2


def test_a_part_that_fails_costs_only_itself(tmp_path: Path) -> None:
    missing = ["-m", str(tmp_path / "missing.gguf"), "-md", str(tmp_path / "none.gguf")]
    lines = run(tmp_path, *missing, "--parts", "device,plain,sweep")
    errors = {line["part"]: line["error"] for line in lines if "error" in line}
    assert set(errors) == {"plain", "sweep"}
    assert all("missing.gguf" in error for error in errors.values())
    assert of_part(lines, "device")


def test_a_backend_that_is_there_is_measured_without_a_build(tmp_path: Path) -> None:
    module = module_path("vulkan", tmp_path)
    module.parent.mkdir()
    compiled_device(module)
    flags = ["--build", "vulkan", "--cache", str(tmp_path), "--device", "Fake0"]
    done = start(tmp_path, *flags, "--parts", "device,sweep", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (built,) = of_part(lines, "build")
    assert (built["module"], built["compiled"]) == (str(module), False)
    assert of_part(lines, "device")[0]["device"] == "Fake0"
    assert len(of_part(lines, "sweep")) == 3


@pytest.mark.parametrize("is_there", [False, True])
def test_a_backend_that_cannot_be_built_is_one_sentence(tmp_path: Path, is_there: bool) -> None:
    module = module_path("vulkan", tmp_path)
    if is_there:
        module.parent.mkdir()
        module.write_bytes(b"of another machine")
    flags = ["--build", "vulkan", "--cache", str(tmp_path), "--parts", "device"]
    done = start(tmp_path, *flags, PIP_NO_INDEX="1")
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: no backend to measure: cannot download llama-cpp-python")
    assert f"copy llama.cpp-{installed_version()} into {tmp_path}" in said
    assert [json.loads(line)["part"] for line in done.stdout.splitlines()] == ["build"]
    assert module.is_file() == is_there


def test_a_part_without_time_is_named(tmp_path: Path) -> None:
    lines = run(tmp_path, "--parts", "device,correct", "--limit", "4")
    assert [x["part"] for x in lines] == ["device", "correct"]
    assert all("s were left" in x["error"] for x in lines)


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    setting = Setting("CUDA7", None, tmp_path, QUICK)
    with pytest.raises(native.Error, match="no device CUDA7 among CPU"):
        setting.found_device()
    with pytest.raises(native.Error, match="no GPU among CPU"):
        Setting(None, None, tmp_path, QUICK).found_device()


def python(code: str, limit_s: float) -> Child:
    return Child([sys.executable, "-c", code], {}, limit_s)


def test_a_process_that_hangs_is_stopped_after_what_it_printed() -> None:
    child = python("import time; print(1, flush=True); time.sleep(600)", 3.0)
    assert list(child.lines()) == ["1"]
    assert child.error is not None
    assert child.error.startswith("stopped at the time limit, after ")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.exit('error: no such thing')", "no such thing"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        (
            "import os; os.write(2, b'CUDA error: out of memory\\n  at x.cu:1\\n'); os.abort()",
            "CUDA error: out of memory",
        ),
        ("import os; os.abort()", "ended with status -6 and no message"),
    ],
)
def test_the_error_of_a_process_is_one_sentence(code: str, error: str) -> None:
    child = python(code, 60)
    assert list(child.lines()) == []
    assert child.error == error


def test_a_process_may_end_what_it_started(tmp_path: Path) -> None:
    """The child ends its own children, like ninja, whose compilers have process groups."""
    done = tmp_path / "done"
    child = python(
        "import signal, sys, time\n"
        f"def end(*_): time.sleep(0.2); open({str(done)!r}, 'w').close(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print(1, flush=True); time.sleep(60)",
        60,
    )
    assert next(child.lines()) == "1"
    child.stop()
    assert done.exists()


def test_a_copy_is_waited_for() -> None:
    """A copy that is only queued would give a rate beyond any memory's."""
    assert 0 < copied_gb_per_s("CPU", 8 << 20, n_runs=3) < 1e4


def test_bytes_of_a_round_are_those_of_its_tensors(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, "tiny-qwen35", "q8_0")
    assert head_bytes(str(target), tied=False) == 512 * 256 * 34 // 32
    assert head_bytes(str(drafter), tied=False) == 0
    model = native.Model(str(target), LoadConfig(n_ctx=512, n_gpu_layers=0, draft_window=512))
    sequence = native.Sequence(
        native.Engine(model, drafter=native.Drafter(str(drafter), model), draft_window=512)
    )
    sequence.prefill(list(range(300, 428)))
    moved = Moved.of(sequence)
    assert moved.cache == sequence.engine.bytes_of("kv") // 4
    assert moved.plain == moved.weights + moved.cache + 2 * sequence.engine.bytes_of("recurrent")
    assert moved.drafted(8) - moved.drafted(7) == 2 * moved.trace > 0
    assert moved.draft > drafter.stat().st_size * 0.9
