"""Measures the time of verifying n rows as a chain and as a tree, in units of a plain step.

    scripts/bench/verify.py MODEL.gguf... [--rows 1 2 3 4 8 16 24 32 64] [--rounds 9]

Each round times a plain step and all verifies with their commits, in random order, after the same
256 tokens. Prints medians; tree/chain is the median of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from rounds import forced_round
from turns import Figures, facts, seconds_of

from dflash_gguf import native
from dflash_gguf.config import LoadConfig
from dflash_gguf.speculative.tree import Tree

N_CTX = 1024
N_PROMPT = 256
N_ACCEPTED = 5

Step = tuple[str, int]  # kind of step ("plain", "chain" or "tree") and number of rows


def tree_parents(n: int) -> list[int]:
    """Returns parents of n tree nodes: 2/3 form a chain, the rest are siblings of its nodes."""
    n_spine = n - n // 3
    return [*range(-1, n_spine - 1), *range(n - n_spine)]


def run(sequence: native.Sequence, step: Step, tokens: list[int]) -> float:
    """Returns the seconds of a plain step or verify, and restores the sequence after it."""
    kind, n = step
    start = sequence.snapshot()
    if kind == "plain":
        seconds = seconds_of(lambda: sequence.decode(tokens[0]).argmax())
    else:
        n_path = min(n - n // 3, N_ACCEPTED)
        chosen = [*tokens[1:n_path], -1]

        def verify() -> None:
            tree = Tree.of(tokens[:n], tree_parents(n) if kind == "tree" else None)
            forced_round(sequence, tree, chosen)

        seconds = seconds_of(verify)
    sequence.attach(start, start.n_tokens)
    return seconds


def open_sequence(path: Path, n_threads: int | None, most_rows: int) -> native.Sequence:
    """Loads a model without a drafter and reserves memory for verifies of most_rows rows."""
    config = LoadConfig(n_ctx=N_CTX, n_threads=n_threads, n_gpu_layers=0)
    sequence = native.Sequence(native.Engine(native.Model(str(path), config)))
    sequence.engine.reserve_verify(most_rows)
    return sequence


def bench(path: Path, args: argparse.Namespace) -> Figures:
    """Measures verifies of one model, prints a table and returns the medians."""
    rows = args.rows
    sequence = open_sequence(path, args.threads, max(rows))
    random = np.random.default_rng(1)
    tokens = random.integers(0, sequence.engine.model.n_vocab, N_PROMPT + max(rows)).tolist()
    sequence.prefill(tokens[:N_PROMPT])
    steps: list[Step] = [("plain", 1), *((kind, n) for n in rows for kind in ("chain", "tree"))]
    seconds: dict[Step, list[float]] = defaultdict(list)
    for i in range(args.rounds + 1):
        for j in random.permutation(len(steps)):
            spent = run(sequence, steps[j], tokens[N_PROMPT:])
            if i > 0:  # the first round builds graphs, so it does not count
                seconds[steps[j]].append(spent)
    each = {step: np.array(values) for step, values in seconds.items()}
    plain = float(np.median(each["plain", 1]))
    result = {
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
    print_table(result)
    return result


def print_table(result: Figures) -> None:
    """Prints one model's table."""
    print(f"{result['model']}: plain step {result['plain_ms']:.2f} ms")
    print("  rows   chain ms   in steps    tree ms   tree/chain")
    for row in result["rows"]:
        print(
            f"  {row['n']:4d} {row['chain_ms']:10.2f} {row['chain_steps']:10.2f} "
            f"{row['tree_ms']:10.2f} {row['tree_over_chain']:12.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the cost of verifying n rows as chain and tree"
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8, 16, 24, 32, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    try:
        results = [bench(path, args) for path in args.models]
    except (native.Error, ValueError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({**facts(), "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
