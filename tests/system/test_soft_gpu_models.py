"""ggml's CUDA kernels, executed by the software GPU: models of every architecture beside the CPU.

The modules are built on first use (`dflash-backend build cuda --for-tests few`), in four minutes on
two idle cores; those of the tests marked `full`, in eight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from soft_gpu import cuda_libraries
from synthetic_shapes import TINY_NAMES

from dflash_gguf import Error
from dflash_gguf.backend_build.for_tests import build_for_tests

EXHAUSTIVE = Path(__file__).parents[1] / "exhaustive"
PASSES = ("prompt", "serial", "chain", "tree", "after_trees")


class Limits(NamedTuple):
    """Limits of a model's logits and tokens beside those of the CPU, or of plain decoding.

    largest, median: differences of a row's logits, as a share of their range. margin: lead in
    logits by which a plain token may have won where a drafted answer differs.
    """

    largest: float = 0.03
    median: float = 0.015
    margin: float = 0.1


LIMITS = {
    "tiny-qwen3moe": Limits(largest=0.1),
    "tiny-qwen35moe": Limits(0.4, 0.05, 0.2),
    "tiny-qwen3next": Limits(0.4, 0.05, 0.2),
    "tiny-gemma4": Limits(0.5, 0.1, 0.3),
    "tiny-gemma4moe": Limits(0.5, 0.1, 0.8),
    "tiny-gemma4e": Limits(0.5, 0.1, 0.8),
}
"""Limits of models that amplify rounding as much on the CPU alone, with and without activations in
eight bits: rounding sends tokens to other experts, and Gemma 4 does not scale attention scores down
(docs/develop/figures.md)."""
WEIGHT_LIMITS = {
    ("tiny-llama", "q4_k_m"): Limits(largest=0.1),
    ("tiny-qwen35", "q4_k_m"): Limits(largest=0.1),
    ("tiny-qwen35", "q4_0"): Limits(largest=0.5),
}
"""Limits by model and type of weights: ggml's products of 9 rows and more with Q4_K multiply
minimums with sums of unrounded activations, and single rows of this tiny-qwen35 in Q4_0 amplify
rounding on the CPU alone (docs/develop/figures.md)."""
OWN_KERNELS = {"8convolve", "9tree_form", "14promote_states"}
"""Parts of the mangled names of our own kernels, which recurrent layers need."""
RECURRENT = ("tiny-qwen35", "tiny-qwen35moe", "tiny-qwen3next")
Compare = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Runs a short part of a script for one model on the software GPU; returns its line."""
    run = comparing(tmp_path_factory, "few")
    return lambda script, name, *flags: run(script, name, "--weights", "q8_0", "--short", *flags)


