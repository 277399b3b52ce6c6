"""Measures prefill and plain decoding beside llama.cpp's library and ik_llama.cpp's llama-bench.

    scripts/bench/plain.py MODEL.gguf... [--pairs 15] [-t 1 2] [--ik IK_BUILD/bin/llama-bench]
    scripts/bench/plain.py MODEL.gguf --prompt 1024 8192 --ubatch 128 512 2048 --decode 0
    scripts/bench/plain.py MODEL.gguf... --prompt 8 16 --decode 0 --ours-only --ik LLAMA_BENCH
    scripts/bench/plain.py MODEL.gguf... --read-loop

Each of --pairs processes runs both engines in turns, so that they share ggml, an OpenMP pool and
other load; the addresses of the weights change a process's speed by a few per cent. Both have the
same threads, weight buffers, f16 K/V and flash attention. Prints tokens per second, and the median
ratio ours/theirs with its 95 % bootstrap interval. The last line is one JSON object.

--ik: also runs ik's llama-bench, with rearranged weights (-rtr 1) and without; the faster counts.
--read-loop: compares the weights that decoding reads, in bytes per second, with a loop that only
reads 512 MiB on as many threads; the ratio is 1 if decoding waits for nothing but memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import gguf
import numpy as np
from engines import N_UBATCH, Engine, Ours, Theirs, Tokens
from turns import Figures, facts, in_process, in_turns, ratio, seconds_of

from dflash_gguf import native
from dflash_gguf.config import LoadConfig

PHASES = ("prefill", "decode")
LOOP_BYTES = 512 << 20
LONG_PROMPT = 1024
"""Prompt tokens above which a process computes the prompt once instead of twice."""
SHORT_TOKENS = 256
"""Tokens that repeated runs of a shorter prompt, the size of a verify, have together."""

Speeds = dict[str, dict[str, float]]
"""Tokens per second by phase (prefill, decode), then by engine."""


@dataclass(frozen=True, slots=True)
class Work:
    """Settings of one process. n_segment: tokens of a decoding turn; index: process number."""

    path: Path
    n_prompt: int
    n_decode: int
    n_segment: int
    n_threads: int | None
    n_ubatch: int
    index: int
    ours_only: bool


def run_pair(work: Work) -> tuple[Speeds, int]:
    """Measures both engines in this process; returns the speeds and the number of threads."""
    n_ctx = work.n_prompt + work.n_decode
    config = LoadConfig(
        n_ctx=n_ctx, n_ubatch=work.n_ubatch, n_threads=work.n_threads, n_gpu_layers=0
    )
    ours = Ours(work.path, config)
    n_threads = ours.sequence.engine.n_threads
    engines: dict[str, Engine] = {"ours": ours}
    if not work.ours_only:
        engines["llama.cpp"] = Theirs(work.path, n_ctx, n_threads, n_ubatch=work.n_ubatch)
    random = np.random.default_rng(work.index)
    tokens = random.integers(0, ours.model.n_vocab, n_ctx, dtype=np.int32)
    prompt, answer = tokens[: work.n_prompt], tokens[work.n_prompt :].tolist()
    prefill_seconds(engines, prompt[: work.n_ubatch], 1, work.index)  # untimed warm-up run
    n_runs = prompt_runs(work.n_prompt)
    prefill = prefill_seconds(engines, prompt, n_runs, work.index)
    decode = decode_seconds(engines, answer, work.n_segment, work.index)
    return {
        "prefill": {name: n_runs * work.n_prompt / s for name, s in prefill.items()},
        "decode": {name: work.n_decode / s for name, s in decode.items() if s > 0},
    }, n_threads


def prompt_runs(n_prompt: int) -> int:
    """Returns how many times each engine computes a prompt of n_prompt tokens in a process."""
    return 1 if n_prompt > LONG_PROMPT else max(2, SHORT_TOKENS // n_prompt)


def prefill_seconds(
    engines: Mapping[str, Engine], prompt: Tokens, n_runs: int, first: int = 0
) -> dict[str, float]:
    """Runs n_runs prefills of each engine in turns; returns the seconds of each engine."""

    def run(engine: Engine) -> float:
        engine.reset()
        return seconds_of(partial(engine.prefill, prompt))

    sides = {name: partial(run, engine) for name, engine in engines.items()}
    return {name: sum(times) for name, times in in_turns(sides, n_runs, first).items()}


def decode_seconds(
    engines: Mapping[str, Engine], answer: list[int], n_segment: int, first: int
) -> dict[str, float]:
    """Decodes given tokens by turns of n_segment tokens; returns the seconds of each engine."""
    at = dict.fromkeys(engines, 0)

    def run(name: str) -> float:
        segment, decode = answer[at[name] : at[name] + n_segment], engines[name].decode
        at[name] += n_segment
        started = time.perf_counter()
        for token in segment:
            decode(token)
        return time.perf_counter() - started

    sides = {name: partial(run, name) for name in engines}
    n_segments = -(-len(answer) // n_segment)
    return {name: sum(times) for name, times in in_turns(sides, n_segments, first).items()}


def ik_speeds(bench: Path, work: Work, n_threads: int, *, repack: bool) -> dict[str, float]:
    """Runs ik_llama.cpp's llama-bench; returns tokens per second by phase."""
    lengths = f"-p {work.n_prompt} -n 0"
    if work.n_decode:
        lengths += f" -gp {work.n_prompt},{work.n_decode}"
    n_runs = prompt_runs(work.n_prompt)
    flags = f"{lengths} -t {n_threads} -r {n_runs} -fa 1 -fmoe 1 -ngl 0 -o json"
    command = [str(bench), "-m", str(work.path), *flags.split(), "-rtr", str(int(repack))]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"error: {' '.join(command)}: {run.stderr.strip().splitlines()[-1:]}")
    # Skips messages about rearranged weights, which precede the JSON.
    tests = json.loads(run.stdout[run.stdout.index("[\n") :])
    return {"decode" if test["n_gen"] else "prefill": float(test["avg_ts"]) for test in tests}


