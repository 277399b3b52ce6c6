"""Checks batch invariance: logits must not depend on the pass that computes them.

    same_bits.py                      # every pair of factors, as the tests run: minutes
    same_bits.py --triples            # every triple of factors: half an hour
    same_bits.py --table              # all weights, K/V, kinds, threads, prefixes: an hour
    same_bits.py --all                # the whole product: days; --part 3/10 runs a tenth
    same_bits.py --all --weights q4_K --kv q8_0/q8_0 --threads 2 --prefix 600
    same_bits.py --long               # some contexts of 33,000 tokens

A case is a random model (architecture and weight type of small_models.py), types of K and V, a
number of tokens before the work, a number of threads, repacked weights or not, and a kind of work:

    chains   verifies of 2 to 64 rows, some of which are committed
    trees    verifies of trees of 2 to 64 nodes, with one path committed
    prefill  the prompt cut at random positions
    resumed  cached prefixes attached after other tokens

With --table a case has all four kinds of work, shorter, with one text and one tree per prefix.
Plain decoding on one thread gives the expected rows, which are compared bit by bit. Prints the
number of different rows of each differing case with the largest difference (divided by the range of
the logits), then one JSON object. The exit status is 1 if any row differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_gguf.native import (
    CACHE_TYPES,
    Engine,
    LoadConfig,
    Model,
    Prefix,
    Sequence,
)

sys.path += [
    str(Path(__file__).resolve().parents[2] / x) for x in ("tests/support", "scripts/bench")
]
from covering import covering
from small_models import N_VOCAB, ONE_HEAD, SHAPES, UNEVEN, WEIGHT_TYPES, write_small
from trees import bushy, comb, path_to, scattered, star, tokens_for

Row = NDArray[np.float32]

MIXED = ("f16/q8_0", "q8_0/q4_0", "f32/f16")
WORKS = ("chains", "trees", "prefill", "resumed")
FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": (*SHAPES, *UNEVEN),
    "weights": WEIGHT_TYPES,
    "kv": (*(f"{name}/{name}" for name in CACHE_TYPES), *MIXED),
    "prefix": (0, 100, 600, 2040),
    "threads": (1, 2, 3, 4),
    "work": WORKS,
    "repack": (True, False),
}
LONG = 33_000
LONG_PREFIX = 1000
"""Longest prefix in tokens that the reference decodes step by step; longer ones are prefilled."""
N_AFTER = 300
"""Number of tokens that a case may use after its prefix."""
WIDTHS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 48, 63, 64)
"""Rows of verifies. Each case runs 2, 64, and some of the others."""
N_WIDTHS = 5
N_TREES = 4
N_WALK = 6
TABLE_PREFIXES = (0, 100, 600)
ALL_WORKS = "chains, trees, prefill, resumed"
"""Kind of work of --table."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    weights: str
    kv: str
    prefix: int
    threads: int
    work: str
    repack: bool

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self).encode())

    def __str__(self) -> str:
        options = {name: getattr(self, name) for name in FACTORS} | {"repack": int(self.repack)}
        return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in options.items())


def is_possible(chosen: Mapping[str, Any]) -> bool:
    """True if these factors can be combined: quantised keys need whole blocks per head."""
    heads_of_40 = str(chosen.get("kind")).endswith("heads of 40")
    return not heads_of_40 or set(chosen.get("kv", "f16/f16").split("/")) <= {"f32", "f16", "bf16"}


def covering_cases(strength: int = 2) -> list[Case]:
    """Returns cases in which every pair (strength 2) or triple (3) of factor values occurs."""
    return [Case(**row) for row in covering(FACTORS, is_possible, strength=strength)]


def long_cases() -> list[Case]:
    one, hybrid = ONE_HEAD
    rows = (
        (one, "q4_0", "f16/f16", 1, "chains"),
        (one, "q8_0", "q8_0/q8_0", 2, "prefill"),
        (hybrid, "f32", "f16/f16", 2, "trees"),
        (one, "q4_K", "bf16/bf16", 2, "resumed"),
    )
    return [Case(k, w, kv, LONG, threads, work, True) for k, w, kv, threads, work in rows]


