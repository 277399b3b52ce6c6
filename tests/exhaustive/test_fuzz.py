"""Damaged model files raise an error: no signal, no hang, no huge allocation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gguf_files import make_gguf

N_CHILDREN = 2
CHILD = Path(__file__).parent / "fuzz_model.py"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ORIGINALS = {
    "llama": ("llama", "f32", {"tie_word_embeddings": True}),
    "llama_q4_0": ("llama", "q4_0", {"attention_bias": True}),
    "qwen3": ("qwen3", "q8_0", {}),
    "qwen3moe": ("qwen3moe", "f16", {"num_experts": 4, "moe_intermediate_size": 32}),
    "qwen35": ("qwen35", "q8_0", {"mtp": True, "intermediate_size": 64}),
    "qwen35moe": ("qwen35moe", "f32", {"num_experts": 4, "moe_intermediate_size": 32}),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("originals")
    for name, (kind, outtype, settings) in ORIGINALS.items():
        made = make_gguf(folder / name, kind, outtype=outtype, **{**SMALL, **settings})
        made.rename(folder / f"{name}.gguf")
    return folder


def run_child(folder: Path, first: int, count: int) -> tuple[list[str], int]:
    """Runs mutations [first, first + count); returns failures and the number of prefilled files.

    If a child dies, its last index is recorded as a failure, and the next child starts after it.
    """
    wrong: list[str] = []
    end = first + count
    while first < end:
        done = subprocess.run(
            [sys.executable, str(CHILD), str(folder), str(first), str(end - first)],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        lines = done.stdout.split("\n")
        if done.returncode == 0:
            return wrong, int(lines[-2].rpartition(" ")[2])
        last = max((int(x) for x in lines if x.isdigit()), default=first)
        wrong.append(f"mutation {last}: exit {done.returncode}: {done.stderr[-800:]}")
        first = last + 1
    return wrong, 0


@pytest.mark.parametrize(
    ("first", "count"), [(0, 2400), pytest.param(2400, 24000, marks=pytest.mark.full)]
)
def test_damaged_models_end_in_a_sentence(originals: Path, first: int, count: int) -> None:
    found: list[tuple[list[str], int]] = []
    share = count // N_CHILDREN

    def run(start: int) -> None:
        found.append(run_child(originals, start, share))

    starts = range(first, first + count, share)
    threads = [threading.Thread(target=run, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [x for each, _ in found for x in each]
    assert not wrong, "\n".join(wrong)
    # Enough damaged files must still run, or only header checks were tested.
    n_prefilled = sum(n for _, n in found)
    print(f"{n_prefilled} of {count} damaged files still ran")
    assert count // 20 < n_prefilled < count // 2
