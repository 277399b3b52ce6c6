"""What a verify of n rows costs, as a chain and as a tree, against a plain step.

    scripts/bench/verify.py MODEL.gguf... [--rows 1 2 3 4 8 16 24 32 64] [--rounds 9]

A round is a plain step and, for each n, the verify and the commit of a chain and of a tree of n
nodes, in an order of its own, each from the same 256 tokens on. Both commit five nodes, or as many
as they have. Verifies need no drafter, so none is loaded. The table shows medians: milliseconds,
plain steps, and tree / chain as the median of the rounds' ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from plain import commit, cpu_name

from dflash_gguf import native
from dflash_gguf.bench.measure import verify
from dflash_gguf.config import LoadConfig
from dflash_gguf.speculative.speculator import Rows
from dflash_gguf.speculative.tree import Tree

N_PROMPT = 256
N_ACCEPTED = 5

Step = tuple[str, int]  # "plain", "chain" or "tree", and its rows


def tree_parents(n: int) -> list[int]:
    """A spine of two thirds of the nodes, the others siblings of its first nodes."""
    n_spine = n - n // 3
    return [*range(-1, n_spine - 1), *range(n - n_spine)]


def run(sequence: native.Sequence, step: Step, tokens: list[int]) -> float:
    """Seconds of one step, after which the sequence stands where it stood."""
    kind, n = step
    start = sequence.take()
    began = time.perf_counter()
    if kind == "plain":
        sequence.decode(tokens[0]).argmax()
    else:
        tree = Tree.of(tokens[:n], tree_parents(n) if kind == "tree" else None)
        n_path = min(n - n // 3, N_ACCEPTED)

        def choose(rows: Rows, node: int) -> int:
            rows.argmax(node)
            return tokens[node + 1] if node + 1 < n_path else -1

        verify(sequence, tree, choose, lambda _: False)
    seconds = time.perf_counter() - began
    sequence.restore(start)
    return seconds


def bench(path: Path, rows: list[int], n_rounds: int, n_threads: int | None) -> dict[str, Any]:
    """Medians of every step on one model."""
    config = LoadConfig(n_ctx=1024, n_threads=n_threads, n_gpu_layers=0)
    sequence = native.Sequence(native.Engine(native.Model(str(path), config)))
    sequence.engine.reserve_verify(max(rows))
    random = np.random.default_rng(1)
    tokens = random.integers(0, sequence.engine.model.n_vocab, N_PROMPT + max(rows)).tolist()
    sequence.prefill(tokens[:N_PROMPT])
    steps: list[Step] = [("plain", 1), *((kind, n) for n in rows for kind in ("chain", "tree"))]
    seconds: dict[Step, list[float]] = defaultdict(list)
    for i in range(n_rounds + 1):
        for j in random.permutation(len(steps)):
            spent = run(sequence, steps[j], tokens[N_PROMPT:])
            if i > 0:  # the first round builds the graphs
                seconds[steps[j]].append(spent)
    each = {step: np.array(values) for step, values in seconds.items()}
    plain = float(np.median(each["plain", 1]))
    return {
        "model": path.name,
        "n_threads": sequence.engine.n_threads,
        "n_recurrent": sequence.engine.model.n_recurrent,
        "plain_ms": 1e3 * plain,
        "rows": [
            {
                "n": n,
                "chain_ms": 1e3 * float(np.median(each["chain", n])),
                "tree_ms": 1e3 * float(np.median(each["tree", n])),
                "chain_steps": float(np.median(each["chain", n])) / plain,
                "tree_over_chain": float(np.median(each["tree", n] / each["chain", n])),
            }
            for n in rows
        ],
    }


def print_table(result: dict[str, Any]) -> None:
    """One model's rows."""
    print(f"{result['model']}: plain step {result['plain_ms']:.2f} ms")
    print("  rows   chain ms   in steps    tree ms   tree/chain")
    for row in result["rows"]:
        print(
            f"  {row['n']:4d} {row['chain_ms']:10.2f} {row['chain_steps']:10.2f} "
            f"{row['tree_ms']:10.2f} {row['tree_over_chain']:12.3f}",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Cost of verifying n rows, chain and tree")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8, 16, 24, 32, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    results = []
    for path in args.models:
        try:
            results.append(bench(path, args.rows, args.rounds, args.threads))
        except (native.Error, ValueError) as error:
            sys.exit(f"error: {error}")
        print_table(results[-1])
    facts = {
        "commit": commit(),
        "ggml": native.ggml_version(),
        "cpu": cpu_name(),
        "rounds": args.rounds,
        "results": results,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