@dataclass
class Found:
    n_rows: int = 0
    n_different: int = 0
    worst: float = 0.0
    first: str = ""

    def compare(self, row: Row, expected: Row, what: str) -> None:
        self.n_rows += 1
        if row.tobytes() == expected.tobytes():
            return
        self.n_different += 1
        self.worst = max(self.worst, float(np.abs(row - expected).max() / np.ptp(expected)))
        self.first = self.first or what

    def __str__(self) -> str:
        sentence = f"{self.n_different} of {self.n_rows} rows"
        if self.n_different:
            sentence += f", {self.worst:.1e} of the range, first {self.first}"
        return sentence


class Models:
    """Model files in a folder, each written once, and the last reference."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reference: tuple[tuple[Any, ...], Reference] | None = None

    def load(self, case: Case, n_threads: int) -> Sequence:
        path = self._folder / f"{case.kind}-{case.weights}.gguf"
        if not path.exists():
            write_small(path, case.kind, case.weights)
        k, v = case.kv.split("/")
        config = LoadConfig(
            n_ctx=case.prefix + 2 * N_AFTER + max(WIDTHS),  # room for copied rows of the prefix
            n_threads=n_threads,
            n_gpu_layers=0,
            cache_type_k=k,
            cache_type_v=v,
            repack=case.repack,
            # Micro-batches cut a prefill at other positions than the caller.
            n_ubatch=(512, 96)[case.seed % 2],
        )
        return Sequence(Engine(Model(str(path), config)))

    def reference(self, case: Case) -> Reference:
        """Returns plain decoding of the case's text, cached for the next case."""
        key = (case.kind, case.weights, case.kv, case.repack, case.prefix)
        if self._reference is None or self._reference[0] != key:
            self._reference = key, Reference(self.load(case, 1), case.prefix)
        return self._reference[1]


class Reference:
    """Rows of plain decoding of a fixed text, computed on demand; a long prefix is prefilled."""

    def __init__(self, sequence: Sequence, prefix: int) -> None:
        self.sequence = sequence
        n = sequence.n_ctx
        random = np.random.default_rng(prefix)
        self.tokens: list[int] = random.integers(0, N_VOCAB, n).tolist()
        self.base = max(0, prefix - N_AFTER) if prefix > LONG_PREFIX else 0
        self._rows: list[Row] = []
        if self.base:
            sequence.prefill(self.tokens[: self.base])

    def row(self, position: int) -> Row:
        """Returns the logits after the token at `position`, which is at least `base`."""
        while self.base + len(self._rows) <= position:
            self._rows.append(
                self.sequence.decode(self.tokens[self.base + len(self._rows)]).logits()
            )
            assert np.isfinite(self._rows[-1]).all()
            assert np.ptp(self._rows[-1]) > 0
        return self._rows[position - self.base]


@dataclass(frozen=True, slots=True)
class Tree:
    """A verify tree with its expected rows, a path to commit, and the row of a token after it."""

    tokens: list[int]
    parents: list[int]
    rows: dict[int, Row]
    path: list[int]
    token: int
    after: Row


class Column:
    """Cases of --table that differ only in threads and prefix, with their expected rows."""

    def __init__(self, first: Case, models: Models) -> None:
        self._models = models
        self._longest = replace(first, prefix=max(TABLE_PREFIXES))
        self._reference = models.reference(self._longest)
        self._plain = models.load(self._longest, 1)
        self._start: Prefix | None = None
        self._trees: dict[int, Tree] = {}

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Found]]:
        for threads in {case.threads: None for case in cases}:
            found = Found()
            with_threads = replace(self._longest, threads=threads)
            random = np.random.default_rng(with_threads.seed)
            work = Work(with_threads, self._reference, self._models, found, random)
            for case in sorted(cases, key=lambda case: case.prefix):
                if case.threads == threads:
                    work.case, work.found = case, Found()
                    work.all_in_short(self._tree(case))
                    yield case, work.found

    def _tree(self, case: Case) -> Tree:
        """Returns the tree of the case's prefix, the same for all numbers of threads."""
        if case.prefix not in self._trees:
            random = np.random.default_rng(case.prefix)
            plain, n = self._plain, int(random.choice(WIDTHS[3:]))
            go_back(plain, self._start)
            for token in self._reference.tokens[plain.position : case.prefix]:
                plain.decode(token)
            self._start = start = take(plain)
            parents = scattered(n, random)
            tokens = [
                self._reference.tokens[case.prefix],
                *tokens_for(parents, random, N_VOCAB)[1:],
            ]
            rows = rows_of_paths(plain, start, tokens, parents)
            path, token = path_to(parents, int(random.integers(n))), int(random.integers(N_VOCAB))
            go_back(plain, start)
            for node in path:
                plain.decode(tokens[node])
            after = plain.decode(token).logits()
            self._trees[case.prefix] = Tree(tokens, parents, rows, path, token, after)
        return self._trees[case.prefix]


