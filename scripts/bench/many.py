"""Many sequences at once: plain rounds beside llama.cpp's batched decoding, and whole answers.

    scripts/bench/many.py MODEL.gguf [--drafter DRAFTER.gguf] [-n 1 8] [--rounds 40] [--runs 3]
    scripts/bench/many.py MODEL.gguf --drafter DRAFTER.gguf --server 3 7
    scripts/bench/many.py MODEL.gguf -c 26000 --prompt 8192 [--streams 4] [--drafter DRAFTER.gguf]
    scripts/bench/many.py MODEL.gguf --host [-n 16] [--drafter DRAFTER.gguf]

Rounds: every sequence holds a prompt of random tokens of its own and takes one greedy token a
round, in one pass of all; llama.cpp's library does the same by llama_decode with as many sequence
ids, on the same ggml, file and threads, in turn. Answers, with a drafter: so many prompts at once,
plainly and with `auto`; with --server in turn with those of llama.cpp's server, plainly and with
draft-dflash of each length, the same drafter and as many slots as the most answers. Tokens a second
of all sequences together, medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from build_peer import build, can_repack
from serve import Running, free_port, served

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.bench.prompts import Prompt
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.bench.url import bodies
from dflash_gguf.native import Engine, Item, LoadConfig, Model, Sequence

N_PROMPT = 128
N_ANSWER = 96
N_EACH = 6
"""Answers for each of those at once."""
N_WARM = 60
PLAIN_PEER = "llama-server"
TURN_S = 0.05
"""Answers of one setting go on for so long before it is the other's turn."""
LONG_TURN_S = 0.5
"""The same beside a long prompt: some pieces of it, and rounds between them."""

Rates = dict[int, dict[str, list[float]]]


class Ours:
    """Sequences of one engine, a token each a round."""

    def __init__(self, path: Path, n_sequences: int, n_ctx: int, n_threads: int | None) -> None:
        config = LoadConfig(
            n_ctx=n_ctx, n_parallel=n_sequences, n_threads=n_threads, n_gpu_layers=0
        )
        self.engine = Engine(Model(str(path), config))
        self._sequences = [Sequence(self.engine) for _ in range(n_sequences)]
        self._last: list[int] = []

    def begin(self, prompts: list[list[int]]) -> None:
        """Fills the first sequences."""
        for sequence in self._sequences:
            sequence.reset()
        self._last = [
            sequence.prefill(prompt).argmax()
            for sequence, prompt in zip(self._sequences, prompts, strict=False)
        ]

    def round(self) -> None:
        """A token for each."""
        pairs = zip(self._sequences, self._last, strict=False)
        rows = self.engine.run([Item(sequence, [token]) for sequence, token in pairs])
        self._last = [row.argmax() for row in rows]