def bench(work: Work, args: argparse.Namespace) -> Figures:
    """Measures one file, prompt length and micro-batch size, in several new processes."""
    index, n_threads = -1, work.n_threads or 0

    def pair() -> dict[str, dict[str, float]]:
        nonlocal index, n_threads
        index += 1
        speeds, n_threads = in_process(run_pair, replace(work, index=index))
        return speeds

    def ik(repack: bool) -> dict[str, dict[str, float]]:
        found = ik_speeds(args.ik, work, n_threads, repack=repack)
        return {phase: {"ik": found.get(phase, 0.0)} for phase in PHASES}

    sides = {"pair": pair}
    if args.ik is not None:
        n_threads = n_threads or len(os.sched_getaffinity(0))
        sides |= {"ik": partial(ik, False), "ik -rtr": partial(ik, True)}
    turns = in_turns(sides, args.pairs)
    result: Figures = {
        "model": work.path.name,
        "threads": n_threads,
        "prompt": work.n_prompt,
        "n_ubatch": work.n_ubatch,
    }
    for phase in PHASES:
        if phase == "decode" and not work.n_decode:
            continue
        speeds = {name: [x[phase][name] for x in turns["pair"]] for name in turns["pair"][0][phase]}
        for name in list(sides)[1:]:
            speeds[name] = [x[phase]["ik"] for x in turns[name]]
        result[phase] = summary(speeds)
    return result


def summary(speeds: dict[str, list[float]]) -> Figures:
    """Returns one phase's median tokens per second by engine, and our ratios to the others."""
    found: Figures = {
        "tokens_per_s": {name: round(float(np.median(x)), 2) for name, x in speeds.items()}
    }
    if "llama.cpp" in speeds:
        found |= ratio(speeds["ours"], speeds["llama.cpp"])
    if "ik" in speeds:
        found["ik"] = ratio(speeds["ours"], np.maximum(speeds["ik"], speeds["ik -rtr"]))
    return found


def print_row(result: Figures) -> None:
    """Prints one line each for prefill and decoding."""
    for phase in (name for name in PHASES if name in result):
        x = result[phase]
        line = f"{result['model']:32} {result['threads']} threads   {phase:8}"
        if phase == "prefill":
            line += f"{result['prompt']:7} tokens by {result['n_ubatch']:5}"
        for name, speed in x["tokens_per_s"].items():
            line += f"   {name} {speed:8.1f} tok/s"
        for name, ratios in (("llama.cpp", x), ("ik", x.get("ik", {}))):
            if "ratio" in ratios:
                low, high = ratios["interval"]
                line += f"   by {name} {ratios['ratio']:.3f} ({low:.3f} to {high:.3f})"
        print(line, flush=True)


