"""Measures many sequences at once: plain rounds, answers, or answers beside a long prompt.

    scripts/bench/many.py MODEL.gguf [-n 1 8] [--rounds 40] [--runs 3]
    scripts/bench/many.py MODEL.gguf --drafter DRAFTER.gguf --server 3 7
    scripts/bench/many.py MODEL.gguf -c 26000 --prompt 8192 [--streams 4] [--drafter DRAFTER.gguf]

Default: rounds in which each of n sequences takes one greedy token in a common pass, in turns with
llama.cpp's library. --server: n answers at once, plain and with `auto`, in turns with llama.cpp's
server, plain and with draft-dflash of each length. Both print median tokens per second of all
sequences. --prompt: slowdown of answers beside a long prompt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Series
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import engines
import numpy as np
from auto import N_ANSWER, prompts_at_once, speeds_at_once
from build_peer import build, can_repack
from serve import Running, free_port, served
from turns import Figures, facts, in_turns, rotated, seconds_of

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.bench.prompts import Prompt
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.bench.url import bodies
from dflash_gguf.native import BatchEntry, Engine, LoadConfig, Model, Sequence

N_PROMPT = 128
N_WARM = 60
PLAIN_PEER = "llama-server"
LONG_TURN_S = 0.5
"""Seconds of a decoder's turn with --prompt: several prefill chunks and rounds."""


class Ours:
    """Sequences of our engine that take one token each per round."""

    def __init__(self, path: Path, n_sequences: int, n_ctx: int, n_threads: int | None) -> None:
        config = LoadConfig(
            n_ctx=n_ctx, n_parallel=n_sequences, n_threads=n_threads, n_gpu_layers=0
        )
        self.engine = Engine(Model(str(path), config))
        self._sequences = [Sequence(self.engine) for _ in range(n_sequences)]
        self._last: list[int] = []

    def begin(self, prompts: list[list[int]]) -> None:
        """Prefills one sequence for each prompt."""
        for sequence in self._sequences:
            sequence.reset()
        self._last = [
            sequence.prefill(prompt).argmax()
            for sequence, prompt in zip(self._sequences, prompts, strict=False)
        ]

    def round(self) -> None:
        """Takes one greedy token for each sequence."""
        pairs = zip(self._sequences, self._last, strict=False)
        rows = self.engine.run([BatchEntry(sequence, [token]) for sequence, token in pairs])
        self._last = [row.argmax() for row in rows]


class Theirs(engines.Theirs):
    """Sequences of llama.cpp's library that take one token each per round."""

    def begin(self, prompts: list[list[int]]) -> None:
        """Prefills one sequence for each prompt."""
        self.reset()
        self._last, self._at = [], N_PROMPT
        for sequence, prompt in enumerate(prompts):
            rows = [(token, i, sequence) for i, token in enumerate(prompt)]
            self.batch(rows, [False] * (len(prompt) - 1) + [True])
            self._last.append(self.argmax(len(prompt) - 1))

    def round(self) -> None:
        """Takes one greedy token for each sequence."""
        n = len(self._last)
        self.batch([(token, self._at, i) for i, token in enumerate(self._last)], [True] * n)
        self._last = [self.argmax(i) for i in range(n)]
        self._at += 1


