"""Plain speed beside ik_llama.cpp's llama-bench, and llama.cpp's library: prefill and decoding.

    scripts/bench/ik.py IK_BUILD/bin/llama-bench MODEL.gguf... [-t 1 2] [--rounds 5]

A round runs, in changing order, ik's llama-bench twice, with weights rearranged as they load
(`-rtr 1`) and as they lie in the file, both with flash attention and fused experts; and a pair of
ours and llama.cpp as scripts/bench/plain.py runs it. Of ik's two the faster counts, phase by phase.
Prints tokens per second, medians over the rounds, and ratios ours/theirs, medians of the rounds'
own ratios with their least and largest. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plain import Work, commit, cpu_name, run_pair

from dflash_gguf import native

PHASES = ("prefill", "decode")
ENGINES = ("ours", "llama.cpp", "ik", "ik -rtr")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prefill, and of the decoding that follows."""

    prompt: int
    decode: int


def ik_speeds(bench: Path, model: Path, n_threads: int, n: Lengths, *, repack: bool) -> list[float]:
    """Tokens per second of both phases."""
    lengths = f"-p {n.prompt} -n 0 -gp {n.prompt},{n.decode}"
    flags = f"{lengths} -t {n_threads} -r 1 -fa 1 -fmoe 1 -ngl 0 -o json"
    command = [str(bench), "-m", str(model), *flags.split(), "-rtr", str(int(repack))]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"error: {' '.join(command)}: {run.stderr.strip().splitlines()[-1:]}")
    # what it says of its rearranging comes first
    tests = json.loads(run.stdout[run.stdout.index("[\n") :])
    by_phase = {"decode" if test["n_gen"] else "prefill": test["avg_ts"] for test in tests}
    return [float(by_phase[phase]) for phase in PHASES]


def our_speeds(model: Path, n_threads: int, n: Lengths, index: int) -> NDArray[np.float64]:
    """Tokens per second of [ours, llama.cpp], [phase]."""
    work = Work(model, n.prompt, n.decode, 8, n_threads, index)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        times = child.submit(run_pair, work).result()
    return np.array([n.prompt / np.array(times.prefill), n.decode / np.array(times.decode)]).T


def measure(bench: Path, model: Path, n_threads: int, n: Lengths, n_rounds: int) -> dict[str, Any]:
    """Tokens per second of every engine, [round], by phase."""
    rounds = np.empty((n_rounds, len(ENGINES), len(PHASES)))
    for index in range(n_rounds):
        for turn in range(3):
            which = (turn + index) % 3
            if which == 0:
                rounds[index, :2] = our_speeds(model, n_threads, n, index)
            else:
                speeds = ik_speeds(bench, model, n_threads, n, repack=which == 2)
                rounds[index, 1 + which] = speeds
    found: dict[str, Any] = {"model": model.name, "threads": n_threads}
    for place, phase in enumerate(PHASES):
        speeds = rounds[:, :, place]
        medians = dict(zip(ENGINES, np.median(speeds, axis=0).round(1).tolist(), strict=True))
        best = speeds[:, 2:].max(axis=1)
        ratios = {"ik": speeds[:, 0] / best, "llama.cpp": speeds[:, 0] / speeds[:, 1]}
        found[phase] = {"tokens_per_s": medians} | {
            f"ratio to {name}": [round(float(f(x)), 3) for f in (np.median, np.min, np.max)]
            for name, x in ratios.items()
        }
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Plain speed beside ik_llama.cpp")
    parser.add_argument("bench", type=Path, metavar="LLAMA_BENCH", help="ik_llama.cpp's")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    args = parser.parse_args()
    results = []
    for model in args.models:
        for n_threads in args.threads:
            n = Lengths(args.prompt, args.decode)
            found = measure(args.bench, model, n_threads, n, args.rounds)
            results.append(found)
            for phase in PHASES:
                print(model.name, f"{n_threads} threads", phase, found[phase], flush=True)
    facts = {"commit": commit(), "cpu": cpu_name(), "ggml": native.ggml_version()}
    print(json.dumps(facts | {"rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
