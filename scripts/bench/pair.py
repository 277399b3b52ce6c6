"""Measures a target and its drafter on Python code: speed, acceptance, and equal text.

    python scripts/bench/pair.py [-m MODEL.gguf -md DRAFTER.gguf] [--prompts 50]
    python scripts/bench/pair.py -m smollm2 --chat "Complete the following Python function."
    python scripts/bench/pair.py --list prompts.jsonl   # writes the prompts, for dflash-bench -f

Answers every prompt with plain decoding, chains, trees and --draft auto, greedily and sampled.
Counts answers that differ from the plain ones. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turns import facts, in_turns

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf._files import write_text
from dflash_gguf.bench.prompts import Prompt
from dflash_gguf.config import DRAFT_KINDS

sys.path.append(str(Path(__file__).resolve().parents[1]))
from train.python_prompts import from_python

from dflash_gguf.train.acceptance import measure, prompt_lookup, repeated_share


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-m", "--model", default=bundled.DEFAULT, help="a GGUF file, or the name of a bundled pair"
    )
    parser.add_argument(
        "-md", "--model-draft", type=Path, help="drafter; default: the named pair's"
    )
    parser.add_argument(
        "--chat", metavar="TEXT", help="make each prompt a user turn that begins with TEXT"
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=192, help="maximum tokens of an answer")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of sampled answers"
    )
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument(
        "--list", type=Path, metavar="FILE", help="write the prompts as JSON lines and stop"
    )
    args = parser.parse_args()
    if bundled.is_name(args.model):
        try:
            found = bundled.find(args.model)
        except ValueError as error:
            parser.error(str(error))
        args.model, args.model_draft = found.target, args.model_draft or found.drafter
    elif args.model_draft is None:
        parser.error(f"-m {args.model} is a file: give its drafter with -md")
    return args


@dataclass(slots=True)
class Total:
    """Sums over all answers of one draft mode (none, chain, tree or auto)."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    differing: int = 0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)

    def add(self, result: dflash_gguf.Result, plain: dflash_gguf.Result) -> None:
        """Adds an answer, and compares it with the plain answer to the same prompt."""
        self.seconds += sum(s for name, s in result.seconds_by_phase.items() if name != "prefill")
        self.tokens += result.n_decoded
        self.rounds += result.rounds
        self.differing += result.tokens != plain.tokens
        for name, seconds in result.seconds_by_phase.items():
            self.seconds_by_phase[name] = self.seconds_by_phase.get(name, 0.0) + seconds

    def summary(self) -> dict[str, Any]:
        """Returns tokens per second, tokens a round (tau), and milliseconds a round by phase."""
        phases = {name: s for name, s in self.seconds_by_phase.items() if name != "prefill"}
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "tau": round(self.tokens / self.rounds, 3),
            "answers_differing": self.differing,
            "ms_a_round": {name: round(1e3 * s / self.rounds, 3) for name, s in phases.items()},
        }


def compare(
    decoder: dflash_gguf.Decoder, prompts: list[list[int]], config: dflash_gguf.DecodeConfig
) -> tuple[dict[str, Any], list[dflash_gguf.Result]]:
    """Answers all prompts in all draft modes by turns; returns figures and plain answers."""
    totals = {kind: Total() for kind in DRAFT_KINDS}
    coming = {kind: iter(prompts) for kind in DRAFT_KINDS}

    def answer(kind: str) -> dflash_gguf.Result:
        decoder.reset()
        return decoder.generate(next(coming[kind]), config, draft=kind)

    results = in_turns({kind: partial(answer, kind) for kind in DRAFT_KINDS}, len(prompts))
    plain = results["none"]
    for kind, total in totals.items():
        for result, other in zip(results[kind], plain, strict=True):
            total.add(result, other)
    found: dict[str, Any] = {kind: total.summary() for kind, total in totals.items()}
    for kind in DRAFT_KINDS[1:]:
        ratio = found[kind]["tokens_per_s"] / found["none"]["tokens_per_s"]
        found[kind]["times_plain"] = round(ratio, 3)
    return found, plain


def main() -> None:
    args = parse()
    config = dflash_gguf.DecodeConfig(max_tokens=args.tokens, seed=1)
    sampled = dflash_gguf.DecodeConfig(
        max_tokens=args.tokens, seed=1, temperature=args.temperature, top_k=0, top_p=1.0, min_p=0.0
    )
    _, texts = from_python(seed=1)
    if args.list is not None:
        lines = (json.dumps({"prompt": text}) for text in texts[: args.prompts])
        write_text(args.list, "\n".join(lines) + "\n")
        return
    with dflash_gguf.load(args.model, drafter=args.model_draft, n_threads=args.threads) as decoder:
        prompts = [Prompt("", text).ids(decoder, args.chat) for text in texts[: args.prompts]]
        decoder.generate(prompts[0], config)  # untimed warm-up run
        greedy, plain = compare(decoder, prompts, config)
        drawn, _ = compare(decoder, prompts, sampled)
        n_draft = decoder.sequence.max_draft
        answers = [
            ([*prompt, *result.tokens], len(prompt))
            for prompt, result in zip(prompts, plain, strict=True)
        ]
    lookup = measure(
        answers,
        lambda places: [prompt_lookup(answers[i][0][: p + 1], n_draft) for i, p in places],
    )
    report = {
        **facts(),
        "model": Path(args.model).name,
        "drafter": args.model_draft.name,
        "prompts": len(prompts),
        "threads": plain[0].threads,
        "greedy": greedy,
        f"temperature {args.temperature}": drawn,
        "tau_prompt_lookup": round(lookup.tau, 3),
        "repeated_8_grams": round(repeated_share([result.tokens for result in plain]), 3),
        "mean_answer_tokens": round(sum(len(r.tokens) for r in plain) / len(plain), 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
