"""Prefill by prompt length and micro-batch, beside llama.cpp's own library on the same file.

    scripts/bench/prefill.py MODEL.gguf [--tokens 1024 8192] [--ubatch 128 512 2048] [--runs 3]

Both engines sit in one process, on one ggml, with the same threads, f16 K/V and flash attention,
and read the same random tokens, in turn. Prints tokens per second and the ratio ours/theirs, the
median of the runs; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from plain import Engine, Ours, Theirs, Tokens

from dflash_gguf import native
from dflash_gguf.config import LoadConfig


def engines_of(args: argparse.Namespace, n_ubatch: int) -> dict[str, Engine]:
    """Both engines with this micro-batch, or ours alone."""
    n_ctx = max(args.tokens)
    config = LoadConfig(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=args.threads, n_gpu_layers=0)
    ours = Ours(args.model, config)
    if args.ours_only:
        return {"ours": ours}
    return {
        "ours": ours,
        "llama.cpp": Theirs(args.model, n_ctx, ours.sequence.engine.n_threads, n_ubatch),
    }


def rates(engines: Mapping[str, Engine], tokens: Tokens, n_runs: int) -> dict[str, float]:
    """Median tokens per second of each engine, the one that goes first changing."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(n_runs):
        for name in list(engines)[:: 1 if run % 2 == 0 else -1]:
            engines[name].reset()
            started = time.perf_counter()
            engines[name].prefill(tokens)
            seconds[name].append(time.perf_counter() - started)
    return {name: len(tokens) / statistics.median(values) for name, values in seconds.items()}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every micro-batch and length, printed as it is done."""
    results = []
    print(f"{'tokens':>7} {'micro-batch':>11} {'ours':>8} {'llama.cpp':>9} {'ratio':>6}")
    for n_ubatch in args.ubatch:
        engines = engines_of(args, n_ubatch)
        for n_tokens in args.tokens:
            tokens = np.random.default_rng(1).integers(0, args.vocabulary, n_tokens, np.int32)
            for engine in engines.values():
                engine.reset()
                engine.prefill(tokens[:n_ubatch])  # pages of the weights and of the arena
            found = rates(engines, tokens, args.runs)
            row = {"tokens": n_tokens, "n_ubatch": n_ubatch, **found}
            line = f"{n_tokens:7} {n_ubatch:11} {found['ours']:8.0f}"
            if "llama.cpp" in found:
                line += f" {found['llama.cpp']:9.0f} {found['ours'] / found['llama.cpp']:6.3f}"
            print(line, flush=True)
            results.append(row)
        for engine in engines.values():
            engine.close()
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Prefill by prompt length and micro-batch")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], metavar="N")
    parser.add_argument("--ubatch", type=int, nargs="+", default=[128, 512, 2048], metavar="N")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=1000, help="random ids below this")
    parser.add_argument("--ours-only", action="store_true", help="without llama.cpp")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    try:
        results = measure(args)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"model": args.model.name, "ggml": native.ggml_version(), "results": results}))


if __name__ == "__main__":
    main()
