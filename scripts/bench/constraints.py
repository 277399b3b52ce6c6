"""Measures constrained beside free decoding of the same text, with and without drafts.

    scripts/bench/synthetic_gguf.py qwen35-0.8b TARGET.gguf --outtype q4_k_m --vocabulary VOCAB.gguf
    scripts/bench/synthetic_gguf.py qwen35-0.8b-dflash DRAFTER.gguf --target TARGET.gguf
    scripts/bench/constraints.py TARGET.gguf --drafter DRAFTER.gguf [-n 1 8 16] [--runs 5]

The vocabulary is models/ggml-vocab-command-r.gguf (256,000 tokens) in the sdist of
llama-cpp-python. Every answer is forced to be the same JSON of --tokens tokens: free, under a
schema, under a grammar, and within a tool call. Each drafted token is right with probability
--chance, else another token of the text. All else is real: passes, masks, sampling, parsing.
Prints, for every number of answers, milliseconds of a round by phase; the share of masks and
parsing in it; what drafting gains; and this gain divided by that of free answers. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from turns import Figures, facts, in_turns

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.engine.output_processor import OutputProcessor
from dflash_gguf.engine.stats import Phase
from dflash_gguf.native import Draft
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.text.chat import ChatPrompt
from dflash_gguf.text.tools.parser import ToolFormat

N_PROMPT = 16
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "chain": {"draft": "chain", "draft_type": "dflash", "draft_max": 7},
    "tree": {"draft": "tree", "draft_type": "dflash", "tree_budget": 15, "draft_max": 7},
    "auto": {"draft": "auto", "draft_type": "dflash"},
}
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 1},
            "description": {"type": "string"},
            "category": {"enum": ["hardware", "software", "services"]},
            "is_available": {"type": "boolean"},
            "measurements": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["identifier", "description", "category", "is_available", "measurements"],
        "additionalProperties": False,
    },
}
GRAMMAR = r"""
root ::= "[" (record (", " record)*)? "]"
record ::= "{\"identifier\": " [1-9] [0-9]* ", \"description\": " string rest
rest ::= ", \"category\": " kind ", \"is_available\": " ("true" | "false") numbers "}"
numbers ::= ", \"measurements\": [" (number (", " number)*)? "]"
kind ::= "\"hardware\"" | "\"software\"" | "\"services\""
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
"""
TOOLS = ToolFormat("qwen", {"record": {"type": "object", "properties": {"items": SCHEMA}}})
Rows = dict[str, dict[str, Figures]]
"""Medians of a round by kind of constraint, then by kind of draft."""

KINDS = ("free", "schema", "grammar", "call")


def text_of(n_records: int) -> str:
    """Returns the JSON of random records, which SCHEMA and GRAMMAR allow."""
    random = np.random.default_rng(1)
    words = ["small", "fast", "blue", "copper", "cable", "with", "plugs", "for", "garden", "pumps"]
    records = [
        {
            "identifier": int(random.integers(1, 10_000)),
            "description": " ".join(random.choice(words, 8)),
            "category": str(random.choice(["hardware", "software", "services"])),
            "is_available": bool(random.integers(2)),
            "measurements": random.uniform(-50, 50, 3).round(2).tolist(),
        }
        for _ in range(n_records)
    ]
    return json.dumps(records)


class Script:
    """Replaces an engine's sampled tokens by those of a text, and drafts by good and bad guesses.

    The guess for a place in the text is good or bad in every answer alike, so that free and
    constrained answers accept equally many.
    """

    def __init__(self, engine: Any, chance: float) -> None:
        """Changes the methods of an engine. chance: probability that a drafted token is right."""
        self.tokens: list[int] = []
        self._chance = chance
        self._entries: dict[Any, Any] = {}
        self._run, self._draft, self._sample = engine.run, engine.draft, engine.sample
        engine.run, engine.draft, engine.sample = self.run, self.draft, self.sample

    def start(self, tokens: list[int]) -> None:
        """Sets the tokens of the answers."""
        self.tokens, random = tokens, np.random.default_rng(1)
        self._is_right = random.random(len(tokens)) < self._chance
        self._wrong = random.permutation(tokens)

    def run(self, entries: Sequence[Any]) -> Any:
        """Runs a pass."""
        self._entries = {entry.sequence: entry for entry in entries}
        return self._run(entries)

    def draft(self, requests: Sequence[Any], k: int = 1, drafter: int = 0) -> list[Draft]:
        """Runs the drafter. Returns drafts whose first or second candidates are the text's."""
        drafts = self._draft(requests, k, drafter)
        return [self._guesses(*pair) for pair in zip(requests, drafts, strict=True)]

    def sample(self, requests: Sequence[Any]) -> list[list[int]]:
        """Samples as the engine does. Returns the text's tokens along each tree instead."""
        self._sample(requests)
        return [self._follow(request) for request in requests]

    def _guesses(self, request: Any, draft: Draft) -> Draft:
        n, k = draft.tokens.shape
        first = request.sequence.position + 1 - N_PROMPT
        places = np.arange(first, first + n) % len(self.tokens)
        tokens = self._wrong[places[:, None] - np.arange(k)].astype(np.int32)
        text = np.array(self.tokens)[places]
        tokens[:, 0] = np.where(self._is_right[places], text, tokens[:, 0])
        if k > 1:
            tokens[:, 1] = np.where(self._is_right[places], tokens[:, 1], text)
        logits = np.tile(-np.arange(k, dtype=np.float32), (n, 1))
        return Draft(tokens, logits, np.full(n, 0.5, np.float32))

    def _follow(self, request: Any) -> list[int]:
        entry, drawn = self._entries[request.sequence], list[int]()

        def choose(_node: int) -> int:
            at = request.position - N_PROMPT + len(drawn)
            drawn.append(self.tokens[min(at, len(self.tokens) - 1)])
            return drawn[-1]

        nodes = entry.tokens if entry.is_verify else entry.tokens[-1:]
        Tree.of(nodes, entry.parents).follow(choose, lambda _: False)
        return drawn