class Theirs:
    """The same by llama.cpp's library."""

    def __init__(self, path: Path, n_sequences: int, n_ctx: int, n_threads: int) -> None:
        llama_cpp.llama_log_set(_silent, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = can_repack()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = n_ctx, n_sequences
        context.n_threads = context.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(max(N_PROMPT, n_sequences), 0, 1)
        self._last: list[int] = []
        self._position = 0

    def begin(self, prompts: list[list[int]]) -> None:
        """Fills the first sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._last, self._position = [], N_PROMPT
        for sequence, prompt in enumerate(prompts):
            self._decode([(token, i, sequence) for i, token in enumerate(prompt)])
            self._last.append(self._argmax(len(prompt) - 1))

    def round(self) -> None:
        """A token for each."""
        self._decode([(token, self._position, i) for i, token in enumerate(self._last)])
        self._last = [self._argmax(i) for i in range(len(self._last))]
        self._position += 1

    def _decode(self, rows: list[tuple[int, int, int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        is_prompt = len({sequence for _, _, sequence in rows}) < len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i == len(rows) - 1 or not is_prompt
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise native.Error(f"llama_decode refused {len(rows)} tokens")

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._n_vocab,)).argmax())


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    pass


def rates(engines: dict[str, Ours | Theirs], args: argparse.Namespace) -> Rates:
    """Tokens a second of rounds without drafts, by sequences and engine, of each run.

    In turn, so that whatever slows the machine down for a while is shared.
    """
    random = np.random.default_rng(0)
    prompts = random.integers(0, args.vocabulary, (max(args.n), N_PROMPT)).tolist()
    found: Rates = {n: {name: [] for name in engines} for n in args.n}
    for run in range(args.runs):
        for n in args.n:
            for name in list(engines)[:: 1 if run % 2 == 0 else -1]:
                engines[name].begin(prompts[:n])
                seconds = [_seconds(engines[name].round) for _ in range(args.rounds)]
                found[n][name].append(n / statistics.median(seconds))
    return found


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, Running]]:
    """llama.cpp's, loaded: the plain one, and one for each length of drafts. None without --server.

    They run beside each other and wait at no cost. Slots share the cells, as our answers do, and
    nothing is kept of an answer that is over.
    """
    with contextlib.ExitStack() as stack:
        found: dict[str, Running] = {}
        if args.server is not None:
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
    """Seconds of the answers to all prompts, n at once, by requests, and their texts."""
    asked = [Prompt(str(i), text) for i, text in enumerate(prompts)]
    requests = bodies(asked, None, N_ANSWER, 0.0, 0)
    with ThreadPoolExecutor(n) as pool:
        started = time.perf_counter()
        found = list(pool.map(lambda request: server.stream(*request), requests))
        seconds = time.perf_counter() - started
    for answer in found:
        if answer.failure or answer.n_tokens != N_ANSWER:
            raise RuntimeError(f"a server: {answer.failure or f'{answer.n_tokens} tokens'}")
    return seconds, [answer.text for answer in found]


def answers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of whole answers, plain ones beside those with drafts, prompts included.

    So many at once all the time: where one ends another begins, and it is over before they are too
    few. Each run by two decoders of its own that find nothing measured before: an answer given
    twice would be copied from itself. They take turns of TURN_S, so that whatever else slows the
    machine down is shared. Servers answer the same prompts to the end, in turn with these; each has
    answered once before.
    """
    with servers(args) as peers:
        for server in peers.values():
            by_server(server, ["Once upon a time"], 1)
        return [answers_of(n, args, peers) for n in args.n]


def answers_of(n: int, args: argparse.Namespace, peers: dict[str, Running]) -> dict[str, Any]:
    """So many at once."""
    rates: dict[str, list[float]] = {name: [] for name in ("none", "auto", *peers)}
    n_equal = dict.fromkeys(peers, 0)
    n_prompts = N_EACH * n
    for run in range(args.runs):
        prompts = [
            f"Write a Python function that adds {run * N_EACH * max(args.n) + i} to a number."
            for i in range(n_prompts)
        ]
        for name, rate in in_turns(args, prompts, n, flipped=run % 2 == 1).items():
            rates[name].append(rate)
        texts = {}
        for name in list(peers)[:: 1 if run % 2 == 0 else -1]:
            seconds, texts[name] = by_server(peers[name], prompts, n)
            rates[name].append(n_prompts * N_ANSWER / seconds)
        for name, found in texts.items():
            n_equal[name] += sum(a == b for a, b in zip(found, texts[PLAIN_PEER], strict=True))
    row: dict[str, Any] = {"n": n, "equal": n_equal, "runs": rates}
    row |= {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: ratio_interval([a / b for a, b in zip(values, rates[plain], strict=True)])
        for name, values in rates.items()
        if name != (plain := PLAIN_PEER if name in peers else "none")
    }
    row["ratio"] = ratios
    mean, low, high = ratios["auto"]
    print(
        f"{n:3} answers: plain {row['none']:7.0f} tok/s, auto {row['auto']:7.0f}, "
        f"ratio {mean:.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )
    for name in list(peers)[1:]:
        mean, low, high = ratios[name]
        print(
            f"    llama.cpp's server: plain {row[PLAIN_PEER]:7.0f} tok/s, {name} {row[name]:7.0f}, "
            f"ratio {mean:.3f} ({low:.3f} to {high:.3f}); "
            f"{n_equal[name]} of {n_prompts * args.runs} texts are its plain ones",
            flush=True,
        )
    return row


class Load:
    """So many answers of one decoder at once, in the order of their prompts.

    The first ones end at different times, as those do that begin at different times.
    """

    def __init__(self, decoder: dflash_gguf.Decoder, draft: str, prompts: Series[str], n: int):
        self._decoder, self._draft = decoder, draft
        self._left = [(text, N_ANSWER) for text in reversed(prompts)]
        for i in range(n):
            self._left[-1 - i] = prompts[i], N_ANSWER * (i + 1) // n
        self._n = n
        self._live: list[dflash_gguf.Stream] = []
        self.n_tokens, self.seconds = 0, 0.0

    def run(self, most_s: float) -> bool:
        """Goes on for so long; whether there are as many answers as there are to be."""
        started, now = time.perf_counter(), 0.0
        while self._fill() and now < most_s:
            steps = [(stream, next(stream, None)) for stream in self._live]
            self._live = [stream for stream, step in steps if step is not None]
            self.n_tokens += sum(len(step.tokens) for _, step in steps if step is not None)
            now = time.perf_counter() - started
        self.seconds += time.perf_counter() - started
        return len(self._live) == self._n

    def _fill(self) -> bool:
        while self._left and len(self._live) < self._n:
            prompt, n_tokens = self._left.pop()
            config = {"max_tokens": n_tokens, "ignore_eos": True, "draft": self._draft}
            self._live.append(self._decoder.stream(prompt, **config))
        return len(self._live) == self._n


def in_turns(
    args: argparse.Namespace, prompts: list[str], n: int, *, flipped: bool
) -> dict[str, float]:
    """Tokens a second of answers to the prompts, n at once, by setting."""
    options = {"n_ctx": args.ctx, "n_parallel": max(args.n), "n_threads": args.threads}
    names = ["auto", "none"] if flipped else ["none", "auto"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        loads = {}
        for draft in names:
            os.environ["XDG_CACHE_HOME"] = os.path.join(folder, draft)  # each measures as it loads
            decoder = stack.enter_context(
                dflash_gguf.load(args.model, drafter=args.drafter, **options)
            )
            loads[draft] = Load(decoder, draft, prompts, n)
        waiting = list(names)
        while waiting:
            waiting = [draft for draft in waiting if loads[draft].run(TURN_S)]
    return {draft: load.n_tokens / load.seconds for draft, load in loads.items()}


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """What a long prompt costs the answers beside it, and they it: plain ones without a drafter.

    Others are slower the longer they are, so they are held against the same tokens of the same
    answers without the prompt. Three decoders take turns, so that whatever else slows the machine
    down is shared: with both, with the answers, and with the prompt.
    """
    options = {"n_ctx": args.ctx, "n_parallel": args.streams + 1, "n_threads": args.threads}
    prompt = np.random.default_rng(0).integers(0, args.vocabulary, args.prompt).tolist()
    n_filled = {"beside": 0, "alone": 0}  # of the prompt

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

    def catch_up(stream: dflash_gguf.Stream) -> None:
        while n_filled["alone"] < n_filled["beside"]:
            stream.poll(run=True)

    took = usual = alone = 0.0
    n_rounds = 0
    with contextlib.ExitStack() as stack:
        decoders = [
            stack.enter_context(dflash_gguf.load(args.model, drafter=args.drafter, **options))
            for _ in range(3)
        ]
        streams, others = (begun(decoder) for decoder in decoders[:2])
        new, lone = filling(decoders[0], "beside"), filling(decoders[2], "alone")
        is_in = False
        while not is_in:
            started, n, now = time.perf_counter(), 0, 0.0
            while not is_in and now < LONG_TURN_S:
                go_on(streams, 1)
                n += 1
                is_in = new.poll(run=False) is not None
                now = time.perf_counter() - started
            took, n_rounds = took + now, n_rounds + n
            usual += _seconds(lambda n=n: go_on(others, n))  # type: ignore[misc]
            alone += _seconds(lambda: catch_up(lone))
    row = {"kept": usual / took, "prefill": took / alone, "alone_s": alone}
    print(
        f"{args.streams} answers beside a prompt of {args.prompt} tokens keep {row['kept']:.2f} of "
        f"their speed over {n_rounds} rounds; it takes {row['prefill']:.2f} times its "
        f"{alone:.1f} s",
        flush=True,
    )
    return row


def host(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The part of rounds that is not the core's: choices, trees, sampling, text."""
    options = {"n_ctx": args.ctx, "n_parallel": max(args.n), "n_threads": args.threads}
    draft = "none" if args.drafter is None else "auto"
    found = []
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        engine: Any = decoder.engine
        core_s = 0.0

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*values: Any) -> Any:
                nonlocal core_s
                started = time.perf_counter()
                result = call(*values)
                core_s += time.perf_counter() - started
                return result

            return run

        for name in ("run", "draft", "commit"):
            setattr(engine, name, timed(getattr(engine, name)))
        for n in args.n:
            streams = [
                decoder.stream(
                    f"Write a story about {i} birds.",
                    max_tokens=1000,
                    ignore_eos=True,
                    temperature=1.0,
                    seed=i,
                    draft=draft,
                )
                for i in range(n)
            ]
            for stream in streams * 2:  # prompts, and the first graphs
                next(stream)
            shares, seconds = [], []
            for _ in range(args.rounds):
                core_s, started = 0.0, time.perf_counter()
                for stream in streams:
                    next(stream)
                seconds.append(time.perf_counter() - started)
                shares.append(1.0 - core_s / seconds[-1])
            for stream in streams:
                stream.close()
            row = {"n": n, "host": statistics.median(shares), "round_s": statistics.median(seconds)}
            print(
                f"{n:3} answers at temperature 1, {decoder.model.n_vocab} tokens: the host takes "
                f"{100 * row['host']:.1f} % of a round of {1e3 * row['round_s']:.1f} ms",
                flush=True,
            )
            found.append(row)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Many sequences at once")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--drafter", type=Path, metavar="DRAFTER.gguf", help="answers, too")
    parser.add_argument("-n", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="sequences")
    parser.add_argument("-c", "--ctx", type=int, default=8192, help="cells of all together")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=1000, help="random ids below this")
    parser.add_argument("--ours-only", action="store_true", help="without llama.cpp")
    parser.add_argument(
        "--server",
        type=int,
        nargs="+",
        metavar="LENGTH",
        help="answers by llama.cpp's server too, plainly and with drafts of each length",
    )
    parser.add_argument("--prompt", type=int, help="instead: streams beside one of so many tokens")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--host", action="store_true", help="instead: the host's part of rounds")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    if args.server and args.drafter is None:
        parser.error("--server: drafts need a --drafter")
    results = []
    try:
        if args.prompt:
            print(json.dumps({"model": args.model.name, **beside(args)}))
            return
        if args.host:
            print(json.dumps({"model": args.model.name, "host": host(args)}))
            return
        ours = Ours(args.model, max(args.n), args.ctx, args.threads)
        args.threads = ours.engine.n_threads
        engines: dict[str, Ours | Theirs] = {"ours": ours}
        if not args.ours_only:
            engines["llama.cpp"] = Theirs(args.model, max(args.n), args.ctx, args.threads)
        for n, found_of in rates(engines, args).items():
            rate = {name: statistics.median(runs) for name, runs in found_of.items()}
            line = f"{n:3} sequences: ours {rate['ours']:7.0f} tok/s"
            if n == args.n[0]:
                first = found_of["ours"]
            else:
                times = [many / one for many, one in zip(found_of["ours"], first, strict=True)]
                line += f", {statistics.median(times):.2f} times {args.n[0]}"
                line += f" ({min(times):.2f} to {max(times):.2f})"
            if "llama.cpp" in rate:
                ratio = rate["ours"] / rate["llama.cpp"]
                line += f", llama.cpp {rate['llama.cpp']:7.0f}, ratio {ratio:.3f}"
            print(line, flush=True)
            results.append({"n": n, **rate})
        found = answers(args) if args.drafter is not None else []
    except (native.Error, ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"model": args.model.name, "rounds": results, "answers": found}))


if __name__ == "__main__":
    main()
