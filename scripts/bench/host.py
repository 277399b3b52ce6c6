"""Measures the host's part of a round: proposals, trees, sampling, text, but no model.

    scripts/bench/host.py [--settings none,chain,tree,auto] [--tokens 2000] [--temperature T]
    scripts/bench/host.py MODEL.gguf [--drafter DRAFTER.gguf] [-n 16] [--rounds 60]
    scripts/bench/synthetic_gguf.py qwen35-27b TARGET.gguf --outtype q4_k_m --header-only
    scripts/bench/host.py TARGET.gguf --backend-module libggml-cuda.so --null-gpu 86

Without MODEL.gguf: a simulated model waits as long as a small model on a CPU computes, and its
drafter is right with probability --chance. Prints the median host time of a round, and the 10th and
90th percentile. With MODEL.gguf: prints the share of a round outside of the C++ library, for n
sampled answers.

--null-gpu: runs n answers of random lengths on a CUDA driver that computes nothing; passes wait as
long as on a real GPU. Prints host time of rounds without prompts, the shares of rounds that
verified drafts, built or captured a graph, and the largest graph's nodes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from turns import Figures, facts

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.config import DecodeConfig
from dflash_gguf.engine.request import Request
from dflash_gguf.engine.scheduler import Scheduler
from dflash_gguf.kv_cache.prefix_cache import PrefixCache
from dflash_gguf.native import BatchEntry, Draft, DraftRequest, SampleRequest
from dflash_gguf.speculative.controller import (
    AutoController,
    Controller,
    ControllerState,
    FixedController,
)
from dflash_gguf.speculative.proposers import proposer
from dflash_gguf.speculative.proposers.dflash import DFlash
from dflash_gguf.speculative.tree import Tree

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu import null_gpu

BLOCK = 7
TREE = 15
MS = {"pass": 0.7, "row": 0.05, "draft": 0.4}
MOST_PROMPT, MOST_ANSWER = 600, 200
MORE_A_ROW = 0.01
"""Share of a pass's time that each row adds; with 0, `auto` would verify as many rows as fit."""


class Rows:
    """Logits of a simulated pass, in which the tokens of a random text, the script, are best."""

    def __init__(self, tokens: list[int], noise: NDArray[np.float32]) -> None:
        self._tokens, self._noise = tokens, noise

    def __len__(self) -> int:
        return len(self._tokens)

    def check(self) -> None:
        """Does nothing, as simulated rows are always finite."""

    def argmax(self, index: int = -1) -> int:
        """Returns the random text's next token after a row of the pass."""
        return self._tokens[index]

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Returns random logits of a row, in which the random text's next token is far ahead."""
        row = self._noise.copy()
        row[self._tokens[index]] += 8.0
        return row


