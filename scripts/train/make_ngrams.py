"""Makes an n-gram table, a drafter without weights, from a target's answers.

    scripts/train/make_ngrams.py TARGET.gguf OUT.gguf ANSWERS.xz... [--followers 2] [--limit N]

ANSWERS.xz has answers as make_answers.py writes them. The table has the tokens that followed most
often after each run of 1 to 3 tokens. The probability of a row is the share of right tokens in its
group (length of the run, its occurrences, rank and share of the token), where each eighth of the
answers is compared with a table of the others. Prints the share of right tokens by length of the
run, and the tokens a round (tau) of chains of the best tokens on the eighths.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dflash_gguf.convert.schema import Arch, Key, Tensor
from numpy.typing import NDArray

from dflash_gguf._files import check_file, check_output
from dflash_gguf.cli.command import guarded
from dflash_gguf.text.gguf_metadata import GgufMetadata
from dflash_gguf.train import acceptance, pieces

MAX_RUN, N_CLASSES, N_PARTS = 3, 12, 8
MIN_PROB = 0.03
"""Probability below which a token is left out of the table."""
MIN_PATH = 0.3
"""Probability of a path below which a chain ends in the measurement of tau."""

Run = tuple[int, ...]
Group = tuple[int, int, int, int]


class Counts:
    """Counts of the tokens that follow each run of up to MAX_RUN tokens in answers."""

    def __init__(self, answers: Iterable[pieces.StoredAnswer]) -> None:
        self.counts: defaultdict[Run, Counter[int]] = defaultdict(Counter)
        self._followers: dict[tuple[Run, int], list[tuple[int, Group]]] = {}
        for answer in answers:
            for i in range(answer.n_prompt, len(answer.tokens)):
                for size in range(1, min(MAX_RUN, i) + 1):
                    self.counts[answer.tokens[i - size : i]][answer.tokens[i]] += 1

    def longest(self, tokens: Run) -> Run | None:
        """Returns the longest known run at the end of a text, or None."""
        ends = (tokens[-size:] for size in range(min(MAX_RUN, len(tokens)), 0, -1))
        return next((run for run in ends if run in self.counts), None)

    def followers(self, run: Run, n: int) -> list[tuple[int, Group]]:
        """Returns the n most frequent tokens after a known run, each with its group."""
        if (run, n) not in self._followers:
            found = self.counts[run]
            n_all = found.total()
            size = min(int(math.log2(n_all)), 7)
            best = sorted(found.items(), key=lambda x: (-x[1], x[0]))[:n]
            self._followers[run, n] = [
                (token, (len(run), size, rank, 8 * count // n_all))
                for rank, (token, count) in enumerate(best)
            ]
        return self._followers[run, n]


class Probabilities:
    """Shares of right tokens by group, of each eighth of answers with a table of the others."""

    def __init__(self, answers: Sequence[pieces.StoredAnswer], n_followers: int) -> None:
        self.n_right: Counter[Group] = Counter()
        self.n_all: Counter[Group] = Counter()
        self.parts: list[tuple[Counts, list[pieces.StoredAnswer]]] = []
        for part in range(N_PARTS):
            counts = Counts(x for i, x in enumerate(answers) if i % N_PARTS != part)
            self.parts.append((counts, list(answers[part::N_PARTS])))
            for answer in self.parts[-1][1]:
                for i in range(answer.n_prompt, len(answer.tokens)):
                    run = counts.longest(answer.tokens[max(0, i - MAX_RUN) : i])
                    for token, group in counts.followers(run, n_followers) if run else ():
                        self.n_all[group] += 1
                        self.n_right[group] += token == answer.tokens[i]

    def of(self, group: Group) -> float:
        """Returns the share of a group, nearer to 0.2 if the group has few tokens."""
        return (self.n_right[group] + 0.3) / (self.n_all[group] + 1.5)

    def chain(self, counts: Counts, known: Run, n: int) -> list[int]:
        """Returns the chain of best tokens after a text while its path is probable enough."""
        tokens, path = list(known[-MAX_RUN:]), 1.0
        n_known = len(tokens)
        while len(tokens) - n_known < n:
            run = counts.longest(tuple(tokens[-MAX_RUN:]))
            if run is None:
                break
            token, group = counts.followers(run, 1)[0]
            path *= self.of(group)
            if path < MIN_PATH:
                break
            tokens.append(token)
        return tokens[n_known:]

    def taus(self) -> dict[str, float]:
        """Returns tokens a round of chains on all eighths, by kind of prompt."""
        rounds, tokens = Counter[str](), Counter[str]()
        for counts, answers in self.parts:
            for answer in answers:
                drafts = acceptance.measure(
                    [(answer.tokens, answer.n_prompt)],
                    lambda places, answer=answer, counts=counts: [
                        self.chain(counts, answer.tokens[: at + 1], 8) for _, at in places
                    ],
                )
                rounds[answer.kind] += drafts.rounds
                tokens[answer.kind] += drafts.tokens
        return {kind: tokens[kind] / rounds[kind] for kind in rounds}


def rows_of(
    counts: Counts, probs: Probabilities, n_followers: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Returns the sorted rows of a table, and their probabilities."""
    rows = []
    for run in counts.counts:
        key = (*reversed(run), *[-1] * (MAX_RUN - len(run)))
        for token, group in counts.followers(run, n_followers):
            prob = probs.of(group)
            if prob >= MIN_PROB or group[2] == 0:
                rows.append((*key, -prob, token))
    rows.sort()
    found = [-row[MAX_RUN] for row in rows]
    return np.array([(*row[:MAX_RUN], row[-1]) for row in rows], np.int32), np.array(found)


