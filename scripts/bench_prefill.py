"""Prefill by prompt length and micro-batch, beside llama.cpp's own library on the same file.

    scripts/bench_prefill.py MODEL.gguf [--tokens 1024 8192] [--ubatch 128 512 2048] [--runs 3]

Both engines sit in one process, on one ggml, with the same threads, f16 K/V and flash attention,
and read the same random tokens, in turn. Prints tokens per second and the ratio ours/theirs, the
median of the runs; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from dflash_gguf import core
from dflash_gguf.config import LoadConfig

FLASH_ATTENTION_ON = 1  # enum llama_flash_attn_type

Prefill = Callable[[list[int]], None]

_silent: Any = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


def ours(path: Path, n_ctx: int, n_ubatch: int, n_threads: int | None) -> tuple[Prefill, int]:
    """This project's prefill of a fresh timeline, and its threads."""
    config = LoadConfig(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads, n_gpu_layers=0)
    session = core.Session(core.Model(str(path), config))

    def prefill(tokens: list[int]) -> None:
        session.reset()
        session.prefill(tokens).argmax()

    return prefill, session.n_threads


def theirs(path: Path, n_ctx: int, n_ubatch: int, n_threads: int) -> Prefill:
    """llama.cpp's."""
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = n_ctx
    params.n_ubatch = n_ubatch
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = FLASH_ATTENTION_ON
    context = llama_cpp.llama_init_from_model(model, params) if model else None
    if not context:
        raise core.Error(f"{path}: llama.cpp cannot run it")
    memory = llama_cpp.llama_get_memory(context)

    def prefill(tokens: list[int]) -> None:
        llama_cpp.llama_memory_clear(memory, False)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens)))
        if status != 0:
            raise core.Error(f"llama_decode of {len(tokens)} tokens returned {status}")
        llama_cpp.llama_synchronize(context)

    return prefill


def rates(engines: dict[str, Prefill], tokens: list[int], n_runs: int) -> dict[str, float]:
    """Median tokens per second of each engine, the one that goes first changing."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(n_runs):
        for name in list(engines)[:: 1 if run % 2 == 0 else -1]:
            started = time.perf_counter()
            engines[name](tokens)
            seconds[name].append(time.perf_counter() - started)
    return {name: len(tokens) / statistics.median(values) for name, values in seconds.items()}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every micro-batch and length, printed as it is done."""
    results = []
    print(f"{'tokens':>7} {'micro-batch':>11} {'ours':>8} {'llama.cpp':>9} {'ratio':>6}")
    for n_ubatch in args.ubatch:
        prefill, n_threads = ours(args.model, max(args.tokens), n_ubatch, args.threads)
        engines = {"ours": prefill}
        if not args.ours_only:
            engines["llama.cpp"] = theirs(args.model, max(args.tokens), n_ubatch, n_threads)
        for n_tokens in args.tokens:
            tokens = np.random.default_rng(1).integers(0, args.vocabulary, n_tokens).tolist()
            for engine in engines.values():
                engine(tokens[:n_ubatch])  # pages of the weights and of the arena
            found = rates(engines, tokens, args.runs)
            row = {"tokens": n_tokens, "n_ubatch": n_ubatch, **found}
            line = f"{n_tokens:7} {n_ubatch:11} {found['ours']:8.0f}"
            if "llama.cpp" in found:
                line += f" {found['llama.cpp']:9.0f} {found['ours'] / found['llama.cpp']:6.3f}"
            print(line, flush=True)
            results.append(row)
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
    except (core.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"model": args.model.name, "ggml": core.ggml_version(), "results": results}))


if __name__ == "__main__":
    main()