def take(sequence: Sequence) -> Prefix | None:
    """Returns a snapshot of a sequence, or None if the sequence is empty."""
    return sequence.snapshot() if sequence.position else None


def go_back(sequence: Sequence, prefix: Prefix | None) -> None:
    if prefix is None:
        sequence.reset()
    else:
        sequence.attach(prefix, prefix.n_tokens)


def rows_of_paths(
    plain: Sequence, start: Prefix | None, tokens: list[int], parents: list[int]
) -> dict[int, Row]:
    """Returns each node's expected row, by plain decoding of the path to the node."""
    rows: dict[int, Row] = {}
    for leaf in sorted(set(range(len(tokens))) - set(parents)):
        go_back(plain, start)
        for node in path_to(parents, leaf):
            row = plain.decode(tokens[node]).logits()
            rows.setdefault(node, row)
    return rows


def run_table(cases: list[Case], models: Models) -> Iterator[tuple[Case, Found]]:
    for _, column in groupby(cases, key=lambda x: (x.kind, x.weights, x.kv)):
        chosen = list(column)
        yield from Column(chosen[0], models).run(chosen)


def run_case(case: Case, models: Models) -> Found:
    found = Found()
    reference = models.reference(case)
    work = Work(case, reference, models, found, np.random.default_rng(case.seed))
    getattr(work, case.work)()
    assert found.n_rows
    return found