def weights_of_a_token(path: Path) -> int:
    """Returns the bytes of weights that a plain step reads, as stored in the file."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    counts = [reader.fields.get(f"{arch}.expert_{name}") for name in ("used_count", "count")]
    share = counts[0].contents() / counts[1].contents() if counts[0] and counts[1] else 1.0
    untied = any(tensor.name == "output.weight" for tensor in reader.tensors)
    return sum(
        int(tensor.n_bytes * (share if "_exps." in tensor.name else 1.0))
        for tensor in reader.tensors
        if not (untied and tensor.name == "token_embd.weight")  # a step reads one row of embeddings
    )


class ReadLoop:
    """A loop on several threads that only reads memory."""

    def __init__(self, n_threads: int) -> None:
        self._threads = ThreadPoolExecutor(n_threads)
        # Maps private memory, as shared memory gets no huge pages.
        pages = mmap.mmap(-1, LOOP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        values = np.frombuffer(pages, np.int64)
        values[:] = 1
        self._parts = np.array_split(values, n_threads)

    def speed(self) -> float:
        """Reads the whole buffer once; returns bytes per second."""
        return LOOP_BYTES / seconds_of(
            lambda: list(self._threads.map(np.bitwise_or.reduce, self._parts))
        )


def bench_read_loop(work: Work, n_pairs: int) -> Figures:
    """Measures decoding of one model in turns with a loop that only reads memory."""
    n_prompt = min(work.n_prompt, 128)
    n_ctx = n_prompt + n_pairs * work.n_segment
    ours = Ours(work.path, LoadConfig(n_ctx=n_ctx, n_threads=work.n_threads, n_gpu_layers=0))
    n_threads = ours.sequence.engine.n_threads
    loop, n_bytes = ReadLoop(n_threads), weights_of_a_token(work.path)
    random = np.random.default_rng(0)
    tokens = random.integers(0, ours.model.n_vocab, n_ctx, dtype=np.int32)
    ours.prefill(tokens[:n_prompt])
    coming = iter(tokens[n_prompt:].tolist())

    def decode() -> float:
        started = time.perf_counter()
        for _ in range(work.n_segment):
            ours.decode(next(coming))
        return n_bytes * work.n_segment / (time.perf_counter() - started)

    speeds = in_turns({"decode": decode, "read": loop.speed}, n_pairs)
    ours.close()
    return {
        "model": work.path.name,
        "threads": n_threads,
        "weights_mb": round(n_bytes / 1e6, 1),
        "decode_gb_per_s": round(float(np.median(speeds["decode"])) / 1e9, 2),
        "read_gb_per_s": round(float(np.median(speeds["read"])) / 1e9, 2),
        **ratio(speeds["decode"], speeds["read"]),
    }


def print_share(result: Figures) -> None:
    """Prints a model's decoding speed in GB/s beside that of the read loop."""
    low, high = result["interval"]
    print(
        f"{result['model']:32} {result['threads']} threads   decode "
        f"{result['decode_gb_per_s']:6.1f} GB/s   read loop {result['read_gb_per_s']:6.1f} GB/s   "
        f"ratio {result['ratio']:.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure prefill and plain decoding beside llama.cpp"
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[512], help="tokens of the prefill"
    )
    parser.add_argument("--ubatch", type=int, nargs="+", default=[N_UBATCH], metavar="N")
    parser.add_argument(
        "--decode", type=int, default=128, help="tokens decoded after the prefill, or 0"
    )
    parser.add_argument("--segment", type=int, default=8, help="tokens decoded in a turn")
    parser.add_argument(
        "-t", "--threads", type=int, nargs="+", default=[None], help="default: one a physical core"
    )
    parser.add_argument("--ik", type=Path, metavar="LLAMA_BENCH", help="also run ik_llama.cpp's")
    parser.add_argument("--ours-only", action="store_true", help="without llama.cpp")
    parser.add_argument(
        "--read-loop", action="store_true", help="compare with a loop that only reads memory"
    )
    args = parser.parse_args()
    results = []
    for path, n_threads, n_ubatch, n_prompt in product(
        args.models, args.threads, args.ubatch, args.prompt
    ):
        work = Work(
            path, n_prompt, args.decode, args.segment, n_threads, n_ubatch, 0, args.ours_only
        )
        try:
            if args.read_loop:
                results.append(bench_read_loop(work, args.pairs))
            else:
                results.append(bench(work, args))
        except (native.Error, ValueError) as error:
            sys.exit(f"error: {error}")
        (print_share if args.read_loop else print_row)(results[-1])
    counts = {"pairs": args.pairs, "decode": args.decode}
    print(json.dumps({**facts(), **counts, "results": results}))


if __name__ == "__main__":
    main()
