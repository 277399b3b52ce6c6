"""Measures decoding beside busy processes, in our engine and in llama.cpp's library.

    scripts/bench/busy.py MODEL.gguf [--threads 2] [--seconds 4] [--rounds 3] [--check]

Each busy process has a session of its own: with Linux's autogroup scheduling it gets as much CPU
as this whole process, whatever its nice value. The engines decode in turns. Prints tokens per
second, the share of the idle speed, and how many seconds after the busy processes' end our engine
has 0.9 of the idle speed again.

--check exits with 1 if our engine keeps less than 0.7 of its speed beside one busy process or 0.35
beside two, or recovers in more than 1 s. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from engines import Engine, Ours, Theirs
from turns import facts, in_turns

from dflash_gguf import native
from dflash_gguf.config import LoadConfig

N_CTX = 512
N_TOKENS = 256
SETTLE_S = 1.0
BUCKET_S = 0.05
BARS = {1: 0.7, 2: 0.35}
BACK_AT, BACK_WITHIN_S = 0.9, 1.0
LOOP = "while True: pass"


class Decoding:
    """Decodes random tokens with one engine for a given time."""

    def __init__(self, engine: Engine, n_vocab: int) -> None:
        self.engine = engine
        self.tokens = np.random.default_rng(1).integers(0, n_vocab, N_TOKENS, dtype=np.int32)
        self.at = N_TOKENS

    def run(self, seconds: float) -> list[float]:
        """Decodes for some seconds; returns the time of each token, in seconds from the start."""
        began = time.perf_counter()
        done: list[float] = []
        while not done or done[-1] < seconds:
            if self.at == N_TOKENS:
                self.engine.reset()
                self.at = 0
            self.engine.decode(int(self.tokens[self.at]))
            self.at += 1
            done.append(time.perf_counter() - began)
        return done


def serve(pipe: Connection, name: str, path: Path, n_threads: int) -> None:
    """Runs one engine in a child process; each number from the pipe is a duration to decode."""
    if name == "ours":
        ours = Ours(path, LoadConfig(n_ctx=N_CTX, n_threads=n_threads, n_gpu_layers=0))
        decoding = Decoding(ours, ours.model.n_vocab)
    else:
        decoding = Decoding(Theirs(path, N_CTX, n_threads), 1000)
    decoding.run(0.5)
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        pipe.send(decoding.run(seconds))


class Worker:
    """A child process with one engine."""

    def __init__(self, name: str, path: Path, n_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=serve, args=(end, name, path, n_threads), daemon=True)
        self.process.start()
        end.close()
        self.pipe.recv()

    def run(self, seconds: float) -> list[float]:
        """Decodes for some seconds; returns the seconds from the start to each token."""
        self.pipe.send(seconds)
        return list(self.pipe.recv())

    def start(self, seconds: float) -> None:
        """Starts decoding for some seconds; `finish` returns the result."""
        self.pipe.send(seconds)

    def finish(self) -> list[float]:
        """Waits until `start` has ended; returns the seconds from the start to each token."""
        return list(self.pipe.recv())

    def close(self) -> None:
        """Ends the child process."""
        self.pipe.send(None)
        self.process.join()


@contextmanager
def busy_loops(n: int) -> Iterator[None]:
    """Runs n busy processes within a with block, each in a session of its own."""
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(n)
    ]
    try:
        time.sleep(SETTLE_S if n else 0.0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def rate(done: list[float]) -> float:
    """Returns tokens per second, given the seconds from the start to each token."""
    return len(done) / done[-1]


def seconds_until_back(worker: Worker, idle: float) -> float:
    """Returns the seconds from a busy process's end until the idle speed is reached again."""
    with ExitStack() as stack:
        stack.enter_context(busy_loops(1))
        worker.run(1.0)
        worker.start(3.0)
        time.sleep(0.5)
        began = time.perf_counter()
    ended = 0.5 + time.perf_counter() - began
    done = np.array(worker.finish())
    for first in np.arange(ended, 3.0 - BUCKET_S, BUCKET_S):
        n = int(((done >= first) & (done < first + BUCKET_S)).sum())
        if n / BUCKET_S >= BACK_AT * idle:
            return float(first - ended)
    return float("inf")


def bench(path: Path, n_threads: int, seconds: float, n_rounds: int) -> dict[str, Any]:
    """Measures both engines beside 0, 1 and 2 busy processes, and how fast ours recovers."""
    workers = {name: Worker(name, path, n_threads) for name in ("ours", "llama.cpp")}
    found: dict[str, Any] = {name: {} for name in workers}
    for n_loops in (0, *BARS):

        def run(worker: Worker, n_loops: int = n_loops) -> float:
            with busy_loops(n_loops):
                return rate(worker.run(seconds))

        sides = {name: partial(run, worker) for name, worker in workers.items()}
        for name, values in in_turns(sides, n_rounds).items():
            found[name][n_loops] = statistics.median(values)
    idle = found["ours"][0]
    back = [seconds_until_back(workers["ours"], idle) for _ in range(n_rounds)]
    found["ours"]["back_s"] = statistics.median(back)
    for worker in workers.values():
        worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure decoding beside busy processes")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if our engine is slower than the limits"
    )
    args = parser.parse_args()
    try:
        found = bench(args.model, args.threads, args.seconds, args.rounds)
    except (native.Error, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, x in found.items():
        shares = "   ".join(
            f"beside {n}: {x[n]:7.1f} tok/s, {x[n] / x[0]:.2f} of idle" for n in BARS
        )
        print(f"{name:10} idle: {x[0]:7.1f} tok/s   {shares}")
    print(f"back at {BACK_AT} of the idle speed {found['ours']['back_s']:.2f} s after the loop")
    report = {
        **facts(),
        "model": args.model.name,
        "threads": args.threads,
        "tokens_per_s": found,
    }
    print(json.dumps(report))
    ours = found["ours"]
    kept = all(ours[n] / ours[0] >= bar for n, bar in BARS.items())
    if args.check and not (kept and ours["back_s"] <= BACK_WITHIN_S):
        sys.exit(1)


if __name__ == "__main__":
    main()