@dataclass
class Work:
    """A case in progress: a sequence with the case's threads, compared with the reference."""

    case: Case
    reference: Reference
    models: Models
    found: Found
    random: np.random.Generator
    sequence: Sequence = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = self.models.load(self.case, self.case.threads)
        self.sequence.engine.reserve_verify(max(WIDTHS))
        self._divides = self.sequence.engine.partial_prefix_ok
        self.kept: Prefix | None = None
        self.tokens = self.reference.tokens

    def begin(self) -> None:
        """Decodes the prefix token by token, so that only the work can differ."""
        if self.reference.base:
            self.sequence.prefill(self.tokens[: self.reference.base])
        for position in range(self.reference.base, self.case.prefix):
            self.decode(position)

    def decode(self, position: int) -> None:
        row = self.sequence.decode(self.tokens[position]).logits()
        self.found.compare(row, self.reference.row(position), f"decoding at {position}")

    def append(self, start: int, end: int, what: str) -> None:
        """Prefills tokens [start, end) and compares all rows or the last."""
        if self.random.random() < 0.5:
            rows, first = list(self.sequence.logits(self.tokens[start:end])), start
        else:
            rows, first = [self.sequence.prefill(self.tokens[start:end]).logits()], end - 1
        for position, row in enumerate(rows, first):
            if position >= self.reference.base:
                sentence = f"{what} of {end - start} tokens from {start}, row {position}"
                self.found.compare(row, self.reference.row(position), sentence)

    def chains(self) -> None:
        """Runs verifies of several widths; rejected tokens are verified again by the next."""
        self.begin()
        at = self.case.prefix
        widths = [*self.random.permutation(WIDTHS[1:-1])[: N_WIDTHS - 2].tolist(), 2, 64]
        for n in self.random.permutation(widths).tolist():
            at += self._chain(at, n)
            self.decode(at)
            at += 1

    def _chain(self, at: int, n: int) -> int:
        """Verifies n rows, commits some, and returns the number of committed rows."""
        rows = self.sequence.verify(self.tokens[at : at + n])
        for i in range(n):
            expected = self.reference.row(at + i)
            self.found.compare(rows.logits(i), expected, f"row {i} of {n} after {at}")
        n_kept = int(self.random.integers(1, min(n, 32) + 1))
        self.sequence.commit(n_kept)
        return n_kept

    def trees(self) -> None:
        """Runs verifies of trees; a plain sequence decodes every path from a snapshot."""
        self.begin()
        plain = self.models.load(self.case, 1)
        expected_root = self.reference.row(self.case.prefix)
        start = self._same_prefix(plain)
        root = self.tokens[self.case.prefix]
        for number in range(N_TREES):
            n = int(self.random.choice(WIDTHS[1:]))
            shape = (star, comb, bushy)[number] if number < 3 else None
            parents = shape(n) if shape else scattered(n, self.random)
            tokens = [root, *tokens_for(parents, self.random, N_VOCAB)[1:]]
            rows = self.sequence.verify_tree(tokens, parents)
            at = self.sequence.position
            expected = rows_of_paths(plain, start, tokens, parents)
            if number == 0:
                self.found.compare(expected[0], expected_root, "a snapshot of the reference")
            for node in range(n):
                what = f"node {node} of {n} after {at}, parents {parents}"
                self.found.compare(rows.logits(node), expected[node], what)
            path = path_to(parents, int(self.random.integers(n)))
            self.sequence.commit_path(path)
            go_back(plain, start)
            for node in path:
                plain.decode(tokens[node])
            token, root = (int(x) for x in self.random.integers(0, N_VOCAB, 2))
            after = [x.decode(token).logits() for x in (self.sequence, plain)]
            self.found.compare(*after, f"a step after a path of {len(path)} of {n} after {at}")
            start = take(plain)

    def _same_prefix(self, plain: Sequence) -> Prefix | None:
        if self.reference.base:
            plain.prefill(self.tokens[: self.reference.base])
        for token in self.tokens[self.reference.base : self.case.prefix]:
            plain.decode(token)
        return take(plain)

    def prefill(self) -> None:
        """Prefills text cut at random positions, then decodes and verifies."""
        end = self.case.prefix + N_AFTER // 2
        n_cuts = int(self.random.integers(1, 7))
        cuts = sorted({int(x) for x in self.random.integers(1, end, n_cuts)})
        for start, stop in zip([0, *cuts], [*cuts, end], strict=True):
            self.append(start, stop, "a prefill")
        for position in range(end, end + 3):
            self.decode(position)
        rows = self.sequence.verify(self.tokens[end + 3 : end + 12])
        for i in range(9):
            what = f"row {i} of 9 after the prefill"
            self.found.compare(rows.logits(i), self.reference.row(end + 3 + i), what)

    def all_in_short(self, tree: Tree) -> None:
        """Runs all kinds of work: prefill after a cached prefix, chains, a tree."""
        prefix = self.case.prefix
        self._leave()
        self._to_prefix()
        at = prefix
        for n in (2, int(self.random.choice(WIDTHS[1:-1])), 64):
            at += self._chain(at, n)
        self.decode(at)
        self._to_prefix()
        rows = self.sequence.verify_tree(tree.tokens, tree.parents)
        for node, expected in tree.rows.items():
            what = f"node {node} after {prefix}, parents {tree.parents}"
            self.found.compare(rows.logits(node), expected, what)
        self.sequence.commit_path(tree.path)
        row = self.sequence.decode(tree.token).logits()
        self.found.compare(row, tree.after, f"a step after a path of {len(tree.path)}")

    def _to_prefix(self) -> None:
        start = self._begin(self.case.prefix)
        n = int(self.random.integers(4))
        cuts = {int(x) for x in self.random.integers(start, self.case.prefix + 1, n)}
        ends = sorted({start, *cuts, self.case.prefix})
        for begin, end in pairwise(ends):
            self.append(begin, end, "a prefill")
            if self.random.random() < 0.5:
                self._keep()

    def resumed(self) -> None:
        """Appends other tokens and returns to the text, by older snapshots and in place."""
        end = self.case.prefix + 1
        self.append(0, end, "a prefill")
        self._keep()
        for number in range(N_WALK):
            way = number if number < 2 else int(self.random.integers(2))
            end = self._in_place(end) if way else self._by_prefix()

    def _leave(self) -> None:
        """Appends tokens that are not in the text, by a random kind of pass."""
        strange = self.random.integers(0, N_VOCAB, self.random.integers(1, 24)).tolist()
        way = self.random.integers(3)
        if way == 0:
            self.sequence.prefill(strange)
        elif way == 1:
            self.sequence.verify(strange)
            self.sequence.commit(int(self.random.integers(len(strange) + 1)))
        else:
            for token in strange[:4]:
                self.sequence.decode(token)

    def _place(self) -> int:
        """Returns a random position near the end of the prefix."""
        prefix = self.case.prefix
        return int(self.random.integers(max(self.reference.base, prefix - 60), prefix + 80)) + 1

    def _keep(self) -> None:
        self.kept = self.sequence.snapshot()

    def _begin(self, most: int) -> int:
        """Attaches at most `most` tokens of the snapshot, if any, and returns the position.

        At random the sequence is reset first, or the snapshot is moved to host memory.
        """
        n = min(self.kept.n_tokens, most) if self.kept else 0
        is_of_use = n > 0 and (self._divides or n == self.kept.n_tokens)
        holds = is_of_use and self.sequence.tokens[:n].tolist() == list(self.tokens[:n])
        if not holds or self.random.random() < 0.5:
            self.sequence.reset()
        if self.kept and (not is_of_use or self.random.random() < 0.3):
            self.sequence.engine.offload(self.sequence.engine.n_ctx, 1 << 40)
        if is_of_use:
            self.sequence.attach(self.kept, n)
        return self.sequence.position

    def _by_prefix(self) -> int:
        self._leave()
        end = self._place()
        start = self._begin(end - 1)
        for begin, stop in pairwise(sorted({start, (start + end) // 2, end})):
            self.append(begin, stop, f"after a prefix of {start}, a prefill")
            if self.random.random() < 0.3:
                self._keep()
        return end

    def _in_place(self, end: int) -> int:
        kept = self.sequence.snapshot()
        for _ in range(2):
            self._leave()
            self.sequence.attach(kept, end)
        start = min(end, self._place()) if self._divides else end
        self.sequence.attach(kept, start)
        stop = start + int(self.random.integers(1, 24))
        self.append(start, stop, "after a way back in place, a prefill")
        return stop


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    if args.all or args.long or args.table:
        factors = FACTORS | ({"prefix": (LONG,)} if args.long and args.all else {})
        if args.table:
            factors |= {"prefix": TABLE_PREFIXES, "work": (ALL_WORKS,), "repack": (True,)}
        cases = [Case(**dict(zip(factors, row, strict=True))) for row in product(*factors.values())]
        cases = [case for case in cases if is_possible({n: getattr(case, n) for n in FACTORS})]
        if args.long and not args.all and not args.table:
            cases = long_cases()
    else:
        cases = covering_cases(3 if args.triples else 2)
    for name in FACTORS:
        wanted = getattr(args, name)
        if wanted:
            cases = [case for case in cases if str(getattr(case, name)) in wanted]
    part, n_parts = (int(x) for x in args.part.split("/"))
    cases.sort(key=lambda x: (x.kind, x.weights, x.kv, x.repack, x.prefix))
    if args.table:
        columns = {(x.kind, x.weights, x.kv): None for x in cases}
        chosen = set(list(columns)[part - 1 :: n_parts])
        return [x for x in cases if (x.kind, x.weights, x.kv) in chosen]
    return cases[part - 1 :: n_parts]


def by_value(differing: Mapping[Case, Found], cases: list[Case]) -> Iterator[str]:
    """Yields, for each factor, the number of differing cases by value, to show common factors."""
    for name in FACTORS:
        values = sorted({getattr(case, name) for case in cases})
        n = Counter(getattr(case, name) for case in cases)
        bad = Counter(getattr(case, name) for case in differing)
        counts = [f"{value}: {bad[value]} of {n[value]}" for value in values]
        yield f"{name:8} {', '.join(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare logits of all kinds of passes with plain decoding"
    )
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--table", action="store_true", help="every cell of the table")
    parser.add_argument("--triples", action="store_true", help="every three values at least once")
    parser.add_argument("--long", action="store_true", help=f"prefixes of {LONG} tokens")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th case, from I on")
    for name, values in FACTORS.items():
        names = [str(int(x)) if isinstance(x, bool) else str(x) for x in values]
        parser.add_argument(f"--{name}", nargs="+", metavar="VALUE", help=f"of {', '.join(names)}")
    args = parser.parse_args()
    if args.repack:
        args.repack = [str(x == "1") for x in args.repack]
    cases = chosen_cases(args)
    if not cases:
        sys.exit("error: no case has these values")
    differing: dict[Case, Found] = {}
    n_rows = 0
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        each = ((case, run_case(case, models)) for case in cases)
        for case, found in run_table(cases, models) if args.table else each:
            n_rows += found.n_rows
            if found.n_different:
                differing[case] = found
                print(f"{found}: {case}", flush=True)
    if differing:
        print(*by_value(differing, cases), sep="\n")
    facts = {"cases": len(cases), "differing": len(differing), "rows": n_rows}
    facts["differing_rows"] = sum(found.n_different for found in differing.values())
    print(json.dumps(facts))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
