"""Replays recorded conversations of coding agents on dflash-serve and llama.cpp's server.

    scripts/bench/agents.py MODEL.gguf [--chat-template FILE] [--client codex claude-code opencode]

Each request asks for one token. Its answer in the next request is the recorded one, so that a turn
has new tokens of the answer, the tool's result and the next question. Prints, for each turn, the
new tokens, the prompt tokens that each server computed, and the seconds of the request; for the
second turn also the seconds that the server takes to compute as many random tokens behind the same
prefix. Both servers have the same file, template, threads and context. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from build_peer import build, can_repack
from serve import OURS, SERVE, THEIRS, Running, free_port, served
from turns import facts

from dflash_gguf.serve.anthropic_request import MessagesBody, chat_from_messages
from dflash_gguf.serve.prompts import PromptBuilder
from dflash_gguf.serve.responses_request import ResponsesBody, chat_from_responses
from dflash_gguf.serve.schemas import ChatBody, read
from dflash_gguf.text.stream import n_common
from dflash_gguf.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from recorded_agents import CONVERSATIONS, Exchange, exchanges

BODIES: dict[str, Any] = {
    "/v1/chat/completions": (ChatBody, lambda body: body),
    "/v1/messages": (MessagesBody, chat_from_messages),
    "/v1/responses": (ResponsesBody, chat_from_responses),
}
LIMITS = {"/v1/responses": "max_output_tokens"}


class Turn(NamedTuple):
    """A request and the token ids of its prompt."""

    path: str
    request: dict[str, Any]
    tokens: list[int]


def turns_of(client: str, scenario: str, builder: PromptBuilder) -> list[Turn]:
    """Returns the requests of a conversation but those for its title."""
    found = []
    for one in exchanges():
        if (one.client, one.scenario) == (client, scenario) and one.request.get("tools"):
            request = one.request | {LIMITS.get(one.path, "max_tokens"): 1, "stream": False}
            request.pop("stream_options", None)
            found.append(Turn(one.path, request, tokens_of(one, builder)))
    return found


def tokens_of(one: Exchange, builder: PromptBuilder) -> list[int]:
    kind, chat_of = BODIES[one.path]
    body, _ = read(json.dumps(one.request).encode(), kind)
    return [*builder.chat(chat_of(body), deferred=getattr(body, "deferred_tools", ()))]


def posted(server: Running, path: str, body: dict[str, Any]) -> tuple[float, str]:
    """Sends a request; returns the seconds that it took, and the body of an error or ""."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    started, error = time.perf_counter(), ""
    try:
        with urlopen(Request(server.url + path, data, headers), timeout=3600) as found:
            found.read()
    except HTTPError as failed:
        error = failed.read().decode()[:200]
    return time.perf_counter() - started, error


def computed(server: Running) -> int:
    """Returns the number of prompt tokens that a server has computed."""
    with urlopen(f"{server.url}/metrics") as found:
        text = found.read().decode()
    match = re.search(r"^llamacpp:prompt_tokens_total (\S+)$", text, re.MULTILINE)
    return int(float(match[1])) if match else 0


def replayed(server: Running, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns the new and computed tokens and the seconds of each turn on a server."""
    found, before = [], list[int]()
    for turn in turns:
        n_before = computed(server)
        seconds, error = posted(server, turn.path, turn.request)
        fact: dict[str, Any] = {
            "new": len(turn.tokens) - n_common(before, turn.tokens),
            "computed": computed(server) - n_before,
            "s": round(seconds, 3),
        }
        found.append(fact | ({"error": error} if error else {}))
        before = turn.tokens
    return found


def prefill_s(server: Running, turns: Sequence[Turn], runs: int, n_vocab: int) -> float:
    """Returns the median seconds to compute as many tokens as are new in the second turn."""
    first, second = turns[0].tokens, turns[1].tokens
    same = n_common(first, second)
    random = np.random.default_rng(1)
    times = []
    for _ in range(runs):
        rest = random.integers(n_vocab // 4, n_vocab // 2, len(second) - same).tolist()
        body = {"prompt": second[:same] + rest, "n_predict": 1, "cache_prompt": True}
        times.append(posted(server, "/completion", body)[0])
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template")
    parser.add_argument(
        "--client", nargs="*", default=["codex-0.169", "claude-code-2.1.328", "opencode-1.18.33"]
    )
    parser.add_argument("--scenario", nargs="*", help="default: all of a client's")
    parser.add_argument("-c", "--ctx", type=int, default=65536)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="runs of the prefill beside a turn")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's server")
    args = parser.parse_args()
    template = args.chat_template.read_text() if args.chat_template else None
    tokenizer = Tokenizer.from_file(args.model)
    assert tokenizer is not None
    builder = PromptBuilder(tokenizer, template)
    common = ["-m", str(args.model), "-c", str(args.ctx), "-t", str(args.threads), "--metrics"]
    common += ["--chat-template-file", str(args.chat_template)] if args.chat_template else []
    commands = {OURS: [sys.executable, "-c", SERVE, *common]}
    if not args.no_peer:
        commands[THEIRS] = [str(build(["llama-server"]) / "llama-server"), *common, "--no-webui"]
        commands[THEIRS] += [] if can_repack() else ["--no-repack"]
    report: dict[str, Any] = {**facts(), "model": args.model.name, "conversations": {}}
    for client in args.client:
        recorded = CONVERSATIONS[client]
        for scenario in filter((args.scenario or recorded).__contains__, recorded):
            turns = turns_of(client, scenario, builder)
            rows = report["conversations"][f"{client} {scenario}"] = {}
            for name, command in commands.items():
                with contextlib.closing(contextlib.ExitStack()) as stack:
                    server = stack.enter_context(served(command, free_port()))
                    rows[name] = replayed(server, turns)
                    rows[name][1]["prefill_s"] = round(
                        prefill_s(server, turns, args.runs, tokenizer.n_tokens), 3
                    )
                print(f"{client} {scenario}, {name}: {rows[name]}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
