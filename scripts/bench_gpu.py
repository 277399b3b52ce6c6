"""Measures speed, memory and correctness on a GPU, in one call that prints JSON lines.

    scripts/bench_gpu.py --build cuda [--folder FOLDER] [--parts device,sweep...]
    scripts/bench_gpu.py --backend-module libggml-cuda.so
    scripts/bench_gpu.py --backend-module libggml-cuda.so --null-gpu 86     host time, without a GPU
    scripts/bench_gpu.py --device CPU --quick                               tries the script

First prepares, in parallel, missing files: `build`, the backend of the GPU (--build); `tools`,
peer-rounds, a program with llama.cpp's drafting loop; `files`, random models with the shapes of
Qwen3.5-27B at Q4_K_M and a drafter of 5 layers. Then runs each part in a process of its own, which
gets a share of the seconds of --limit:

device   name, memory, memory that the driver takes, bandwidth of a large copy
ptx      kernels that tests run in an interpreter: their results there and on the GPU
correct  logits and drafted answers of small float32 models, compared with the CPU
chain    drafting rounds beside llama.cpp's draft-dflash; both draft, verify and accept as much
plain    decoding beside llama.cpp
sweep    plain steps, chains and trees of many sizes at published acceptance: time and bandwidth
memory   131072 tokens with q4_0 K/V: memory plan, allocated memory, rounds at that position
prefill  1K, 8K and 32K tokens beside llama.cpp
correct-no-tf32, correct-no-graphs   `correct` with NVIDIA_TF32_OVERRIDE=0; without captured graphs

The lines of a part that fails or hangs are kept; its last line has the error. The fields are
explained in docs/develop/measuring.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dflash_gguf._files import appending, check_output, message_of
from dflash_gguf.bench import plot

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from gpu import beside, built, facts, files, memory, null_gpu, sweep
from gpu.budget import LEAST_S, share
from gpu.child import Child, report
from gpu.setting import Figures, Setting, add_arguments

EXHAUSTIVE = Path(__file__).resolve().parents[1] / "tests" / "exhaustive"
AGREEMENT = EXHAUSTIVE / "agreement.py"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the GPU measurement; it runs in a process of its own.

    measure: a generator function, or a script that takes the same arguments. weight: seconds on an
    H200 with a margin, by which parts divide --limit; 0: whatever time is left. needs: names of
    preparations to wait for.
    """

    measure: Callable[[Setting], Iterator[Figures]] | Path
    weight: float
    needs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


BACKGROUND: Mapping[str, Callable[[Setting], Iterator[Figures]]] = {
    "build": built.module,
    "tools": built.tools,
    "files": files.measure,
}
PARTS = {
    "device": Part(facts.measure, 8),
    "ptx": Part(EXHAUSTIVE / "kernels.py", 90),
    "correct": Part(AGREEMENT, 20),
    "chain": Part(beside.chain, 60, needs=("files", "tools")),
    "plain": Part(beside.plain, 30, needs=("files",)),
    "sweep": Part(sweep.measure, 45, needs=("files",)),
    "memory": Part(memory.measure, 100, needs=("files",)),
    "prefill": Part(beside.prefill, 60, needs=("files",)),
    "correct-no-tf32": Part(AGREEMENT, 0, environment={"NVIDIA_TF32_OVERRIDE": "0"}),
    "correct-no-graphs": Part(AGREEMENT, 0, environment={"GGML_CUDA_DISABLE_GRAPHS": "1"}),
}
"""Measurements in order of importance: the last ones do not run if no time is left."""
OPTIONS = {"module": "--backend-module", "folder": "--tools"}
"""Results that a build prints as JSON fields, and the options that pass them to measurements."""
LIMIT = 610.0
"""Default of --limit: seconds of the whole GPU measurement, builds and files included."""


def run_here(name: str, setting: Setting) -> None:
    """Runs one part of the GPU measurement in this process and prints its JSON lines."""
    measure = BACKGROUND[name] if name in BACKGROUND else PARTS[name].measure
    assert not isinstance(measure, Path)
    report(name, measure(setting))


