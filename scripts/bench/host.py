"""What the host takes of a round beside the model: choices, trees, sampling, text.

    python scripts/bench/host.py [--settings none,chain,tree,auto] [--tokens 2000]
                                 [--temperature T] [--parallel N] [--vocabulary 4096]

The model is simulated: its calls wait for as long as a small model on a CPU takes, and its drafter
is right as often as --chance says. What a round takes beyond these waits is the host's. With
--parallel so many answers are in the making at once. Prints the median of a round in milliseconds,
with the first and last tenth; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_gguf.config import DecodeConfig
from dflash_gguf.engine.scheduler import Scheduler
from dflash_gguf.engine.writing import Writing
from dflash_gguf.kv_cache.prefix_cache import Prefixes
from dflash_gguf.native import Draft, DraftRequest, Item, Walk
from dflash_gguf.speculative.controller import Auto, Fixed, Rule
from dflash_gguf.speculative.controller_state import Known
from dflash_gguf.speculative.proposers import proposer
from dflash_gguf.speculative.proposers.dflash import DFlash
from dflash_gguf.speculative.tree import Tree

BLOCK = 7
TREE = 15
MS = {"pass": 0.7, "row": 0.05, "draft": 0.4}


class Rows:
    """What the target says after some nodes: always the script, whatever it was fed."""

    def __init__(self, tokens: list[int], noise: NDArray[np.float32]) -> None:
        self._tokens, self._noise = tokens, noise

    def __len__(self) -> int:
        return len(self._tokens)

    def argmax(self, index: int = -1) -> int:
        """The script's token."""
        return self._tokens[index]

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Noise, and the script's token far above it."""
        row = self._noise.copy()
        row[self._tokens[index]] += 8.0
        return row


class Engine:
    """Waits as long as passes take; what its drafter knows of a script is a matter of chance."""

    max_verify = 256
    max_draft_rows = 1 << 20
    n_most_top = n_top = n_experts = 0
    divides_prefixes = True
    prefix_bytes = 0
    n_free_cells = 1 << 20

    def __init__(self, n_parallel: int, n_tokens: int, n_vocab: int, chance: float) -> None:
        self.model = SimpleNamespace(backend="CPU")
        self.config = SimpleNamespace(n_ubatch=512)
        self.n_parallel, self.n_vocab = n_parallel, n_vocab
        self.n_ctx = n_tokens + BLOCK + 2
        self.waited_s = 0.0
        self._ran: dict[Any, tuple[Item, Rows]] = {}
        self._rng = np.random.default_rng(1)
        self._script = self._rng.integers(0, n_vocab, self.n_ctx).tolist()
        self._noise = self._rng.standard_normal(n_vocab).astype(np.float32)
        self._chance = chance

    def keep_top(self, k: int) -> bool:  # noqa: ARG002
        """As on a CPU."""
        return False

    def run(self, items: Sequence[Item]) -> list[Rows]:
        """One pass of the target."""
        n_rows = sum(len(item.tokens) for item in items)
        self._wait(MS["pass"] + MS["row"] * (n_rows - 1))
        rows = [self._rows_of(item) for item in items]
        self._ran = dict(
            zip([item.sequence for item in items], zip(items, rows, strict=True), strict=True)
        )
        return rows

    def choose(self, walks: Sequence[Walk]) -> list[list[int]]:
        """Draws, down the trees."""
        return [self._walk(walk) for walk in walks]

    def _walk(self, walk: Walk) -> list[int]:
        item, rows = self._ran[walk.sequence]
        drawn: list[int] = []

        def choose(node: int) -> int:
            if walk.sampler.options.temperature == 0.0:
                drawn.append(rows.argmax(node))
            else:
                row, position = rows.logits(node), walk.position + len(drawn)
                drawn.append(walk.sampler.choose(row, walk.seen, position)[0])
            return drawn[-1]

        nodes = item.tokens if item.verifies else item.tokens[-1:]
        Tree.of(nodes, item.parents).follow(choose, lambda _: False)
        return drawn

    def draft(self, requests: Sequence[DraftRequest], k: int = 1) -> list[Draft]:
        """One pass of the drafter: the script's token first where it is known, else second."""
        self._wait(MS["draft"])
        return [self._draft(x.sequence.position, x.n_draft, k) for x in requests]

    def commit(self, paths: Sequence[tuple[Any, Sequence[int] | int]]) -> None:
        """Moves on."""
        for sequence, nodes in paths:
            sequence.position += nodes if isinstance(nodes, int) else len(nodes)

    def _rows_of(self, item: Item) -> Rows:
        sequence: Any = item.sequence
        if not item.verifies:
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
        """Busy, as a call into the core is."""
        end = time.perf_counter() + ms / 1e3
        while time.perf_counter() < end:
            pass
        self.waited_s += ms / 1e3


