"""Measures what drafts by drafters of several shapes cost, in plain steps, and the tau they need.

    scripts/bench/drafter_cost.py TARGET.gguf [--seconds 50] [--layers 1 2 3] [--vocab 4096 8192 0]

TARGET has the shape of `smollm2` (synthetic_shapes.py). Drafters have random weights and a block of
16. A head of N tokens is that of a random target of the same shape with a vocabulary of N; 0 is the
whole vocabulary. Every measurement follows a pass of the target, so that no weights of the drafter
are left in a small cache. Prints the time that 1 of 5 measurements undercuts, divided by that of a
plain step, and by number of drafted tokens the tau at which rounds of a fixed length are 1, 1.5 and
2 times as fast as plain decoding: if all tokens are drafted at once, and (MTP) by as many drafts of
one token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from rounds import forced_round
from synthetic_gguf import write_model
from synthetic_shapes import PRESETS
from turns import facts, seconds_of

from dflash_gguf import native
from dflash_gguf.config import LoadConfig
from dflash_gguf.speculative.tree import Tree

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 15)
N_PROMPT = 256
N_COMMITTED = 3
"""Tokens a round whose keys and values the drafter computes."""
HOST = 0.05
"""Time of a round outside of the passes, in plain steps (figures.md)."""

Job = Callable[[], float]


class Bench:
    """Engines of one target and of random models of its shape."""

    def __init__(self, target: Path, folder: Path, n_threads: int | None) -> None:
        self._config = LoadConfig(n_ctx=2048, n_threads=n_threads, n_gpu_layers=0)
        self._folder = folder
        self._prompt = np.random.default_rng(0).integers(300, 4000, N_PROMPT).tolist()
        self._targets = {0: target}
        self._models: dict[int, native.Model] = {}
        self._plain = self._sequence(native.Engine(self._model(0)))
        self._start = self._plain.snapshot()

    def plain(self) -> float:
        """Returns the seconds of a plain step of the target."""
        self._plain.attach(self._start, N_PROMPT)
        return seconds_of(lambda: self._plain.decode(1000).argmax())

    def verify(self, n: int) -> Job:
        """Returns a measurement of a verify of n rows, with its commit."""

        def run() -> float:
            self._plain.attach(self._start, N_PROMPT)
            tree = Tree.of(list(range(1000, 1000 + n)))
            return seconds_of(lambda: forced_round(self._plain, tree, [-1]))

        return run

    def drafts(self, drafter: Path | None, n_vocab: int, layers: int, outtype: str) -> list[Job]:
        """Returns measurements of drafts of each length. drafter: None for one of random weights.

        n_vocab: tokens of the head; 0 for all.
        """
        if drafter is None:
            shape = replace(PRESETS["smollm2-dflash"], n_layer=layers)
            shape = replace(shape, n_vocab=n_vocab or shape.n_vocab)
            drafter = self._folder / f"drafter-{n_vocab}-{layers}-{outtype}.gguf"
            self._model(n_vocab)
            write_model(drafter, shape, "drafter", outtype, 1, self._targets[n_vocab])
        model = self._model(n_vocab)
        sequence = self._sequence(native.Engine(model, drafter=native.Drafter(str(drafter), model)))
        start = sequence.snapshot()

        def measure(n: int) -> Job:
            def run() -> float:
                sequence.attach(start, N_PROMPT)
                tree = Tree.of(list(range(1000, 1001 + max(n, N_COMMITTED))))
                forced_round(sequence, tree, [*tree.tokens[1:N_COMMITTED], -1])
                return seconds_of(lambda: sequence.draft(1000, n))

            return run

        return [measure(n) for n in LENGTHS]

    def _model(self, n_vocab: int) -> native.Model:
        if n_vocab not in self._targets:
            path = self._folder / f"target-{n_vocab}.gguf"
            write_model(path, replace(PRESETS["smollm2"], n_vocab=n_vocab), "target", "q8_0", 1)
            self._targets[n_vocab] = path
        if n_vocab not in self._models:
            self._models[n_vocab] = native.Model(str(self._targets[n_vocab]), self._config)
        return self._models[n_vocab]

    def _sequence(self, engine: native.Engine) -> native.Sequence:
        sequence = native.Sequence(engine)
        engine.reserve_verify(max(LENGTHS) + 1)
        sequence.prefill(self._prompt)
        return sequence


def show(name: str, row: Mapping[int, float]) -> None:
    """Prints a row of figures by number of rows or of drafted tokens."""
    print(f"{name:36} " + "  ".join(f"{n}: {x:.2f}" for n, x in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("--drafter", type=Path, metavar="DRAFTER.gguf", help="measure this too")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--types", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 8192, 0])
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.target, Path(folder), args.threads)
        jobs: dict[tuple[str, int], Job] = {("verify", n + 1): bench.verify(n + 1) for n in LENGTHS}
        given = [] if args.drafter is None else [(args.drafter, 0, 0, "given")]
        shapes = [(None, v, n, t) for v in args.vocab for n in args.layers for t in args.types]
        for drafter, n_vocab, layers, outtype in [*given, *shapes]:
            name = f"draft, {layers} layers, {outtype}, head {n_vocab}"
            found = bench.drafts(drafter, n_vocab, layers, outtype)
            jobs |= {(name, n): job for n, job in zip(LENGTHS, found, strict=True)}
        names, random = list(jobs), np.random.default_rng(1)
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        begun, plain, is_first = time.monotonic(), [], True
        while is_first or time.monotonic() - begun < args.seconds:
            for i in random.permutation(len(names)):
                try:
                    spent = jobs[names[i]]()
                except native.Error:  # longer than the given drafter's block
                    continue
                if not is_first:  # the first round builds graphs, so it does not count
                    seconds[names[i]].append(spent)
                    plain.append(bench.plain())
            is_first = False
    unit = float(np.quantile(plain, 0.2))
    costs = {name: float(np.quantile(values, 0.2)) / unit for name, values in seconds.items()}
    print(f"plain step {1e3 * unit:.2f} ms")
    table: dict[str, dict[int, float]] = defaultdict(dict)
    for name, n in names:
        if (name, n) in costs:
            table[name][n] = round(costs[name, n], 3)
    for name, row in table.items():
        show(name, row)
        if name == "verify":
            continue
        for form in ("at once", "step by step"):
            for gain in (1.0, 1.5, 2.0):
                drafting = {n: row[n] if form == "at once" else n * row[1] for n in row}
                taus = {n: gain * (table["verify"][n + 1] + drafting[n] + HOST) for n in row}
                show(f"  {form}: tau for {gain}", taus)
    print(json.dumps({**facts(), "plain_ms": 1e3 * unit, "costs": table}))


if __name__ == "__main__":
    main()
