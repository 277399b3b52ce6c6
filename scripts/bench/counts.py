"""Counts a round's kernels, waits and copies at the shapes of published models, without a GPU.

    scripts/bench/counts.py [SHAPE...] --backend-module libggml-cuda.so --null-gpu 90

Runs ggml's CUDA backend on a driver that computes nothing, with files that have no weights. Prints
a JSON line for each round and phase: a plain step, and draft, verify and commit of chains and
trees. Counters are means of rounds after the graphs were captured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from dflash_gguf.convert.types import TYPE_IDS
from rounds import forced_round
from synthetic_shapes import TAPS

from dflash_gguf import native

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu import acceptance, files, null_gpu
from gpu.limits import Moved
from gpu.setting import FULL, Figures, Setting
from gpu.speed import close_pair, open_pair, random_tokens

SHAPES = ("qwen35-27b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-4-31b")
ROUNDS = (("plain", 0), ("chain", 7), ("chain", 8), ("chain", 15), ("tree", 15), ("tree", 23))
"""Kinds of rounds and their candidates; a verify has one row more."""
N_WARM, N_COUNTED, N_CTX = 12, 8, 4096
N_CANDIDATES = 8
PRODUCT = re.compile("mul_mat|cublas")
TYPES = {f"(ggml_type){value}": name for name, value in TYPE_IDS.items()}


class Phase:
    """Counts what the null GPU is asked for in a with block, by the phase's name."""

    calls: dict[str, Counter[str]]
    launches: dict[str, Counter[str]]

    def __init__(self, name: str) -> None:
        self._name = "verify" if name == "choose" else name

    @classmethod
    def reset(cls) -> None:
        """Forgets the counts of all phases."""
        cls.calls, cls.launches = {}, {}

    def __enter__(self) -> None:
        self._calls, self._launches = Counter(null_gpu.counts()), null_gpu.launches()

    def __exit__(self, *_: object) -> None:
        calls, launches = Counter(null_gpu.counts()), null_gpu.launches()
        calls.subtract(self._calls)
        launches.subtract(self._launches)
        self.calls.setdefault(self._name, Counter()).update(calls)
        self.launches.setdefault(self._name, Counter()).update(launches)


def run_round(sequence: native.Sequence, kind: str, size: int, random: np.random.Generator) -> None:
    """Runs one round; candidates and the target's tokens are random."""
    if kind == "plain":
        with Phase("verify"):
            sequence.decode(acceptance.FIRST_ID).argmax()
        return
    candidates = acceptance.draw(random, sequence.engine.model.n_vocab)
    tree = acceptance.shape(candidates, kind, size)
    with Phase("draft"):
        n_draft = min(size, sequence.max_draft)
        sequence.draft(acceptance.FIRST_ID, n_draft, N_CANDIDATES if kind == "tree" else 1)
    forced_round(sequence, tree, list(acceptance.chosen(candidates, random)), Phase)


def with_types(kernel: str) -> str:
    """Returns a kernel's name with names of ggml types in place of their numbers."""
    return re.sub(r"\(ggml_type\)\d+", lambda x: TYPES.get(x[0], x[0]), kernel)


def measure(setting: Setting, shape: str, all_kernels: bool) -> Iterator[Figures]:
    """Yields the lines of one shape: each phase of each round."""
    sequence = open_pair(setting, N_CTX)
    engine = sequence.engine
    for kind, size in ROUNDS:
        random = np.random.default_rng(2)
        engine.reserve_verify(size + 1)
        sequence.reset()
        sequence.prefill(random_tokens(sequence, FULL.n_prompt, seed=1))
        for n_rounds in (N_WARM, N_COUNTED):
            Phase.reset()
            for _ in range(n_rounds):
                run_round(sequence, kind, size, random)
        moved = Moved.of(sequence)
        for phase, calls in Phase.calls.items():
            launches = Phase.launches[phase]
            kernels = {
                with_types(name): round(n / N_COUNTED, 2)
                for name, n in sorted(launches.items())
                if n > 0 and (all_kernels or PRODUCT.search(name))
            }
            yield {
                "shape": shape,
                "round": kind,
                "rows": size + 1,
                "phase": "step" if kind == "plain" else phase,
                "launches": launches.total() / N_COUNTED,
                **{name: calls[name] / N_COUNTED for name in null_gpu.CALLS},
                "kernels_by_name": kernels,
            }
        yield {
            "shape": shape,
            "round": kind,
            "rows": size + 1,
            "weight_bytes": moved.weights,
            "moved_bytes": moved.drafted(size + 1) if size else moved.plain,
            "cpu_operations": engine.cpu_operations,
        }
    close_pair(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"default: {' '.join(SHAPES)}")
    parser.add_argument("--backend-module", type=Path, required=True, metavar="FILE")
    parser.add_argument("--null-gpu", required=True, metavar="CAPABILITY", help="such as 86")
    parser.add_argument("--outtype", default=files.OUTTYPE)
    parser.add_argument("--kernels", action="store_true", help="name kernels besides products")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/gpu"), help="folder for files without weights"
    )
    parser.add_argument("--cache", type=Path, default=Path("build"), help="folder of the null GPU")
    args = parser.parse_args()
    for shape in args.shapes:
        if shape not in TAPS:
            parser.error(f"{shape!r} is not a shape; choose among {', '.join(TAPS)}")
    null_gpu.restart(args.cache, args.null_gpu, args.backend_module)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        for shape in args.shapes or SHAPES:
            pair = files.write_pair(args.folder, shape, args.outtype, empty=True)
            setting = Setting(
                None, None, args.folder, FULL, target_file=pair[0], drafter_file=pair[1]
            )
            for line in measure(setting, shape, args.kernels):
                print(json.dumps(line), flush=True)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