def rounds(args: argparse.Namespace) -> list[Figures]:
    """Measures plain rounds; returns tokens per second for each number of sequences."""
    ours = Ours(args.model, max(args.n), args.ctx, args.threads)
    args.threads = ours.engine.n_threads
    sides: dict[str, Ours | Theirs] = {"ours": ours}
    if not args.ours_only:
        sides["llama.cpp"] = Theirs(args.model, args.ctx, args.threads, n_sequences=max(args.n))
    random = np.random.default_rng(0)
    prompts = random.integers(0, args.vocabulary, (max(args.n), N_PROMPT)).tolist()

    def speed(engine: Ours | Theirs, n: int) -> float:
        engine.begin(prompts[:n])
        return n / statistics.median(seconds_of(engine.round) for _ in range(args.rounds))

    rates: dict[int, dict[str, list[float]]] = {n: {name: [] for name in sides} for n in args.n}
    for run in range(args.runs):
        for n in args.n:
            turn = {name: partial(speed, engine, n) for name, engine in sides.items()}
            for name, values in in_turns(turn, 1, run).items():
                rates[n][name] += values
    results = []
    for n, found in rates.items():
        rate = {name: statistics.median(runs) for name, runs in found.items()}
        line = f"{n:3} sequences: ours {rate['ours']:7.0f} tok/s"
        if n != args.n[0]:
            pairs = zip(found["ours"], rates[args.n[0]]["ours"], strict=True)
            times = [many / one for many, one in pairs]
            line += f", {statistics.median(times):.2f} times {args.n[0]}"
            line += f" ({min(times):.2f} to {max(times):.2f})"
        if "llama.cpp" in rate:
            ratio = rate["ours"] / rate["llama.cpp"]
            line += f", llama.cpp {rate['llama.cpp']:7.0f}, ratio {ratio:.3f}"
        print(line, flush=True)
        results.append({"n": n, **rate})
    return results


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, Running]]:
    """Runs llama.cpp's plain server, and one for each draft length, within a with block."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Running] = {}
        command = [str(build(["llama-server"]) / "llama-server"), "-m", str(args.model)]
        command += ["-c", str(args.ctx), "-t", str(args.threads), "-np", str(max(args.n))]
        command += ["-ngl", "0", "--kv-unified", "--cache-ram", "0", "--no-webui"]
        if not can_repack():
            command += ["--no-repack"]
        drafts = ["-md", str(args.drafter), "-ngld", "0", "--spec-type", "draft-dflash"]
        ways: dict[str, list[str]] = {PLAIN_PEER: []}
        for length in args.server:
            ways[f"draft-dflash {length}"] = [*drafts, "--spec-draft-n-max", str(length)]
        for name, flags in ways.items():
            found[name] = stack.enter_context(served([*command, *flags], free_port()))
        yield found


def by_server(server: Running, prompts: Series[str], n: int) -> tuple[float, list[str]]:
    """Sends all prompts to a server, n requests at once; returns the seconds and the texts."""
    asked = [Prompt(str(i), text) for i, text in enumerate(prompts)]
    requests = bodies(asked, None, N_ANSWER, 0.0, 0)
    with ThreadPoolExecutor(n) as pool:
        started = time.perf_counter()
        found = list(pool.map(lambda request: server.stream(*request), requests))
        seconds = time.perf_counter() - started
    for answer in found:
        if answer.failure or answer.n_tokens != N_ANSWER:
            raise RuntimeError(
                f"an answer of llama-server failed: {answer.failure or f'{answer.n_tokens} tokens'}"
            )
    return seconds, [answer.text for answer in found]


def answers(args: argparse.Namespace) -> list[Figures]:
    """Measures --server: whole answers, plain and drafted, of our engine and llama.cpp's."""
    args.threads = args.threads or len(os.sched_getaffinity(0))
    with servers(args) as peers:
        for server in peers.values():
            by_server(server, ["Once upon a time"], 1)
        return [answers_of(n, args, peers) for n in args.n]


def answers_of(n: int, args: argparse.Namespace, peers: dict[str, Running]) -> Figures:
    """Measures n answers at once, in our engine and in each of llama.cpp's servers."""
    options = {"n_ctx": args.ctx, "n_parallel": max(args.n), "n_threads": args.threads}
    rates: dict[str, list[float]] = {name: [] for name in ("none", "auto", *peers)}
    n_equal = dict.fromkeys(peers, 0)
    for run in range(args.runs):
        prompts = prompts_at_once(run, n, max(args.n))
        ours = speeds_at_once((args.model, args.drafter), options, prompts, n, run)
        for name, rate in ours.items():
            rates[name].append(rate)
        texts = {}
        for name in rotated(list(peers), run):
            seconds, texts[name] = by_server(peers[name], prompts, n)
            rates[name].append(len(prompts) * N_ANSWER / seconds)
        for name, found in texts.items():
            n_equal[name] += sum(a == b for a, b in zip(found, texts[PLAIN_PEER], strict=True))
    row: Figures = {"n": n, "equal": n_equal, "runs": rates}
    row |= {name: statistics.median(values) for name, values in rates.items()}
    plain_of = {"auto": "none"} | dict.fromkeys(list(peers)[1:], PLAIN_PEER)
    row["ratio"] = {}
    for name, plain in plain_of.items():
        ratios = [a / b for a, b in zip(rates[name], rates[plain], strict=True)]
        mean, low, high = row["ratio"][name] = ratio_interval(ratios)
        texts_equal = ""
        if name in peers:
            n_texts = len(prompts) * args.runs
            texts_equal = f"; {n_equal[name]} of {n_texts} texts are its plain ones"
        print(
            f"{n:3} answers: {plain} {row[plain]:7.0f} tok/s, {name} {row[name]:7.0f}, "
            f"ratio {mean:.3f} ({low:.3f} to {high:.3f}){texts_equal}",
            flush=True,
        )
    return row


