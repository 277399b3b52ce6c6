"""Forced rounds of both engines: the same tokens drafted, verified and accepted, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from peer_rounds import Peer
from plain import median_interval

from dflash_gguf import native
from dflash_gguf.bench.measure import verify
from dflash_gguf.engine.account import Phase
from dflash_gguf.speculative.speculator import Rows
from dflash_gguf.speculative.tree import Tree

PHASES = ("draft", "inject", "verify", "commit", "host", "round")
"""inject: the drafter takes up rows of the round before, which with us is part of the draft; host:
choices and all else."""

Milliseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forced:
    """What both engines do. text: what the target is made to choose; accept: in each round."""

    prompt: list[int]
    text: list[int]
    n_draft: int
    accept: int

    @classmethod
    def random(
        cls, n_vocab: int, n_prompt: int, n_rounds: int, n_draft: int, accept: int, seed: int
    ) -> Forced:
        """Random tokens for so many full rounds."""
        n_text = 1 + n_rounds * (accept + 1) + n_draft
        # the lowest and highest ids may have a meaning of their own
        ids = np.random.default_rng(seed).integers(300, min(n_vocab, 40000), n_prompt + n_text)
        return cls(ids[:n_prompt].tolist(), ids[n_prompt:].tolist(), n_draft, accept)

    def candidates(self, n_chosen: int) -> list[int]:
        """What is verified after n_chosen tokens of the text."""
        wanted = self.text[n_chosen : n_chosen + self.n_draft]
        return [w if i < self.accept else (w + 1) % 8 for i, w in enumerate(wanted)]


class Engine(Protocol):
    """What is measured."""

    def rounds(self, work: Forced) -> Milliseconds:
        """Times of full rounds, [n_rounds, len(PHASES)]."""


class Theirs:
    """llama.cpp."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def rounds(self, work: Forced) -> Milliseconds:
        """Runs the work; the first token is given, as ours comes from the prefill."""
        prompt, text = [*work.prompt, work.text[0]], work.text[1:]
        answer = self._peer.answer(prompt, len(text), text=text, accept=work.accept)
        us = {name: np.array(values, dtype=np.float64) for name, values in answer.us.items()}
        full = [i for i, (_, n_drafted, _) in enumerate(answer.rounds) if n_drafted == work.n_draft]
        return _table(us, us["total"])[full] / 1e3


def _table(phases: Mapping[str, NDArray[np.float64]], total: NDArray[np.float64]) -> Milliseconds:
    """Times [n_rounds] as a table; the host has what the other phases leave."""
    known = [phases[name] for name in PHASES[:4]]
    return np.stack([*known, total - sum(known), total], axis=1)


def medians(runs: Sequence[Milliseconds]) -> dict[str, float]:
    """Median milliseconds of a round of all runs by phase."""
    row = np.median(np.concatenate(runs), axis=0)
    return dict(zip(PHASES, np.round(row, 3).tolist(), strict=True))


def equal_work(tables: Sequence[Sequence[Milliseconds]]) -> dict[str, Any]:
    """Median milliseconds of ours and theirs by phase, and the ratio of their rounds.

    tables: a list of runs for each engine, run i of one beside run i of the other.
    """
    by_pair = [np.array([np.median(run[:, -1]) for run in side]) for side in tables]
    median, low, high = median_interval(by_pair[0] / by_pair[1])
    return {
        "ours": medians(tables[0]),
        "llama.cpp": medians(tables[1]),
        "ratio": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def _forced(coming: Sequence[int], rows: Rows, node: int) -> int:
    """Reads the target's token after a node of a chain, and takes the given one."""
    rows.argmax(node)
    return coming[node]


class Ours:
    """This project's core, called as the decode loop calls it."""

    def __init__(self, sequence: native.Sequence) -> None:
        self.sequence = sequence

    def rounds(self, work: Forced) -> Milliseconds:
        """Runs the work."""
        sequence, n_chosen = self.sequence, 1
        sequence.reset()
        sequence.prefill(work.prompt).argmax()
        rows = []
        while n_chosen + work.n_draft <= len(work.text):
            root = work.text[n_chosen - 1]
            coming = [*work.text[n_chosen : n_chosen + work.n_draft], -1]
            seconds = dict.fromkeys(PHASES, 0.0)
            clock = partial(Phase, seconds)
            with clock("round"):
                with clock("draft"):
                    sequence.draft(root, work.n_draft)
                tree = Tree.of([root, *work.candidates(n_chosen)])
                verify(sequence, tree, partial(_forced, coming), lambda _: False, clock)
            known = seconds["draft"] + seconds["verify"] + seconds["commit"]
            seconds["host"] = seconds["round"] - known
            rows.append([seconds[name] for name in PHASES])
            n_chosen += work.accept + 1
        return 1e3 * np.array(rows)

    def bare_draft_ms(self, last_token: int, n_draft: int, n_runs: int = 25) -> float:
        """Median of a draft for which nothing new is taken up, each after a verify as in a round.

        Drafts in a row would find the drafter's weights in the cache.
        """
        times = []
        for _ in range(n_runs):
            self.sequence.verify([last_token] * (n_draft + 1))
            self.sequence.commit(0)
            started = perf_counter()
            self.sequence.draft(last_token, n_draft)
            times.append(perf_counter() - started)
        return 1e3 * float(np.median(times))
