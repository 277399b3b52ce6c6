"""Times rounds of our engine by phase: plain steps, chains and trees of forced acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from rounds import forced_round

from dflash_gguf import native
from dflash_gguf.engine.stats import Phase
from dflash_gguf.speculative.proposers.dflash import N_RANKED
from gpu import acceptance, null_gpu
from gpu.ggml_device import GraphCounter
from gpu.limits import Moved, share_of_limit
from gpu.setting import Figures, Setting, Sizes

PHASES = ("draft", "tree", "verify", "choose", "commit", "round")
"""Phases of a round. tree: the host builds the tree. choose: the host reads the target's tokens
along the accepted path."""
N_WATCHED = 4
"""Number of rounds after the timed ones, in which captured graphs are counted."""

Milliseconds = NDArray[np.float64]


def open_pair(setting: Setting, n_ctx: int, cache_type: str = "f16") -> native.Sequence:
    """Loads the target and the drafter onto the device; returns a sequence that can draft."""
    config = setting.load_config(n_ctx=n_ctx, cache_type_k=cache_type, cache_type_v=cache_type)
    model = native.Model(str(setting.target), config)
    return native.Sequence(
        native.Engine(model, drafter=native.Drafter(str(setting.drafter), model))
    )


def close_pair(sequence: native.Sequence) -> None:
    """Frees the sequence, the engine and the models that `open_pair` loaded."""
    sequence.close()
    sequence.engine.close()
    sequence.engine.model.close()


def random_tokens(sequence: native.Sequence, n: int, seed: int) -> list[int]:
    """Returns n random token ids, without the lowest ids, which may be special tokens."""
    ids = np.random.default_rng(seed).integers(
        acceptance.FIRST_ID, sequence.engine.model.n_vocab, n
    )
    return [int(x) for x in ids]


class Driver:
    """Runs rounds on a sequence: all plain, all with chains or all with trees of one size."""

    def __init__(self, sequence: native.Sequence, kind: str, size: int = 0) -> None:
        """kind: "plain", "chain" or "tree". size: number of candidates a round."""
        self.sequence, self.kind, self.size = sequence, kind, size
        self._random = np.random.default_rng(2)
        self._last = acceptance.FIRST_ID
        if size:
            sequence.engine.reserve_verify(size + 1)

    def run(self, n_rounds: int) -> Milliseconds:
        """Runs rounds; returns the milliseconds of each phase, [n_rounds, len(PHASES)]."""
        step = self._plain if self.kind == "plain" else self._drafted
        return 1e3 * np.array([step() for _ in range(n_rounds)])

    def _plain(self) -> list[float]:
        started = perf_counter()
        rows = self.sequence.decode(self._last)
        computed = perf_counter()
        self._last = rows.argmax()
        ended = perf_counter()
        return [0.0, 0.0, computed - started, ended - computed, 0.0, ended - started]

    def _drafted(self) -> list[float]:
        sequence, is_tree = self.sequence, self.kind == "tree"
        length = min(self.size, sequence.max_draft)
        candidates = acceptance.draw(self._random, sequence.engine.model.n_vocab)
        chosen = list(acceptance.chosen(candidates, self._random))
        seconds = dict.fromkeys(PHASES, 0.0)
        clock = partial(Phase, seconds)
        with clock("round"):
            with clock("draft"):
                sequence.draft(self._last, length, N_RANKED if is_tree else 1)
            with clock("tree"):
                tree = acceptance.shape(candidates, self.kind, self.size, self._last)
            self._last = forced_round(sequence, tree, chosen, clock)
        return [seconds[name] for name in PHASES]


def most_tokens(sizes: Sizes) -> int:
    """Returns the maximum tokens that a call of `measure_rounds` appends to a sequence."""
    return (sizes.n_warm + sizes.n_rounds + N_WATCHED) * (acceptance.N_POSITIONS + 1)


def measure_rounds(driver: Driver, sizes: Sizes, gb_per_s: float) -> Figures:
    """Returns a round's mean milliseconds by phase, its moved bytes, and counts of graphs.

    submit_ms: time of handing graphs to the device. wait_ms: time of waiting for the device.
    outside_ms: all other time. built: graphs built in the timed rounds. read_bytes: bytes copied to
    the host in a round.
    """
    sequence, n_rounds = driver.sequence, sizes.n_rounds
    engine = sequence.engine
    driver.run(sizes.n_warm)
    before, calls = engine.info(), null_gpu.counts()
    arena_before = engine.bytes_of("arena")
    times = driver.run(n_rounds)
    after, called = engine.info(), null_gpu.counts()
    phases = dict(zip(PHASES, times.mean(axis=0), strict=True))
    submit, wait = ((getattr(after, x) - getattr(before, x)) / n_rounds / 1e6 for x in _CLOCKS)
    moved = Moved.of(sequence)
    is_plain = driver.kind == "plain"
    n_bytes = moved.plain if is_plain else moved.drafted(driver.size + 1)
    tokens = 1.0 if is_plain else acceptance.tokens_a_round(driver.kind, driver.size)
    with GraphCounter() as counts:
        driver.run(N_WATCHED)
    return {
        "kind": driver.kind,
        "size": driver.size,
        "position": sequence.position,
        "ms": {name: round(float(value), 4) for name, value in phases.items()},
        "median_ms": round(float(np.median(times[:, -1])), 4),
        "outside_ms": round(float(phases["round"]) - submit - wait, 4),
        "submit_ms": round(submit, 4),
        "wait_ms": round(wait, 4),
        "built": after.n_graphs_built - before.n_graphs_built,
        "arena_grew_bytes": engine.bytes_of("arena") - arena_before,
        "read_bytes": (after.bytes_read - before.bytes_read) // n_rounds,
        "captured_graphs_in_4_rounds": dict(counts),
        "tokens_a_round": round(tokens, 3),
        "tokens_per_s": round(1e3 * tokens / float(phases["round"]), 2),
        "bytes": n_bytes,
        "share_of_limit": round(share_of_limit(n_bytes, gb_per_s, float(phases["round"])), 4),
        **null_gpu.calls_a_round(calls, called, n_rounds),
    }


_CLOCKS = ("submit_ns", "wait_ns")


def settings_of(setting: Setting, budgets: Sequence[int]) -> list[tuple[str, int]]:
    """Returns the drafts to compare: ("plain", 0), and ("chain" or "tree", candidates) pairs."""
    chains = [("chain", n) for n in setting.sizes.chains]
    return [("plain", 0), *chains, *(("tree", n) for n in budgets)]
