"""Runs compared programs or settings in turns and summarises the results, for all benchmarks.

Other load on the machine then slows all of them alike: it widens a ratio's interval, but does not
shift the ratio.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dflash_gguf import native

T = TypeVar("T")
Figures = dict[str, Any]


def rotated(names: Sequence[str], turn: int) -> Iterator[str]:
    """Yields all names once, beginning one name later in each turn."""
    for i in range(len(names)):
        yield names[(turn + i) % len(names)]


def in_turns(
    sides: Mapping[str, Callable[[], T]], n_rounds: int, first: int = 0
) -> dict[str, list[T]]:
    """Calls every function once a round, in rotating order; returns the results by name."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(n_rounds):
        for name in rotated(list(sides), first + turn):
            results[name].append(sides[name]())
    return results


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the wall seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_interval(values: Any) -> tuple[float, float, float]:
    """Returns the median and the bounds of its 95 % bootstrap interval."""
    values = np.asarray(values, np.float64)
    random = np.random.default_rng(1)
    draws = np.median(random.choice(values, (10_000, len(values))), axis=1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def ratio(ours: Any, theirs: Any) -> Figures:
    """Returns the median ratio ours / theirs of paired values, with its 95 % interval."""
    median, low, high = median_interval(np.divide(ours, theirs))
    return {"ratio": round(median, 4), "interval": [round(low, 4), round(high, 4)]}


def in_process(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a fresh process, as the addresses of weights affect its speed."""
    # Uses spawn, as the OpenMP threads of this process do not exist in a forked child.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(function, *arguments).result()


def in_script(command: Sequence[str], n_runs: int = 1) -> Any:
    """Runs a script n_runs times with a new cache folder; returns its last line's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        for _ in range(n_runs):
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def facts() -> Figures:
    """Returns the commit, ggml's version, CPU and CPU kernels, for a benchmark's report."""
    kernels = native.cpu_kernel_sets()[0]
    versions = {"commit": commit(), "ggml": native.ggml_version()}
    return {**versions, "cpu": cpu_name(), "kernels": kernels}


def cpu_name() -> str:
    """Returns the processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str | None:
    """Returns the commit of this checkout, with + if files were changed; else None."""
    folder = Path(__file__).resolve().parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True
    )
    return run.stdout.strip() or None