class SimulatedEngine:
    """An engine without a model: passes only wait, and drafts are right with a probability."""

    max_verify = 256
    max_top_k = n_top = 0
    partial_prefix_ok = True
    prefix_bytes = 0
    n_free_cells = 1 << 20

    def __init__(self, n_parallel: int, n_tokens: int, n_vocab: int, chance: float) -> None:
        self.model = SimpleNamespace(backend="CPU")
        self.config = SimpleNamespace(n_ubatch=512)
        self.n_parallel, self.n_vocab = n_parallel, n_vocab
        self.n_ctx = n_tokens + BLOCK + 2
        self.waited_s = 0.0
        self._ran: dict[Any, tuple[BatchEntry, Rows]] = {}
        self._rng = np.random.default_rng(1)
        self._script = self._rng.integers(0, n_vocab, self.n_ctx).tolist()
        self._noise = self._rng.standard_normal(n_vocab).astype(np.float32)
        self._chance = chance

    def set_top_k(self, k: int) -> bool:  # noqa: ARG002
        """Returns False: like an engine on a CPU, this one gives whole rows of logits."""
        return False

    def run(self, items: Sequence[BatchEntry]) -> list[Rows]:
        """Simulates one pass of the target."""
        n_rows = sum(len(item.tokens) for item in items)
        self._wait(MS["pass"] + MS["row"] * (n_rows - 1))
        rows = [self._rows_of(item) for item in items]
        self._ran = dict(
            zip([item.sequence for item in items], zip(items, rows, strict=True), strict=True)
        )
        return rows

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[int]]:
        """Returns the tokens that the target samples along each request's tree."""
        return [self._walk(request) for request in requests]

    def _walk(self, walk: SampleRequest) -> list[int]:
        item, rows = self._ran[walk.sequence]
        drawn: list[int] = []

        def choose(node: int) -> int:
            if walk.sampler.options.temperature == 0.0:
                drawn.append(rows.argmax(node))
            else:
                row, position = rows.logits(node), walk.position + len(drawn)
                drawn.append(walk.sampler.sample(row, walk.history, position)[0])
            return drawn[-1]

        nodes = item.tokens if item.is_verify else item.tokens[-1:]
        Tree.of(nodes, item.parents).follow(choose, lambda _: False)
        return drawn

    def draft(self, requests: Sequence[DraftRequest], k: int = 1, _: int = 0) -> list[Draft]:
        """Simulates a drafter's pass, which ranks the random text's next token first or second."""
        self._wait(MS["draft"])
        return [self._draft(x.sequence.position, x.n_draft, k) for x in requests]

    def commit(self, paths: Sequence[tuple[Any, Sequence[int] | int]]) -> None:
        """Advances each sequence by the number of its accepted nodes."""
        for sequence, nodes in paths:
            sequence.position += nodes if isinstance(nodes, int) else len(nodes)

    def _rows_of(self, item: BatchEntry) -> Rows:
        sequence: Any = item.sequence
        if not item.is_verify:
            sequence.position += len(item.tokens)
            return Rows([self._script[sequence.position]], self._noise)
        depths = list(range(len(item.tokens)))
        for node, parent in enumerate(item.parents or ()):
            depths[node] = depths[parent] + 1 if node else 0
        return Rows([self._script[sequence.position + 1 + at] for at in depths], self._noise)

    def _draft(self, position: int, n: int, k: int) -> Draft:
        tokens = self._rng.integers(0, self.n_vocab, (n, k), dtype=np.int32)
        knows = self._rng.random(n) < self._chance
        for i in range(n):
            tokens[i, 0 if knows[i] or k == 1 else 1] = self._script[position + 1 + i]
            if k == 1 and not knows[i]:
                tokens[i, 0] = self.n_vocab - 1
        logits = np.tile(-np.arange(k, dtype=np.float32), (n, 1))
        return Draft(tokens, logits, np.full(n, 0.5, np.float32))

    def _wait(self, ms: float) -> None:
        """Waits in a busy loop, as computing on a CPU keeps a core busy, too."""
        end = time.perf_counter() + ms / 1e3
        while time.perf_counter() < end:
            pass
        self.waited_s += ms / 1e3


class SimulatedSequence:
    """A sequence of the simulated engine."""

    max_draft = BLOCK

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.position = 0

    @property
    def tokens(self) -> list[int]:
        """Returns no tokens, as no simulated sequence starts with a cached prefix."""
        return []

    def cells_needed(self, n: int) -> int:  # noqa: ARG002
        """Returns 0 needed K/V cells, as the simulation never runs out of cells."""
        return 0

    def draft(self, last_token: int, n_draft: int, k: int = 1, _: int = 0) -> Draft:
        """Returns a draft of n_draft tokens for this sequence alone."""
        return self.engine.draft([DraftRequest(self, last_token, n_draft)], k)[0]  # type: ignore[no-any-return]

    def commit(self, n: int) -> None:
        """Does nothing, as a simulated sequence has no pending verify."""

    def reset(self) -> None:
        """Moves the sequence back to position 0."""
        self.position = 0


class Letters:
    """A vocabulary of single letters."""

    stop_tokens: frozenset[int] = frozenset()
    suppressed_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        """Returns the token's letter as one byte."""
        return bytes([97 + token % 26])


def simulated(setting: str, n: int, args: argparse.Namespace) -> Figures:
    """Measures rounds with a simulated model; returns host milliseconds and tokens a round."""
    n_tokens = args.tokens
    engine: Any = SimulatedEngine(n, n_tokens, args.vocabulary, args.chance)
    first: Any = SimulatedSequence(engine)
    another: Any = SimulatedSequence
    scheduler = Scheduler(first, PrefixCache(engine, 0), Letters(), another)
    rules: dict[str, Controller | None] = {
        "none": None,
        "chain": FixedController(proposer.CHAIN, BLOCK, BLOCK),
        "tree": FixedController(proposer.TREE, TREE, BLOCK),
        "auto": AutoController(ControllerState(), BLOCK, TREE),
    }
    states = []
    for i in range(n):
        config = DecodeConfig(
            max_tokens=n_tokens, temperature=args.temperature, seed=i, draft=setting
        )
        request = Request((i + 1,), config)
        states.append(scheduler.add_request(request, [DFlash(BLOCK)], rules[setting]))
    rounds, waits = [], []
    while not all(state.output.tokens for state in states):
        scheduler.step()  # untimed rounds, which compute prompts
    while not any(state.is_finished for state in states):
        for state in states:
            state.steps.clear()
        started, waited_s = time.perf_counter(), engine.waited_s
        scheduler.step()
        waits.append(engine.waited_s - waited_s)
        rounds.append(time.perf_counter() - started - waits[-1])
    result = states[0].result()
    low, median, high = np.percentile(rounds, (10, 50, 90)) * 1e3
    row = {
        "host_ms": round(median, 3),
        "host_ms_10": round(low, 3),
        "host_ms_90": round(high, 3),
        "tokens_a_round": round(result.n_decoded / result.rounds, 3),
        "host_share": round(sum(rounds) / (sum(rounds) + sum(waits)), 3),
    }
    print(
        f"{setting:6} {row['host_ms']:7.3f} ms a round ({row['host_ms_10']:.3f} to "
        f"{row['host_ms_90']:.3f})   {row['tokens_a_round']:.2f} tokens a round   "
        f"{100 * row['host_share']:.0f} % of the time"
    )
    return row


