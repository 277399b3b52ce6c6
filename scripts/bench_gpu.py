"""All that is measured on a graphics card, in one call that prints JSON lines as it goes.

    scripts/bench_gpu.py --backend-module libggml-cuda.so [--tools FOLDER] [--parts device,sweep...]
    scripts/bench_gpu.py --device CPU --quick     tries the script without a card

Parts, in this order; each runs in a process and under a time limit of its own, so that one that
fails or hangs costs only itself and leaves one line with its error:

files    random models of true shape (Qwen3.5-27B at Q4_K_M, a drafter of five layers), written
         while the next two run
device   name, memory, what the driver takes, bandwidth of a large copy
correct  small float32 models of every architecture, on the device and on the CPU: logits, chains,
         trees with cousins told apart, drafts, the law. correct-no-tf32, correct-no-graphs: again
         with NVIDIA_TF32_OVERRIDE=0, and without captured graphs
plain    decoding beside llama.cpp
chain    rounds of equal work beside llama.cpp's draft-dflash
sweep    plain, chains and trees of every size at published acceptance, each against the limit of
         its bytes; host time, captured graphs
memory   131072 tokens with q4_0 K/V, filled: plan, allocation, rounds there
prefill  1K, 8K and 32K tokens beside llama.cpp

docs/gpu.md explains the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_gguf.convert.errors import ConvertError
from gpu import agreement, beside, facts, files, memory, sweep
from gpu.child import Child
from gpu.setting import Figures, Setting, add_arguments

from dflash_gguf import core
from dflash_gguf.bench import plot


@dataclass(frozen=True, slots=True)
class Part:
    """limit_s: seconds it may take. needs_files: whether the pair must be there."""

    measure: Callable[[Setting], Iterator[Figures]]
    limit_s: float
    needs_files: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = {
    "files": Part(files.measure, 150, needs_files=False),
    "device": Part(facts.measure, 40, needs_files=False),
    "correct": Part(agreement.measure, 90, needs_files=False),
    "plain": Part(beside.plain, 80),
    "chain": Part(beside.chain, 100),
    "sweep": Part(sweep.measure, 80),
    "memory": Part(memory.measure, 200),
    "prefill": Part(beside.prefill, 100),
    "correct-no-tf32": Part(
        agreement.measure, 60, needs_files=False, environment={"NVIDIA_TF32_OVERRIDE": "0"}
    ),
    "correct-no-graphs": Part(
        agreement.measure, 60, needs_files=False, environment={"GGML_CUDA_DISABLE_GRAPHS": "1"}
    ),
}
BACKGROUND = "files"
LIMIT = 470.0
"""Seconds of all parts together. A longer one lengthens each part's own."""


def run_here(name: str, setting: Setting) -> None:
    """One part, in this process."""
    try:
        for figures in PARTS[name].measure(setting):
            print(json.dumps({"part": name, **figures}), flush=True)
    except (core.Error, ConvertError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


class Run:
    """All parts that were asked for."""

    def __init__(self, args: argparse.Namespace, arguments: list[str]) -> None:
        """arguments: of the command line, for the processes of the parts."""
        self._args = args
        self._arguments = arguments
        self._end = time.monotonic() + args.limit
        self._out = open(args.out, "a", encoding="utf-8") if args.out else None  # noqa: SIM115
        self._files: Child | None = None
        self._curve: list[Figures] = []

    def all(self) -> None:
        """Runs them and prints what each found."""
        names = [name for name in PARTS if name in self._args.parts]
        if BACKGROUND in names:
            self._files = self._start(BACKGROUND)
        for name in names:
            if name == BACKGROUND:
                continue
            if PARTS[name].needs_files:
                self._await_files()
            self._finish(name, self._start(name))
        self._await_files()
        if self._curve and self._args.plot is not None:
            sweep.draw_curve(self._curve, self._args.plot, self._args.title)

    def _start(self, name: str) -> Child:
        command = [sys.executable, __file__, *self._arguments, "--child", name]
        left = self._end - time.monotonic()
        longer = max(1.0, self._args.limit / LIMIT)
        limit_s = min(PARTS[name].limit_s * longer, left)
        return Child(command, os.environ | PARTS[name].environment, limit_s)

    def _finish(self, name: str, child: Child) -> None:
        for line in child.lines():
            self._print(line)
            if name == "sweep":
                self._curve.append(json.loads(line))
        end: Figures = {"part": name, "seconds_in_all": round(child.seconds, 1)}
        if child.error is not None:
            end["error"] = child.error
        self._print(json.dumps(end))

    def _await_files(self) -> None:
        if self._files is not None:
            child, self._files = self._files, None
            self._finish(BACKGROUND, child)

    def _print(self, line: str) -> None:
        print(line, flush=True)
        if self._out is not None:
            self._out.write(line + "\n")
            self._out.flush()


def part_names(text: str) -> list[str]:
    """An argument like "device,correct"."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise argparse.ArgumentTypeError(f"{name!r} is no part, the parts are {known}")
    return names


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--parts", type=part_names, default=list(PARTS), help="default: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the lines go there as well")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="an image of the sweep")
    parser.add_argument("--title", default="27B", help="of the image; default: %(default)s")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot is not None:
        try:
            plot.require()
        except ValueError as error:
            parser.error(str(error))
    if args.child is not None:
        run_here(args.child, Setting.of(args))
    else:
        Run(args, sys.argv[1:]).all()


if __name__ == "__main__":
    main()
