"""Measures dflash-serve beside the same decoder without HTTP, and beside llama.cpp's server.

    scripts/bench/serve.py MODEL.gguf [--drafter DRAFTER.gguf] [--at-once 1 8 16] [--turns 10]

Throughput: greedy answers of equal length, several at once, in turns by `generate_batch` and by
requests to each server; also CPU time per token of our server's HTTP process. Chat: milliseconds to
the first token of each turn of a growing conversation, and computed prompt tokens. Both servers
have the same file, threads, context and -np. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from build_peer import build, can_repack
from turns import facts, in_turns

import dflash_gguf
from dflash_gguf.bench.prompts import Prompt
from dflash_gguf.bench.url import ServerClient, bodies, load

OURS, THEIRS, BATCH = "dflash-serve", "llama-server", "generate_batch"
START_S = 300
SERVE = "import sys; from dflash_gguf.serve.command import main; sys.exit(main())"
SENTENCE = (
    "the quick brown fox jumps over a lazy dog while seven small boats drift along the quiet river"
)
WORDS = tuple(SENTENCE.split())


def free_port() -> int:
    """Returns a free TCP port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Running(ServerClient):
    """A running server, ours or llama.cpp's."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(url, None)
        self.url, self.pid = url, pid
        self.cpu_s, self.n_tokens = 0.0, 0
        """CPU seconds of the server process in measurements, and tokens that it sent in them."""


@contextlib.contextmanager
def served(command: Sequence[str], port: int) -> Iterator[Running]:
    """Runs a server for a with block, which begins once the server has loaded the model."""
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"{url}/health", timeout=5) as found:
                    if found.status == 200:
                        break
            except (URLError, OSError):
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} ended or was not ready in time")
            time.sleep(0.2)
        yield Running(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompt(number: int, n_words: int = 40) -> str:
    """Returns a prompt of n_words words, different for each number."""
    shuffled = [WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(n_words)]
    return f"Story {number}: " + " ".join(shuffled)


def rate(server: Running, prompts: list[str], n: int, n_tokens: int, seed: int) -> float:
    """Returns tokens per second of a server's answers together, with n requests at once."""
    requests = bodies(
        [Prompt(str(i), text) for i, text in enumerate(prompts)], None, n_tokens, 0.0, seed
    )
    began_s = cpu_s(server.pid)
    level = load(server, requests, n)
    if level.n_failed:
        raise RuntimeError(f"a request failed: {level.to_dict()['failure']}")
    server.cpu_s += cpu_s(server.pid) - began_s
    server.n_tokens += level.to_dict()["tokens"]
    return level.to_dict()["tokens_per_s"]


def batch_rate(decoder: dflash_gguf.Decoder, prompts: list[str], n: int, n_tokens: int) -> float:
    """Returns tokens per second of `Decoder.generate_batch`, with n answers at once."""
    began = time.perf_counter()
    n_done = 0
    todo = list(prompts)
    while todo:
        part, todo = todo[:n], todo[n:]
        found = decoder.generate_batch(part, max_tokens=n_tokens, ignore_eos=True, temperature=0.0)
        n_done += sum(result.n_tokens for result in found)
    return n_done / (time.perf_counter() - began)


def throughput(
    sources: dict[str, Any], args: argparse.Namespace, n: int
) -> dict[str, dict[str, float]]:
    """Returns median tokens per second of servers and decoder, and our server's ratio to each."""
    runs = {name: itertools.count() for name in sources}

    def speed(name: str) -> float:
        run, source = next(runs[name]), sources[name]
        prompts = [prompt(1000 * n + 100 * run + i) for i in range(2 * n)]
        if name == BATCH:
            return batch_rate(source, prompts, n, args.tokens)
        return rate(source, prompts, n, args.tokens, run)

    sides = {name: partial(speed, name) for name in sources}
    in_turns(sides, 1)  # warm-up, which builds graphs
    found = in_turns(sides, args.runs, 1)
    return {
        name: {
            "tokens_per_s": round(statistics.median(values), 1),
            "ours_by_it": round(
                statistics.median(a / b for a, b in zip(found[OURS], values, strict=True)), 3
            ),
        }
        for name, values in found.items()
    }


def chat(server: ServerClient, n_turns: int, n_words: int, n_tokens: int) -> list[dict[str, float]]:
    """Returns each chat turn's milliseconds to the first token, and its computed tokens."""
    text, found = "", []
    for turn in range(n_turns):
        text += f"\nUser: {prompt(turn + 1, n_words)}\nAssistant:"
        body = bodies([Prompt("chat", text)], None, n_tokens, 0.0, 0)[0]
        answer = server.stream(*body)
        if answer.failure:
            raise RuntimeError(answer.failure)
        found.append(
            {
                "first_token_ms": round(1e3 * answer.first_s, 1),
                "computed": answer.timings["prompt_n"],
                "found": answer.timings["cache_n"],
            }
        )
        text += answer.text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure dflash-serve beside llama.cpp's server")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument(
        "--drafter", type=Path, metavar="DRAFTER.gguf", help="drafter of dflash-serve"
    )
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 16], metavar="N")
    parser.add_argument("-np", "--parallel", type=int, default=16, help="slots (default: 16)")
    parser.add_argument("-c", "--ctx", type=int, default=16384)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10, help="turns of the chat; 0: no chat")
    parser.add_argument("--words", type=int, default=150, help="words of a question in the chat")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's server")
    parser.add_argument("--no-batch", action="store_true", help="without generate_batch")
    args = parser.parse_args()
    model, slots = str(args.model), str(args.parallel)
    common = ["-m", model, "-c", str(args.ctx), "-t", str(args.threads), "-np", slots]
    ours = [sys.executable, "-c", SERVE, *common]
    if args.drafter is not None:
        ours += ["-md", str(args.drafter)]
    report: dict[str, Any] = {**facts(), "model": args.model.name, "slots": args.parallel}
    with contextlib.ExitStack() as stack:
        sources: dict[str, Any] = {OURS: stack.enter_context(served(ours, free_port()))}
        if not args.no_batch:
            options = {"n_ctx": args.ctx, "n_threads": args.threads, "n_parallel": args.parallel}
            sources[BATCH] = stack.enter_context(
                dflash_gguf.load(args.model, drafter=args.drafter, **options)
            )
        if not args.no_peer:
            tool = build(["llama-server"]) / "llama-server"
            theirs = [str(tool), *common, "--kv-unified", "--no-webui"]
            theirs += [] if can_repack() else ["--no-repack"]
            sources[THEIRS] = stack.enter_context(served(theirs, free_port()))
        report["throughput"] = {}
        for n in args.at_once:
            found = report["throughput"][n] = throughput(sources, args, n)
            shown = ", ".join(
                f"{name} {facts['tokens_per_s']} tok/s (ours by it {facts['ours_by_it']})"
                for name, facts in found.items()
            )
            print(f"{n:3} at once: {shown}", flush=True)
            ours_now: Running = sources[OURS]
            share = 1e6 * ours_now.cpu_s / ours_now.n_tokens
            report["throughput"][n]["http_us_a_token"] = round(share, 1)
            print(f"    {share:.0f} microseconds of CPU per token in the HTTP process", flush=True)
            ours_now.cpu_s, ours_now.n_tokens = 0.0, 0
        if args.turns:
            servers = {name: one for name, one in sources.items() if name != BATCH}
            report["turns"] = {
                name: chat(one, args.turns, args.words, args.tokens)
                for name, one in servers.items()
            }
            for name, turns in report["turns"].items():
                for fact in turns[0]:
                    print(f"turns, {name}, {fact}: {[turn[fact] for turn in turns]}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
