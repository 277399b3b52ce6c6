"""dflash-run as a process: a real model, a closed pipe and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from vocabularies import smollm2_file

from dflash_gguf import bundled


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "dflash_gguf", "-m", str(smollm2_file()), "-t", "1", *flags]


@pytest.mark.model
def test_a_real_model_answers_and_repeats_itself() -> None:
    flags = ["-p", "Say hello.", "-n", "12", "--json", "--temp", "0.8", "-s", "7"]
    reports = [
        json.loads(subprocess.run(command(*flags), capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert reports[0]["tokens"] == reports[1]["tokens"]
    assert reports[0]["n_tokens"] > 0
    assert reports[0]["text"]


@pytest.mark.model
def test_a_closed_pipe_ends_the_process_quietly() -> None:
    flags = ["-p", "Count.", "-n", "400", "--ignore-eos", "-c", "2048"]
    with subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(4)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.model
def test_ctrl_c_ends_the_answer_and_prints_the_figures() -> None:
    flags = ["-p", "Count.", "-n", "4000", "--ignore-eos"]
    with subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(4)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"ended by cancelled" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "flags, closed", [(["-p", "def f("], 2), (["-i", "--chat-template", "chatml"], 0)]
)
def test_closed_standard_streams_do_not_matter(flags: list[str], closed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_gguf", "-m", "python-tiny", "-t", "1", "-n4", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=lambda: os.close(closed),
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert bool(done.stdout) == (closed == 2)


def test_an_impatient_ctrl_c_gets_no_traceback() -> None:
    flags = ["-p", "def f(x):", "-n", "8000", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "dflash_gguf", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(4)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "prompt",
    [
        "Write a quicksort algorithm in Python. Write code only.",
        "Explain the Pythagorean theorem",
        "Plan a 1 day trip to DC",
    ],
)
def test_command_lines_of_llama_speculative_simple_work(prompt: str) -> None:
    """The flags with which llama.cpp's DFlash was measured first, on a machine without a GPU."""
    pair = bundled.find("python-tiny")
    flags = f"-md {pair.drafter} --dflash -n 32 --draft-max 16 -cd 512 -c 1024 --temp 0 --top-k 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dflash_gguf", "-m", str(pair.target), "-p", prompt),
            *(*flags.split(), "--seed", "42", "-ngl", "99", "-ngld", "99"),
        ],
        env=os.environ | {"LLAMA_SPEC_NO_THINK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for note in ("--dflash is ignored", "-cd is ignored", "--draft-max is 16"):
        assert f"warning: {note}" in done.stderr
    assert "Traceback" not in done.stderr