class Simulated:
    """A sequence of it."""

    max_draft = BLOCK

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.position = 0

    @property
    def tokens(self) -> list[int]:
        """Nothing that anybody would begin with."""
        return []

    def wanted_cells(self, n: int) -> int:  # noqa: ARG002
        """There are always enough."""
        return 0

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """A draft of its own."""
        return self.engine.draft([DraftRequest(self, last_token, n_draft)], k)[0]  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Begins anew."""
        self.position = 0


class Letters:
    """A vocabulary of single letters."""

    stop_tokens: frozenset[int] = frozenset()
    suppressed_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        """One byte."""
        return bytes([97 + token % 26])


def measure(setting: str, args: argparse.Namespace) -> dict[str, float]:
    """What the host takes: milliseconds a round (median, first and last tenth) and its part of all.

    And tokens a round.
    """
    n_tokens = args.tokens
    engine: Any = Engine(args.parallel, n_tokens, args.vocabulary, args.chance)
    first: Any = Simulated(engine)
    another: Any = Simulated
    scheduler = Scheduler(first, Prefixes(engine, 0), another)
    rules: dict[str, Rule | None] = {
        "none": None,
        "chain": Fixed(proposer.CHAIN, BLOCK, BLOCK),
        "tree": Fixed(proposer.TREE, TREE, BLOCK),
        "auto": Auto(Known(), BLOCK, TREE),
    }
    jobs = []
    for i in range(args.parallel):
        config = DecodeConfig(
            max_tokens=n_tokens, temperature=args.temperature, seed=i, draft=setting
        )
        is_drafted = rules[setting] is not None
        writing = Writing(Letters(), [i + 1], engine.n_ctx, config, is_drafted=is_drafted)
        jobs.append(scheduler.add(writing, [DFlash(BLOCK)], rules[setting]))
    rounds, waits = [], []
    while not all(job.answer.tokens for job in jobs):
        scheduler.round(jobs[0])  # prompts
    while not any(job.is_over for job in jobs):
        for job in jobs:
            while job.steps:
                job.next_step()
        started, waited_s = time.perf_counter(), engine.waited_s
        scheduler.round(jobs[0])
        waits.append(engine.waited_s - waited_s)
        rounds.append(time.perf_counter() - started - waits[-1])
    result = jobs[0].writing.result()
    low, median, high = np.percentile(rounds, (10, 50, 90)) * 1e3
    return {
        "host_ms": round(median, 3),
        "host_ms_10": round(low, 3),
        "host_ms_90": round(high, 3),
        "tokens_a_round": round(result.n_decoded / result.rounds, 3),
        "host_share": round(sum(rounds) / (sum(rounds) + sum(waits)), 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default="none,chain,tree,auto")
    parser.add_argument("--tokens", type=int, default=2000, help="of each answer")
    parser.add_argument("--chance", type=float, default=0.8, help="that a guess is right")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--parallel", type=int, default=1, help="answers at once")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the model")
    args = parser.parse_args(arguments)
    found = {}
    for setting in args.settings.split(","):
        found[setting] = measure(setting, args)
        row = found[setting]
        print(
            f"{setting:6} {row['host_ms']:7.3f} ms a round ({row['host_ms_10']:.3f} to "
            f"{row['host_ms_90']:.3f})   {row['tokens_a_round']:.2f} tokens a round   "
            f"{100 * row['host_share']:.0f} % of the time"
        )
    facts = {key: x for key, x in vars(args).items() if key != "settings"}
    print(json.dumps({**facts, "settings": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