class CoreClock:
    """Measures the seconds that an engine spends in calls of the C++ library."""

    def __init__(self, engine: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(engine, name, self._timed(name, getattr(engine, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            started = time.perf_counter()
            result = call(*values)
            self.seconds += time.perf_counter() - started
            return self.after(name, values[0], result)

        return run

    def after(self, name: str, values: Any, result: Any) -> Any:  # noqa: ARG002
        """Returns an engine call's result; subclasses may wait here, or change the result."""
        return result


def real(n: int, args: argparse.Namespace) -> Figures:
    """Measures the share of a round's time outside of the C++ library, with n answers."""
    options = {"n_ctx": args.ctx, "n_parallel": n, "n_threads": args.threads}
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        clock = CoreClock(decoder.engine, "run", "draft", "commit")
        streams = [
            decoder.stream(
                f"Write a story about {i} birds.",
                max_tokens=1000,
                ignore_eos=True,
                temperature=1.0,
                seed=i,
                draft="none" if args.drafter is None else "auto",
            )
            for i in range(n)
        ]
        for stream in streams * 2:  # untimed rounds, to compute prompts and build graphs
            next(stream)
        shares, seconds = [], []
        for _ in range(args.rounds or 60):
            clock.seconds, started = 0.0, time.perf_counter()
            for stream in streams:
                next(stream)
            seconds.append(time.perf_counter() - started)
            shares.append(1.0 - clock.seconds / seconds[-1])
        n_vocab = decoder.model.n_vocab
    row = {"n": n, "host": statistics.median(shares), "round_s": statistics.median(seconds)}
    print(
        f"{n:3} answers at temperature 1, {n_vocab} tokens: the host takes "
        f"{100 * row['host']:.1f} % of a round of {1e3 * row['round_s']:.1f} ms",
        flush=True,
    )
    return row


class NullClock(CoreClock):
    """Makes passes of a null GPU's engine wait, and accepts candidates by chance."""

    def __init__(self, engine: Any, pass_s: float, draft_s: float, accepted: float) -> None:
        """pass_s, draft_s: seconds of a pass and a draft. accepted: probability of acceptance."""
        super().__init__(engine, "run", "draft", "sample", "commit")
        self.pass_s, self.draft_s, self.accepted = pass_s, draft_s, accepted
        self._random = np.random.default_rng(1)
        self._verified: dict[Any, Any] = {}
        self.waited = 0.0
        self.n_passes, self.n_filled, self.n_items, self.n_verifies = 0, 0, 0, 0

    def after(self, name: str, values: Any, result: Any) -> Any:
        """Waits after a pass or draft; replaces sampled tokens by accepted candidates."""
        # If the null GPU's passes took no time, most would compute prompts.
        if name in ("run", "draft"):
            started = time.perf_counter()
            time.sleep(self._waits(name, values))
            self.waited += time.perf_counter() - started
        if name == "sample":
            return [self._drawn(*pair) for pair in zip(values, result, strict=True)]
        if name == "run":
            self._verified = {x.sequence: x for x in values if x.is_verify}
            self.n_passes += 1
            self.n_verifies += bool(self._verified)
            self.n_items += len(values)
            self.n_filled += any(len(x.tokens) > 1 and not x.is_verify for x in values)
        return result

    def _waits(self, name: str, items: Any) -> float:
        if name == "draft":
            return self.draft_s * (1.0 + MORE_A_ROW * sum(1 + item.n_draft for item in items))
        return self.pass_s * (1.0 + MORE_A_ROW * sum(len(item.tokens) for item in items))

    def _drawn(self, walk: Any, drawn: list[int]) -> list[int]:
        """Returns a random number of tokens along the tree's first path, then a sampled token."""
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


def on_null_gpu(n: int, args: argparse.Namespace) -> Figures:
    """Measures rounds on the null GPU; n answers start and end at different times."""
    n_rounds = args.rounds or 2000
    random = np.random.default_rng(0)
    options = {"n_ctx": args.ctx, "n_parallel": n, "cache_type_k": "q8_0"}
    options["cache_type_v"] = "q8_0"
    rows: list[tuple[bool, float, float, int, int]] = []
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        engine: Any = decoder.engine
        pass_s = args.pass_ms / 1e3
        share = args.drafter.stat().st_size / args.model.stat().st_size if args.drafter else 0.0
        clock = NullClock(engine, pass_s, share * pass_s, args.accepted)
        streams: list[Any] = []
        n_vocab, seed = decoder.model.n_vocab, 0
        while len(rows) < n_rounds:
            joined = len(streams) < n
            while len(streams) < n:
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
            with contextlib.suppress(native.Error):
                decoder.step()
            for stream in streams:
                stream.state.steps.clear()
            left = [stream for stream in streams if not stream.state.is_finished]
            # Answers may also end by an error, as the null GPU's logits may not be finite.
            joined = joined or len(left) < len(streams)
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
        "n": n,
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
        f"{n} answers on {backend}: {found['steady_ms']:.2f} ms of the host a round, "
        f"{found['outside_ms']:.2f} of them outside of the core; of {len(rows)} rounds "
        f"{100 * n_verifies:.0f} % verified drafts and {100 * found['anew']:.1f} % built "
        f"({100 * found['built']:.1f} %) or captured ({100 * found['captured']:.1f} %) a graph, "
        f"the largest of which has {n_nodes} nodes"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL.gguf", help="default: a simulated model"
    )
    parser.add_argument("--drafter", type=Path)
    parser.add_argument(
        "-n", "--parallel", dest="n", type=int, nargs="+", help="answers at once; default: 1, or 16"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of a model; default: 60, or 2000 on a null GPU"
    )
    parser.add_argument(
        "-c", "--ctx", type=int, help="K/V cells; default: 8192, or 32768 on a null GPU"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument("--temperature", type=float, help="default: 0 if simulated, else 1")
    simulation = parser.add_argument_group("a simulated model")
    simulation.add_argument("--settings", default="none,chain,tree,auto")
    simulation.add_argument("--tokens", type=int, default=2000, help="tokens of each answer")
    simulation.add_argument(
        "--chance", type=float, default=0.8, help="probability of a right draft"
    )
    simulation.add_argument("--vocabulary", type=int, default=4096, help="tokens of the vocabulary")
    null = parser.add_argument_group("a GPU that computes nothing")
    null.add_argument("--null-gpu", metavar="CAPABILITY", help="compute capability, such as 86")
    null.add_argument("--backend-module", type=Path)
    null.add_argument("--cache", type=Path, default=Path("build"), help="folder of its libraries")
    null.add_argument(
        "--pass-ms", type=float, default=15.0, help="milliseconds of a pass on a real GPU"
    )
    null.add_argument(
        "--accepted", type=float, default=0.0, help="probability that a candidate is accepted"
    )
    null.add_argument("--draft", default="none", choices=("none", "chain", "tree", "auto"))
    args = parser.parse_args()
    if args.null_gpu and (args.model is None or args.backend_module is None):
        parser.error("--null-gpu needs MODEL.gguf and --backend-module")
    if args.model is None and len(args.n or [1]) > 1:
        parser.error("-n: give one number for a simulated model")
    if args.temperature is None:
        args.temperature = 0.0 if args.model is None else 1.0
    args.ctx = args.ctx or (32768 if args.null_gpu else 8192)
    args.n = args.n or [1 if args.model is None else 16]
    try:
        if args.model is None:
            (n,) = args.n
            found = {setting: simulated(setting, n, args) for setting in args.settings.split(",")}
            options = {name: getattr(args, name) for name in ("tokens", "chance", "temperature")}
            options |= {"parallel": n, "vocabulary": args.vocabulary}
            print(json.dumps({**facts(), **options, "settings": found}))
            return
        if args.null_gpu:
            null_gpu.restart(args.cache, args.null_gpu, args.backend_module)
        rows = [(on_null_gpu if args.null_gpu else real)(n, args) for n in args.n]
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({**facts(), "model": args.model.name, "host": rows}))


if __name__ == "__main__":
    main()