class Run:
    """Runs the requested parts of the GPU measurement, each in a child process."""

    def __init__(
        self, args: argparse.Namespace, arguments: list[str], out: BinaryIO | None
    ) -> None:
        """arguments: the command line, also for all child processes. out: the file of --out."""
        self._args = args
        self._arguments = list(arguments)
        self._end = time.monotonic() + args.limit
        self._environment = _environment(args)
        self._out = out
        self._background: dict[str, Child] = {}
        self._curve: list[Figures] = []

    def all(self) -> None:
        """Runs all parts, printing their JSON lines. SystemExit if the backend cannot be built."""
        names = [name for name in PARTS if name in self._args.parts]
        needed = {name for part in names for name in PARTS[part].needs}
        if self._args.build is not None:
            needed.add("build")
        try:
            for name in BACKGROUND:
                if name in needed:
                    self._background[name] = self._start(name, self._left())
            self._await("build")
            for index, name in enumerate(names):
                for other in PARTS[name].needs:
                    self._await(other)
                self._measure(name, share(self._left(), [PARTS[x].weight for x in names[index:]]))
        finally:
            for child in self._background.values():
                child.stop()
        if self._curve and self._args.plot is not None:
            sweep.draw_curve(self._curve, self._args.plot, self._args.title)

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _start(self, name: str, limit_s: float) -> Child:
        part = PARTS.get(name)
        script = part.measure if part is not None and isinstance(part.measure, Path) else __file__
        command = [sys.executable, str(script), *self._arguments, "--child", name]
        environment = {} if part is None else part.environment
        return Child(command, self._environment | environment, limit_s)

    def _await(self, name: str) -> None:
        """Waits for a build or for written files; passes their paths to later parts as options."""
        child = self._background.pop(name, None)
        if child is None:
            return
        for figures in self._finish(name, child):
            for figure, option in OPTIONS.items():
                if figure in figures:
                    self._arguments += [option, figures[figure]]
        if name == "build" and child.error is not None:
            sys.exit(f"error: no backend to measure: {child.error}")

    def _measure(self, name: str, limit_s: float) -> None:
        if limit_s < LEAST_S:
            self._print({"part": name, "error": f"not run, {max(limit_s, 0.0):.0f} s were left"})
            return
        figures = self._finish(name, self._start(name, limit_s))
        if name == "sweep":
            self._curve = figures

    def _finish(self, name: str, child: Child) -> list[Figures]:
        """Prints a part's JSON lines as they come, then its run time; returns the parsed lines."""
        found: list[Figures] = []
        for line in child.lines():
            found.append(json.loads(line))
            self._print(found[-1])
        end: Figures = {"part": name, "seconds_in_all": round(child.seconds, 1)}
        if child.error is not None:
            end["error"] = child.error
        self._print(end)
        return found

    def _print(self, figures: Figures) -> None:
        if self._args.null_gpu is not None:
            figures = {**figures, "null_gpu": self._args.null_gpu}
        line = json.dumps(figures)
        print(line, flush=True)
        if self._out is not None:
            self._out.write(line.encode() + b"\n")
            self._out.flush()


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """Returns the parts' environment, where LD_LIBRARY_PATH names the null GPU if it is wanted."""
    environment = dict(os.environ)
    if args.null_gpu is not None:
        folders = [str(null_gpu.build(args.cache, args.null_gpu))]
        folders += [x for x in [environment.get("LD_LIBRARY_PATH")] if x]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    return environment


def part_names(text: str) -> list[str]:
    """Parses the value of --parts, like "device,correct"."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise argparse.ArgumentTypeError(f"{name!r} is not a part; choose among {known}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--parts", type=part_names, help="names, separated by commas; default: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also append the lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the sweep")
    parser.add_argument("--title", default="27B", help="title of the plot; default: %(default)s")
    parser.add_argument("--child", choices=[*BACKGROUND, *PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts is None:
        args.parts = [x for x in PARTS if args.null_gpu is None or not x.startswith("correct")]
    if args.child is not None:
        run_here(args.child, Setting.of(args))
        return
    if args.build is not None and args.backend_module is not None:
        parser.error("--build and --backend-module exclude each other; give one of them")
    try:
        if args.plot is not None:
            plot.require()
            check_output("--plot", args.plot)
        out = appending(args.out) if args.out else None
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    try:
        Run(args, sys.argv[1:], out).all()
    except OSError as error:
        sys.exit(f"error: {message_of(error)}")


if __name__ == "__main__":
    main()
