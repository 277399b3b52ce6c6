"""What asks a server: dflash-bench --url, and the scripts for deployed ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, tiny

from dflash_gguf.bench import command as bench

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("--api-key", "k")
    yield found
    found.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def add(a, b):\\n"}\n{"tokens": [5, 6, 7]}\n')
    return file


@pytest.mark.parametrize("chat", [(), ("--chat", "Answer:")])
def test_bench_measures_a_server_at_each_concurrency(
    served: Served, prompts: Path, chat: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("-f", str(prompts), "-n", "12", "--concurrency", "1,3", "--api-key", "k", *chat)
    assert bench.main(["--url", f"{served.url}/v1", *flags]) == 0
    out, err = capsys.readouterr()
    one, three = map(json.loads, out.splitlines())
    assert (one["concurrency"], one["requests"], one["tokens"]) == (1, 2, 24)
    assert (three["concurrency"], three["requests"], three["tokens"]) == (3, 6, 72)
    assert one["failed"] == three["failed"] == 0
    assert one["first_token_ms"] > 0
    assert one["tokens_per_s"] > 0
    assert one["tokens_per_round"] >= 1
    assert len(err.splitlines()) == 3


def test_bench_says_what_a_server_refuses(
    served: Served, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", served.url, "-f", str(prompts), "--concurrency", "1"]
    assert bench.main(flags) == 1
    assert "a key is needed" in json.loads(capsys.readouterr().out)["failure"]
    for bad, sentence in (
        (["--url", "ftp://x", "-f", str(prompts)], "--url ftp://x: must be like"),
        ([*flags[:-1], "0"], "--concurrency 0: must be numbers"),
    ):
        assert bench.main(bad) == 1
        assert sentence in capsys.readouterr().err


def test_the_smoke_test_passes_here_and_fails_elsewhere(served: Served) -> None:
    command = [sys.executable, str(SCRIPTS / "smoke.py"), served.url, "--tokens", "400"]
    found = subprocess.run([*command, "--api-key", "k"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line[:4] for line in found.stdout.splitlines()] == ["ok  "] * 6
    found = subprocess.run([*command, "--api-key", "wrong"], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout.count("FAIL ") == 6
    assert "answered 401" in found.stdout


def test_the_trial_counts_what_became_of_requests(served: Served) -> None:
    command = [sys.executable, str(SCRIPTS / "serve_trial.py"), served.url, "-n", "60"]
    command += ["--at-once", "4", "--api-key", "k", "--pid", str(served.process.pid)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(found.stdout.splitlines()[-1])
    assert report["answered"] + report["refused"] + report["left"] == report["requests"] == 54
    assert (report["wrong"], report["server_errors"]) == (0, 0)
    assert report["http_cpu_s"] > 0