def classes_of(probs: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Returns the class of each row and the mean probability of each class."""
    edges = np.quantile(np.unique(probs.round(2)), np.linspace(0, 1, N_CLASSES + 1)[1:-1])
    classes = np.searchsorted(edges, probs).astype(np.int8)
    means = [probs[classes == i].mean() if (classes == i).any() else 0.5 for i in range(N_CLASSES)]
    return classes, np.array(means, np.float32)


def write(
    path: Path, target: Path, rows: NDArray[Any], probs: NDArray[np.float64], name: str
) -> None:
    """Writes a table with the target's tokenizer; the file appears once it is complete."""
    part = path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(part, Arch.NGRAM)
    writer.add_name(name)
    for field in gguf.GGUFReader(target).fields.values():
        if field.name.startswith("tokenizer.ggml.") or field.name == Key.GENERAL_LICENSE:
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    classes, means = classes_of(probs)
    if rows.max(initial=0) < np.iinfo(np.uint16).max:
        rows = rows.astype(np.uint16).view(np.int16)  # -1 stays -1
    writer.add_tensor(Tensor.NGRAM_TOKENS, rows)
    writer.add_tensor(Tensor.NGRAM_CLASS, classes)
    writer.add_tensor(Tensor.NGRAM_PROB, means)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("answers", type=Path, nargs="+", metavar="ANSWERS.xz")
    parser.add_argument("--followers", type=int, default=2, help="most tokens of a run, 1 to 4")
    parser.add_argument("--limit", type=int, help="most tokens of answers")
    parser.add_argument("--name", default="n-gram table")
    args = parser.parse_args()
    if not 1 <= args.followers <= 4:
        parser.error(f"--followers is {args.followers}, must be 1 to 4")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit is {args.limit}, must be at least 1")
    return args


def check(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError for files that no table can be made from or written to."""
    for path in (args.target, *args.answers):
        check_file(path)
        if args.out.exists() and args.out.samefile(path):
            raise ValueError(f"OUT {args.out}: is an input too; name another file")
    check_output("OUT", args.out)


def run(args: argparse.Namespace) -> None:
    """Makes a table, and prints its acceptance on held-out answers."""
    check(args)
    with GgufMetadata(args.target) as metadata:
        n_vocab = len(metadata.texts(Key.TOKENIZER_TOKENS) or ())
    if not n_vocab:
        raise ValueError(f"{args.target}: has no tokenizer, without which a table fits no target")
    stored = {(x.index, x.turn): x for path in args.answers for x in pieces.load(path)}
    n_tokens, used = 0, []
    for key in sorted(stored):
        if args.limit is None or n_tokens < args.limit:
            used.append(stored[key])
            n_tokens += stored[key].n_answer
    if len(used) < N_PARTS:
        raise ValueError(f"{len(used)} answers; at least {N_PARTS} are needed")
    largest = max(max(x.tokens) for x in used)
    if largest >= n_vocab:
        raise ValueError(f"the answers have token {largest}, {args.target} has {n_vocab} tokens")
    probs = Probabilities(used, args.followers)
    rows, values = rows_of(Counts(used), probs, args.followers)
    write(args.out, args.target, rows, values, args.name)
    best = [group for group in probs.n_all if group[2] == 0]
    for size in range(1, MAX_RUN + 1):
        groups = [group for group in best if group[0] == size]
        n_all = sum(probs.n_all[group] for group in groups)
        n_right = sum(probs.n_right[group] for group in groups)
        print(f"longest known run of {size}: {n_all} tokens, {n_right / max(n_all, 1):.3f} right")
    for kind, tau in sorted(probs.taus().items()):
        print(f"tau of chains, {kind}: {tau:.3f}")
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: {n_tokens} tokens of answers, {len(rows)} rows, {size:.1f} MB")


def main() -> int:
    args = parse()
    return guarded(lambda: run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
