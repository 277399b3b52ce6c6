"""Makes an n-gram table, a drafter without weights, from a target's answers.

    scripts/train/make_ngrams.py TARGET.gguf OUT.gguf ANSWERS.xz... [--followers 2] [--limit N]

ANSWERS.xz has answers as make_answers.py writes them. The table has the tokens that followed most
often after each run of 1 to 3 tokens. The probability of a row is the share of right tokens in its
group (length of the run, its occurrences, rank and share of the token), where each eighth of the
answers is compared with a table of the others. Prints the share of right first tokens by length of
the run and by kind of prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dflash_gguf.convert.schema import Arch, Key, Tensor
from numpy.typing import NDArray

from dflash_gguf._files import check_file, check_output
from dflash_gguf.cli.command import guarded
from dflash_gguf.text.gguf_metadata import GgufMetadata
from dflash_gguf.train import pieces

MAX_RUN, N_CLASSES, N_PARTS = 3, 12, 8
MIN_PROB = 0.03
"""Probability below which a token is left out of the table."""
N_BEST = 4
"""Most frequent tokens after a run that are candidates for its rows."""
N_SIZES, N_SHARES = 8, 9
"""Levels of the occurrences of a run (powers of 2) and of the share of a token in a group."""
BASE = 1 << 17
"""Factor that joins a number and a token id in one integer."""
N_AT_ONCE = 1 << 18
"""Tokens of answers that are compared at a time."""

Ints = NDArray[np.int64]


class Followers:
    """Counts of the tokens that follow the runs of one length, in each part of the answers."""

    def __init__(self, runs: Ints, tokens: Ints, parts: Ints) -> None:
        """Counts tokens; runs: number of the run before each token, from 1, or 0 for none."""
        is_run = runs > 0
        self._keys, pairs = np.unique((runs * BASE + tokens)[is_run], return_inverse=True)
        runs_of_pairs = self._keys // BASE
        # The last column has no counts: it leaves out no part.
        self._n_pair = np.zeros((len(self._keys), N_PARTS + 1), np.int64)
        np.add.at(self._n_pair, (pairs, parts[is_run]), 1)
        self._n_run = np.zeros((runs.max() + 1, N_PARTS + 1), np.int64)
        np.add.at(self._n_run, runs_of_pairs, self._n_pair)
        order = np.lexsort((-self._n_pair.sum(1), runs_of_pairs))
        ranks = np.arange(len(order)) - np.searchsorted(runs_of_pairs, runs_of_pairs)
        is_best = ranks < N_BEST
        self._best = np.full((len(self._n_run), N_BEST), -1)
        self._best[runs_of_pairs[is_best], ranks[is_best]] = self._keys[order][is_best] % BASE

    def ranked(self, runs: Ints, left_out: Ints, n: int) -> tuple[Ints, Ints]:
        """Returns the n most frequent tokens after runs, -1 for none, and their groups [runs, n].

        left_out: the part that is not counted for each run, or N_PARTS.
        """
        tokens = self._best[runs]
        keys = runs[:, None] * BASE + tokens
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        counts = self._n_pair[at].sum(-1) - self._n_pair[at, left_out[:, None]]
        counts[self._keys[at] != keys] = 0
        order = np.lexsort((tokens, -counts))[:, :n]
        tokens, counts = (np.take_along_axis(x, order, 1) for x in (tokens, counts))
        n_all = (self._n_run[runs].sum(-1) - self._n_run[runs, left_out])[:, None].clip(min=1)
        sizes = np.log2(n_all).astype(int).clip(max=N_SIZES - 1)
        groups = (sizes * n + np.arange(n)) * N_SHARES + (N_SHARES - 1) * counts // n_all
        return np.where(counts > 0, tokens, -1), groups


class Table:
    """The tokens that follow each run of up to MAX_RUN tokens in answers, and their accuracy.

    The answers are dealt to N_PARTS parts, each of which a table of the others predicts.
    """

    def __init__(self, answers: Sequence[pieces.StoredAnswer], n_followers: int) -> None:
        self.n = n_followers
        before = [-1] * MAX_RUN
        tokens = np.concatenate([[*before, *x.tokens] for x in answers])
        lengths = np.array([x.n_answer for x in answers])
        ends = np.cumsum([MAX_RUN + len(x.tokens) for x in answers])
        places = np.arange(lengths.sum()) + np.repeat(ends - np.cumsum(lengths), lengths)
        self.next = tokens[places]
        self.kinds = np.repeat([pieces.KINDS.index(x.kind) for x in answers], lengths)
        parts = np.repeat(np.arange(len(answers)) % N_PARTS, lengths)
        runs, self.followers = np.zeros_like(places), []
        self.runs = [np.zeros((1, 0), np.int64)]
        """Runs [n, length] of each length, the last token first; number 0 stands for none."""
        shorter = [runs]
        for size in range(1, MAX_RUN + 1):
            token = tokens[places - size]
            is_run = (token >= 0) & ((runs > 0) | (size == 1))
            if not is_run.any():
                break
            keys, found = np.unique((runs * BASE + token)[is_run], return_inverse=True)
            known = np.column_stack([self.runs[-1][keys // BASE], keys % BASE])
            self.runs.append(np.vstack([np.full((1, size), -1), known]))
            runs = np.zeros_like(runs)
            runs[is_run] = found + 1
            shorter.append(runs)
            self.followers.append(Followers(runs, self.next, parts))
        self._measure(shorter, parts)

    def _measure(self, runs: Sequence[Ints], parts: Ints) -> None:
        """Counts right tokens by length of the longest known run, and by group."""
        shape = (MAX_RUN + 1, N_SIZES * self.n * N_SHARES)
        self.n_all, self.n_right = np.zeros(shape), np.zeros(shape)
        self.lengths = np.zeros_like(parts)
        self.is_right = np.zeros(len(parts), bool)
        for chosen in np.array_split(np.arange(len(parts)), len(parts) // N_AT_ONCE + 1):
            tokens = np.full((len(chosen), self.n), -1)
            groups, lengths = np.zeros_like(tokens), np.zeros(len(chosen), int)
            for size, followers in enumerate(self.followers, 1):
                found = followers.ranked(runs[size][chosen], parts[chosen], self.n)
                is_known = found[0][:, 0] >= 0
                tokens[is_known], groups[is_known] = (x[is_known] for x in found)
                lengths[is_known] = size
            is_right = tokens == self.next[chosen, None]
            places = np.broadcast_to(lengths[:, None], tokens.shape)
            np.add.at(self.n_all, (places, groups), tokens >= 0)
            np.add.at(self.n_right, (places, groups), is_right)
            self.lengths[chosen], self.is_right[chosen] = lengths, is_right[:, 0]

    def rows(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Returns the sorted rows of the table's file, and their probabilities."""
        # A group of few tokens has a probability near 0.2.
        probs = (self.n_right + 0.3) / (self.n_all + 1.5)
        rows, found = [], []
        for size, followers in enumerate(self.followers, 1):
            runs = np.arange(1, len(self.runs[size]))
            tokens, groups = followers.ranked(runs, np.full_like(runs, N_PARTS), self.n)
            ends = np.full((len(runs), MAX_RUN - size), -1)
            for rank in range(self.n):
                prob = probs[size, groups[:, rank]]
                is_row = (tokens[:, rank] >= 0) & ((prob >= MIN_PROB) | (rank == 0))
                columns = [self.runs[size][1:], ends, tokens[:, rank]]
                rows.append(np.column_stack(columns)[is_row])
                found.append(prob[is_row])
        table, values = np.concatenate(rows), np.concatenate(found)
        order = np.lexsort((table[:, -1], -values, *table[:, MAX_RUN - 1 :: -1].T))
        return table[order].astype(np.int32), values[order]


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
    table = Table(used, args.followers)
    rows, values = table.rows()
    write(args.out, args.target, rows, values, args.name)
    shown = {f"longest known run of {x}": table.lengths == x for x in range(1, MAX_RUN + 1)}
    shown |= {kind: table.kinds == number for number, kind in enumerate(pieces.KINDS)}
    for name, chosen in shown.items():
        if chosen.any():
            print(f"{name}: {chosen.sum()} tokens, {table.is_right[chosen].mean():.3f} right")
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: {n_tokens} tokens of answers, {len(rows)} rows, {size:.1f} MB")


def main() -> int:
    args = parse()
    return guarded(lambda: run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