def timed_parsing() -> dict[str, float]:
    """Makes output processors add their seconds to the returned dict."""
    seconds = {"parse": 0.0}

    def timed(push: Callable[..., bool]) -> Callable[..., bool]:
        def run(self: OutputProcessor, token: int) -> bool:
            with Phase(seconds, "parse"):
                return push(self, token)

        return run

    OutputProcessor.push = timed(OutputProcessor.push)  # type: ignore[method-assign]
    return seconds


def measured(args: argparse.Namespace, n: int, parse: dict[str, float]) -> Rows:
    """Returns medians of a round with n answers. parse: seconds that `timed_parsing` returned."""
    options = {"n_ctx": n * (args.tokens + 64), "n_parallel": n, "n_threads": args.threads}
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        script = Script(decoder.engine, args.chance)
        json_text = text_of(args.tokens // 20)
        call = f"<tool_call>\n<function=record>\n<parameter=items>\n{json_text}"
        json_tokens, call_tokens = (
            decoder.tokenize(text, add_special=False)[: args.tokens] for text in (json_text, call)
        )
        tokenizer = decoder.tokenizer
        assert tokenizer is not None
        constraints: dict[str, dict[str, Any]] = {
            "free": {},
            "schema": {"json_schema": SCHEMA},
            "grammar": {"grammar": GRAMMAR},
            "call": {"grammar": tokenizer.call_grammar(TOOLS)},
        }
        random = np.random.default_rng(2)

        def run(kind: str, draft: str) -> Figures:
            script.start(call_tokens if kind == "call" else json_tokens)
            decoder.forget_texts()
            prompts = [
                ChatPrompt(
                    random.integers(0, 256, N_PROMPT).tolist(),
                    None,
                    tools=TOOLS if kind == "call" else None,
                )
                for _ in range(n)
            ]
            parse["parse"] = 0.0
            streams = [
                decoder.stream(
                    prompt,
                    max_tokens=args.tokens,
                    temperature=args.temperature,
                    seed=seed,
                    **constraints[kind],
                    **DRAFTS[draft],
                )
                for seed, prompt in enumerate(prompts)
            ]
            while not all(stream.state.is_finished for stream in streams):
                decoder.step()
                for stream in streams:
                    stream.state.steps.clear()  # an answer with too much unread text pauses
            results = [stream.result() for stream in streams]
            if any(list(one.tokens) != script.tokens for one in results):
                raise ValueError(f"{kind}, {draft}: another answer: {results[0].text!r:.200}")
            result = max(results, key=lambda one: one.rounds)
            rounds = result.rounds
            by_phase = {x: 1e3 * s / rounds for x, s in result.seconds_by_phase.items()}
            by_phase.pop("prefill")
            return {
                "round": 1e3 * result.decode_s / rounds,
                "parse": 1e3 * parse["parse"] / rounds,
                "tokens": sum(one.n_decoded for one in results) / rounds,
                **by_phase,
            }

        names = [(kind, draft) for draft in args.drafts for kind in args.kinds]
        sides = {f"{kind} {draft}": partial(run, kind, draft) for kind, draft in names}
        for side in sides.values():
            side()  # compiles constraints and builds graphs
        runs = in_turns(sides, args.runs)
    rows: Rows = {kind: {} for kind in args.kinds}
    for kind, draft in names:
        found = runs[f"{kind} {draft}"]
        row = {x: statistics.median(one.get(x, 0.0) for one in found) for x in found[0]}
        row["share"] = statistics.median(
            (one.get("mask", 0.0) + one["parse"]) / one["round"] for one in found
        )
        rows[kind][draft] = row
        if "none" in args.drafts:
            row["gain"] = statistics.median(
                one["tokens"] / one["round"] / plain["tokens"] * plain["round"]
                for one, plain in zip(found, runs[f"{kind} none"], strict=True)
            )
        print(_line(n, kind, draft, row, rows), flush=True)
    return rows


def _line(n: int, kind: str, draft: str, row: Figures, rows: Rows) -> str:
    line = (
        f"{n:3} {kind:8}{draft:6} round {row['round']:7.2f} ms: mask {row.get('mask', 0.0):6.3f}, "
        f"parse {row['parse']:6.3f}, sample {row['sample']:6.3f}, share {100 * row['share']:5.2f} %"
        f", {row['tokens']:5.2f} tokens"
    )
    if draft != "none" and "gain" in row:
        line += f", gain {row['gain']:.2f}"
        if "free" in rows and kind in ("schema", "grammar"):  # the text of a call is another one
            row["kept"] = row["gain"] / rows["free"][draft]["gain"]
            line += f", {row['kept']:.2f} of the free one"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure constrained beside free decoding")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--drafter", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument("-n", type=int, nargs="+", default=[1, 8, 16], help="answers at once")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=["none", "chain", "tree"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", type=int, default=500, help="length of an answer")
    parser.add_argument("--chance", type=float, default=0.8, help="that a drafted token is right")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    if args.drafter is None:
        args.drafts = ["none"]
    try:
        parse = timed_parsing()
        rows = {n: measured(args, n, parse) for n in args.n}
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({**facts(), "model": args.model.name, "rows": rows}))


if __name__ == "__main__":
    main()