def beside(args: argparse.Namespace) -> Figures:
    """Measures how much a long prompt and the answers beside it slow each other.

    Answers slow down as they grow, so they are compared with the same tokens of answers without the
    prompt. Three decoders take turns: one has answers and prompt, one answers, one the prompt.
    """
    options = {"n_ctx": args.ctx, "n_parallel": args.streams + 1, "n_threads": args.threads}
    prompt = np.random.default_rng(0).integers(0, args.vocabulary, args.prompt).tolist()
    n_filled = {"beside": 0, "alone": 0}  # number of tokens of the long prompt computed so far

    def begun(decoder: dflash_gguf.Decoder) -> list[dflash_gguf.Stream]:
        streams = [
            decoder.stream(
                f"Write a story about {i} birds.",
                max_tokens=8192,
                ignore_eos=True,
                temperature=1.0,
                seed=i,
                draft="none" if args.drafter is None else "auto",
            )
            for i in range(args.streams)
        ]
        go_on(streams, N_WARM)
        return streams

    def go_on(streams: list[dflash_gguf.Stream], n: int) -> None:
        for _ in range(n):
            for stream in streams:
                next(stream)

    def filling(decoder: dflash_gguf.Decoder, name: str) -> dflash_gguf.Stream:
        def came(n: int, _total: int) -> None:
            n_filled[name] = n

        return decoder.stream(prompt, max_tokens=1, on_prefill=came)

    def catch_up() -> None:
        while n_filled["alone"] < n_filled["beside"]:
            decoders[2].step()

    took = usual = alone = 0.0
    n_rounds = 0
    with contextlib.ExitStack() as stack:
        decoders = [
            stack.enter_context(dflash_gguf.load(args.model, drafter=args.drafter, **options))
            for _ in range(3)
        ]
        streams, others = (begun(decoder) for decoder in decoders[:2])
        new, _lone = filling(decoders[0], "beside"), filling(decoders[2], "alone")
        is_in = False
        while not is_in:
            started, n, now = time.perf_counter(), 0, 0.0
            while not is_in and now < LONG_TURN_S:
                go_on(streams, 1)
                n += 1
                is_in = bool(new.state.steps)
                now = time.perf_counter() - started
            took, n_rounds = took + now, n_rounds + n
            usual += seconds_of(lambda n=n: go_on(others, n))  # type: ignore[misc]
            alone += seconds_of(catch_up)
    row = {"kept": usual / took, "prefill": took / alone, "alone_s": alone}
    print(
        f"{args.streams} answers beside a prompt of {args.prompt} tokens keep {row['kept']:.2f} of "
        f"their speed over {n_rounds} rounds; the prompt takes {row['prefill']:.2f} times "
        f"the {alone:.1f} s that it takes alone",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure many sequences at once")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--drafter", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument(
        "-n", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of sequences"
    )
    parser.add_argument("-c", "--ctx", type=int, default=8192, help="K/V cells of all sequences")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--vocabulary", type=int, default=1000, help="upper bound of random token ids"
    )
    parser.add_argument("--ours-only", action="store_true", help="measure rounds without llama.cpp")
    parser.add_argument(
        "--server",
        type=int,
        nargs="+",
        metavar="LENGTH",
        help="measure whole answers, also by llama.cpp's server with drafts of each LENGTH",
    )
    parser.add_argument(
        "--prompt", type=int, help="measure answers beside a prompt of this many tokens"
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    if args.server and args.drafter is None:
        parser.error("--server needs a --drafter")
    try:
        if args.prompt:
            found: Any = {"beside": beside(args)}
        elif args.server:
            found = {"answers": answers(args)}
        else:
            found = {"rounds": rounds(args)}
    except (native.Error, ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({**facts(), "model": args.model.name, **found}))


if __name__ == "__main__":
    main()