@pytest.fixture(scope="module")
def compare_long(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Runs a whole script for one model, with all kernels of tests."""
    return comparing(tmp_path_factory, "all")


def comparing(tmp_path_factory: pytest.TempPathFactory, which: str) -> Compare:
    try:
        libraries = cuda_libraries()
        module = build_for_tests(which, jobs=2)
    except Error as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(libraries),
        "SOFT_GPU_THREADS": "1",
        "SOFT_GPU_TRACE": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("costs")),
    }

    def of(script: str, name: str, *flags: str) -> dict[str, Any]:
        command = [sys.executable, str(EXHAUSTIVE / script), "--device", "CUDA0"]
        command += ["--backend-module", str(module), "--only", name, *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        line: dict[str, Any] = json.loads(done.stdout)
        launches = {x.partition(" grid ")[0] for x in done.stderr.splitlines()}
        line["own_kernels"] = {x for x in OWN_KERNELS if any(x in one for one in launches)}
        return line

    return of


def check_logits(line: dict[str, Any], limits: Limits) -> None:
    assert max(line[x] for x in PASSES) < limits.largest
    assert line["median_node"] < limits.median
    assert line["cousins"] > 2
    assert line["mistaken_cousins"] == 0


def check(line: dict[str, Any], name: str, limits: Limits | None = None) -> None:
    limits = limits or LIMITS.get(name, Limits())
    check_logits(line, limits)
    assert line["own_kernels"] == (OWN_KERNELS if name in RECURRENT else set())
    assert line["drafter_same_of_8"] > 5
    assert line["greedy_continued"]["n_cached"] > 20
    for way in ("greedy_chain", "greedy_tree"):
        margins = line[way]["margins"]
        assert max(margins, default=0.0) < limits.margin
        assert margins or line[way]["tokens_a_round"] > 3


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_trees_and_answers(compare: Compare, name: str) -> None:
    check(compare("agreement.py", name, "--cache-type", "f16"), name)


@pytest.mark.parametrize("cache_type", ["f32", "bf16", "q8_0", "q5_1", "q4_0"])
def test_types_of_k_and_v(compare: Compare, cache_type: str) -> None:
    # A number of four bits that rounding changes moves a row by up to 0.04 of the range.
    limits = Limits(0.1, 0.03) if cache_type == "q4_0" else Limits()
    line = compare("agreement.py", "tiny-llama", "--cache-type", cache_type)
    check_logits(line, limits)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen35"])
def test_layers_split_with_the_cpu(compare: Compare, name: str) -> None:
    line = compare("agreement.py", name, "--cache-type", "f16", "-ngl", "2")
    check_logits(line, Limits())


def check_rows(line: dict[str, Any], limits: Limits) -> None:
    """Checks rows of a text that a line of timelines.py compares."""
    assert line["largest"] < limits.largest
    assert line["median"] < limits.median
    assert max(line["margins"], default=0.0) < limits.margin


def check_many(line: dict[str, Any], name: str) -> None:
    limits = LIMITS.get(name, Limits())
    check_rows(line, limits)
    assert line["begun"] > 5  # a sequence's cells and states were used again
    assert max(line["answers"]["margins"], default=0.0) < limits.margin
    assert line["answers"]["margins"] or line["answers"]["tokens_a_round"] > 3


def check_promoted(line: dict[str, Any], name: str) -> None:
    check_rows(line["along"], LIMITS.get(name, Limits()))
    check_rows(line["after"], LIMITS.get(name, Limits()))
    # A promotion along a wrong path moves the rows as another token does.
    assert line["after"]["median"] < line["one_token"]["median"] / 2


def check_context(line: dict[str, Any], name: str) -> None:
    limits = LIMITS.get(name, Limits())
    check_rows(line, limits)
    assert line["ended_by"] == "context"
    assert line["tokens"] == [line["left"] + 1] * 3
    assert max(line["answer_margins"], default=0.0) < limits.margin


def test_drafts_of_an_mtp_layer(tmp_path_factory: pytest.TempPathFactory) -> None:
    line = comparing(tmp_path_factory, "few")("mtp_agreement.py", "qwen35")
    assert line["n"] > 120
    assert line["n_apart"] < 8
    assert line["largest"] < 0.3


def test_sequences_at_once(compare: Compare) -> None:
    check_many(compare("timelines.py", "tiny-qwen35", "--part", "many"), "tiny-qwen35")


def test_promoted_states(compare: Compare) -> None:
    check_promoted(compare("timelines.py", "tiny-qwen35", "--part", "promoted"), "tiny-qwen35")


def test_the_end_of_the_context(compare: Compare) -> None:
    check_context(compare("timelines.py", "tiny-gpt-oss", "--part", "context"), "tiny-gpt-oss")


@pytest.mark.full
@pytest.mark.parametrize("name", TINY_NAMES)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_long_trees_and_answers(compare_long: Compare, name: str, cache_type: str) -> None:
    flags = "--weights", "q8_0", "--cache-type", cache_type
    check(compare_long("agreement.py", name, *flags), name)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["f32", "q4_0", "q4_k_m"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen35"])
def test_types_of_weights(compare_long: Compare, name: str, weights: str) -> None:
    line = compare_long("agreement.py", name, "--weights", weights, "--cache-type", "f16")
    check(line, name, WEIGHT_LIMITS.get((name, weights)))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "tiny-llama",
        "tiny-qwen3moe",
        "tiny-qwen35",
        "tiny-qwen35moe",
        "tiny-gpt-oss",
        "tiny-gemma4e",
    ],
)
def test_many_sequences_at_once(compare_long: Compare, name: str) -> None:
    check_many(compare_long("timelines.py", name, "--part", "many"), name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe", "tiny-qwen3next"])
def test_states_promoted_for_500_tokens(compare_long: Compare, name: str) -> None:
    check_promoted(compare_long("timelines.py", name, "--part", "promoted"), name)


@pytest.mark.full
@pytest.mark.parametrize("name", TINY_NAMES)
def test_the_end_of_every_context(compare_long: Compare, name: str) -> None:
    check_context(compare_long("timelines.py", name, "--part", "context"), name)
