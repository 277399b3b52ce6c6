"""What the control loop costs a round beside the model: choices, trees, sampling, text.

    python scripts/bench_host.py [--settings none,chain,tree,auto] [--tokens 2000] [--temperature T]

The model is simulated: its calls wait for as long as a small model on a CPU takes, and its drafter
is right as often as --chance says. What a round takes beyond these waits is the host's. Prints
the median of a round in milliseconds, with the first and last tenth; the last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_gguf.config import DecodeConfig
from dflash_gguf.core import Draft
from dflash_gguf.decode import Generation
from dflash_gguf.draft import proposer as draft
from dflash_gguf.draft.dflash import DFlash
from dflash_gguf.policy.known import Known
from dflash_gguf.policy.rule import Auto, Fixed, Rule
from dflash_gguf.rounds import Progress

N_VOCAB = 4096
BLOCK = 7
TREE = 15
MS = {"pass": 0.7, "row": 0.05, "draft": 0.4}


class Clock:
    """Waits, and how long in all."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def wait(self, ms: float) -> None:
        """Busy, as a call into the core is."""
        end = time.perf_counter() + ms / 1e3
        while time.perf_counter() < end:
            pass
        self.waited_s += ms / 1e3


class Rows:
    """What the target says after some nodes: always the script, whatever it was fed."""

    def __init__(self, tokens: list[int], noise: NDArray[np.float32]) -> None:
        self._tokens, self._noise = tokens, noise

    def argmax(self, index: int = -1) -> int:
        """The script's token."""
        return self._tokens[index]

    def top(self, index: int = -1) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Never called: rows are read whole."""
        raise NotImplementedError

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Noise, and the script's token far above it."""
        row = self._noise.copy()
        row[self._tokens[index]] += 8.0
        return row


class Simulated:
    """A sequence whose drafter knows each position of the script with the same chance."""

    max_verify = 256
    max_draft = BLOCK
    n_most_top = 0

    def __init__(self, n_tokens: int, chance: float, clock: Clock) -> None:
        self._rng = np.random.default_rng(1)
        self._script = self._rng.integers(0, N_VOCAB, n_tokens + BLOCK + 2).tolist()
        self._noise = self._rng.standard_normal(N_VOCAB).astype(np.float32)
        self._chance, self._clock = chance, clock
        self._depths: list[int] = []
        self.n_ctx = n_tokens + BLOCK + 2
        self.engine = self
        self.position = 0

    def keep_top(self, k: int) -> bool:  # noqa: ARG002
        """As on a CPU."""
        return False

    def sync(self, tokens: Sequence[int]) -> int:
        """Begins anew."""
        del tokens
        self.position = 0
        return 0

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        """Takes no time."""
        del progress
        self.position += len(tokens)
        return self._rows([self.position])

    def decode(self, token: int) -> Rows:
        """A plain pass."""
        del token
        self._clock.wait(MS["pass"])
        self.position += 1
        return self._rows([self.position])

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """The script's token first where it is known, else second."""
        del last_token
        self._clock.wait(MS["draft"])
        tokens = self._rng.integers(0, N_VOCAB, (n_draft, k), dtype=np.int32)
        knows = self._rng.random(n_draft) < self._chance
        for i in range(n_draft):
            tokens[i, 0 if knows[i] or k == 1 else 1] = self._script[self.position + 1 + i]
            if k == 1 and not knows[i]:
                tokens[i, 0] = N_VOCAB - 1
        logits = np.tile(-np.arange(k, dtype=np.float32), (n_draft, 1))
        return Draft(tokens, logits, np.full(n_draft, 0.5, np.float32))

    def verify(self, tokens: Sequence[int]) -> Rows:
        """A chain."""
        return self.verify_tree(tokens, range(-1, len(tokens) - 1))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """A tree."""
        self._clock.wait(MS["pass"] + MS["row"] * (len(tokens) - 1))
        depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            depths[node] = depths[parents[node]] + 1
        return self._rows([self.position + 1 + depth for depth in depths])

    def commit(self, n: int) -> None:
        """Moves on."""
        self.position += n

    def commit_path(self, nodes: Sequence[int]) -> None:
        """Moves on."""
        self.position += len(nodes)

    def _rows(self, places: list[int]) -> Rows:
        return Rows([self._script[place] for place in places], self._noise)


class Letters:
    """A vocabulary of single letters."""

    stop_tokens: frozenset[int] = frozenset()
    suppressed_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        """One byte."""
        return bytes([97 + token % 26])


def measure(setting: str, n_tokens: int, chance: float, temperature: float) -> dict[str, float]:
    """What the host takes: milliseconds a round (median, first and last tenth) and its part of all.

    And tokens a round.
    """
    clock = Clock()
    sequence = Simulated(n_tokens, chance, clock)
    dflash, known = DFlash(BLOCK), Known()
    rules: dict[str, Rule | None] = {
        "none": None,
        "chain": Fixed(draft.CHAIN, BLOCK, BLOCK),
        "tree": Fixed(draft.TREE, TREE, BLOCK),
        "auto": Auto(known, BLOCK, TREE),
    }
    config = DecodeConfig(max_tokens=n_tokens, temperature=temperature, seed=1)
    generation = Generation(
        sequence,
        Letters(),
        [1],
        config,
        proposers=[dflash],
        rule=rules[setting],
    )
    rounds, waits = [], []
    next(generation)  # the prefill
    while True:
        started, waited_s = time.perf_counter(), clock.waited_s
        if next(generation, None) is None:
            break
        waits.append(clock.waited_s - waited_s)
        rounds.append(time.perf_counter() - started - waits[-1])
    result = generation.result()
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
    args = parser.parse_args(arguments)
    found = {}
    for setting in args.settings.split(","):
        found[setting] = measure(setting, args.tokens, args.chance, args.temperature)
        row = found[setting]
        print(
            f"{setting:6} {row['host_ms']:7.3f} ms a round ({row['host_ms_10']:.3f} to "
            f"{row['host_ms_90']:.3f})   {row['tokens_a_round']:.2f} tokens a round   "
            f"{100 * row['host_share']:.0f} % of the time"
        )
    print(json.dumps({"chance": args.chance, "temperature": args.temperature, "settings": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
