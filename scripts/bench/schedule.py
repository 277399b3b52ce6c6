"""What the host does for many answers at once, on a GPU that computes nothing.

    scripts/bench/synthetic_gguf.py qwen35-27b TARGET.gguf --outtype q4_k_m --header-only
    scripts/bench/schedule.py TARGET.gguf --backend-module libggml-cuda.so --null-gpu 86

Answers of random lengths join as others end, so that prompts come in among them; their tokens mean
nothing, and each pass waits as long as a GPU would compute. Of the rounds without prompts: how long
they take beside that, which is the host's time, and how much of it is spent outside of the core. Of
all rounds: how many verified drafts, in how many a graph was built, or captured anew; and how many
nodes the largest graph has, which follows from the model's layers: neither sequences nor their
lengths add any. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dflash_gguf
from dflash_gguf import native

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu import null_gpu

MOST_PROMPT, MOST_ANSWER = 600, 200
MORE_A_ROW = 0.01
"""Of a pass's time, what a row of it adds: else `auto` would verify as much as it can."""


class Clock:
    """Seconds in the core since it was last asked, and passes."""

    def __init__(self, engine: Any, pass_s: float, draft_s: float, accepted: float) -> None:
        """pass_s, draft_s: what a pass of either model takes beside the host, without its rows.

        accepted: the chance with which a candidate is what the target draws. What the GPU that
        computes nothing gives is never one, and nobody would draft for long.
        """
        self.pass_s, self.draft_s, self.accepted = pass_s, draft_s, accepted
        self._random = np.random.default_rng(1)
        self._verified: dict[Any, Any] = {}
        self.waited = 0.0
        self.seconds, self.n_passes, self.n_filled, self.n_items = 0.0, 0, 0, 0
        self.n_verifies = 0
        for name in ("run", "draft", "choose", "commit"):
            setattr(engine, name, self._timed(name, getattr(engine, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            started = time.perf_counter()
            result = call(*values)
            self.seconds += time.perf_counter() - started
            if name in ("run", "draft"):  # else prompts would be all that rounds take, and wait
                started = time.perf_counter()
                time.sleep(self._waits(name, values[0]))
                self.waited += time.perf_counter() - started
            if name == "choose":
                result = [self._drawn(*pair) for pair in zip(values[0], result, strict=True)]
            if name == "run":
                self._verified = {x.sequence: x for x in values[0] if x.verifies}
                self.n_passes += 1
                self.n_verifies += bool(self._verified)
                self.n_items += len(values[0])
                self.n_filled += any(len(x.tokens) > 1 and not x.verifies for x in values[0])
            return result

        return run

    def _waits(self, name: str, items: Any) -> float:
        if name == "draft":
            return self.draft_s * (1.0 + MORE_A_ROW * sum(1 + item.n_draft for item in items))
        return self.pass_s * (1.0 + MORE_A_ROW * sum(len(item.tokens) for item in items))

    def _drawn(self, walk: Any, drawn: list[int]) -> list[int]:
        """As many first children as are accepted, and then what the core has drawn."""
        item = self._verified.get(walk.sequence)
        if item is None or self.accepted == 0.0 or not drawn:
            return drawn
        tokens = list(item.tokens)
        parents = list(range(-1, len(tokens) - 1)) if item.parents is None else list(item.parents)
        path, node = [], 0
        while node in parents and self._random.random() < self.accepted:
            node = parents.index(node)
            path.append(tokens[node])
        return [*path, drawn[0]]


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Runs it."""
    random = np.random.default_rng(0)
    options = {"n_ctx": args.ctx, "n_parallel": args.n, "cache_type_k": "q8_0"}
    options["cache_type_v"] = "q8_0"
    rows: list[tuple[bool, float, float, int, int]] = []
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        engine: Any = decoder.engine
        pass_s = args.pass_ms / 1e3
        share = args.drafter.stat().st_size / args.model.stat().st_size if args.drafter else 0.0
        clock = Clock(engine, pass_s, share * pass_s, args.accepted)
        streams: list[Any] = []
        n_vocab, seed = decoder.model.n_vocab, 0
        while len(rows) < args.rounds:
            joined = len(streams) < args.n
            while len(streams) < args.n:
                seed += 1
                prompt = random.integers(0, n_vocab, int(random.integers(8, MOST_PROMPT))).tolist()
                streams.append(
                    decoder.stream(
                        prompt,
                        max_tokens=int(random.integers(8, MOST_ANSWER)),
                        temperature=args.temperature,
                        ignore_eos=True,
                        seed=seed,
                        draft=args.draft,
                    )
                )
            counts, info = null_gpu.counts(), engine.info()
            clock.seconds, clock.waited, passes, filled = 0.0, 0.0, clock.n_passes, clock.n_filled
            started = time.perf_counter()
            left, ran = [], False
            for stream in streams:
                try:
                    while stream.poll(run=not ran) is not None:
                        ran = ran or clock.n_passes > passes
                    ran = ran or clock.n_passes > passes
                    left.append(stream)
                except (StopIteration, native.Error):  # what nobody computed may be no number
                    joined = True
            took = time.perf_counter() - started - clock.waited
            streams = left
            if clock.n_passes == passes:
                continue
            n_built = int(engine.info().n_graphs_built - info.n_graphs_built)
            captured = null_gpu.counts()["captures"] - counts["captures"] if counts else 0
            is_steady = not joined and clock.n_filled == filled and clock.n_passes == passes + 1
            rows.append((is_steady, took, took - clock.seconds, n_built, captured))
        backend, n_items = decoder.model.backend, clock.n_items / clock.n_passes
        n_verifies = clock.n_verifies / clock.n_passes
        n_nodes = int(engine.info().n_graph_nodes)
    steady = [row for row in rows if row[0]]
    found = {
        "backend": backend,
        "n": args.n,
        "in_a_pass": n_items,
        "verified": n_verifies,
        "rounds": len(rows),
        "steady": len(steady),
        "steady_ms": statistics.median(row[1] for row in steady) * 1e3,
        "outside_ms": statistics.median(row[2] for row in steady) * 1e3,
        "built": sum(row[3] > 0 for row in rows) / len(rows),
        "captured": sum(row[4] > 0 for row in rows) / len(rows),
        "anew": sum(row[3] > 0 or row[4] > 0 for row in rows) / len(rows),
        "nodes": n_nodes,
        "captured_late": sum(row[4] > 0 for row in rows[len(rows) // 2 :]) / (len(rows) / 2),
        "built_late": sum(row[3] > 0 for row in rows[len(rows) // 2 :]) / (len(rows) / 2),
    }
    print(
        f"{args.n} answers on {backend}: {found['steady_ms']:.2f} ms of the host a round, "
        f"{found['outside_ms']:.2f} of them outside of the core; of {len(rows)} rounds "
        f"{100 * n_verifies:.0f} % verified drafts and {100 * found['anew']:.1f} % built "
        f"({100 * found['built']:.1f} %) or captured ({100 * found['captured']:.1f} %) a graph, "
        f"the largest of which has {n_nodes} nodes"
    )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The host's part of many answers")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="of any weights, or none")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--backend-module", type=Path, required=True)
    parser.add_argument("--null-gpu", metavar="CAPABILITY", required=True, help="such as 86")
    parser.add_argument("--cache", type=Path, default=Path("build"), help="where its library goes")
    parser.add_argument("-n", type=int, default=16, help="answers at once")
    parser.add_argument("-c", "--ctx", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--pass-ms", type=float, default=15.0, help="of a GPU that computes")
    parser.add_argument("--accepted", type=float, default=0.0, help="chance of a candidate")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft", default="none", choices=("none", "chain", "tree", "auto"))
    args = parser.parse_args()
    folder = str(null_gpu.build(args.cache.resolve(), args.null_gpu))
    paths = os.environ.get("LD_LIBRARY_PATH", "")
    if folder not in paths:  # libraries are found when a process starts
        again = {**os.environ, "LD_LIBRARY_PATH": f"{folder}{os.pathsep}{paths}"}
        again["GGML_BACKEND_PATH"] = str(args.backend_module.resolve())
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=again, check=False).returncode)
    try:
        print(json.dumps(schedule(args)))
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
