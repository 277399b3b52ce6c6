"""Times drafting rounds of equal work in our engine and in llama.cpp's draft-dflash and draft-mtp.

llama.cpp runs in a process of its own, peer-rounds (peer/rounds.cpp). In both, the target is forced
to choose given tokens, so that each round accepts equally many.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from build_peer import OURS, build, can_repack
from numpy.typing import NDArray
from turns import ratio

from dflash_gguf import native
from dflash_gguf.engine.stats import Phase
from dflash_gguf.speculative.speculator import Clock, untimed
from dflash_gguf.speculative.tree import Tree

GREEDY = ("--samplers", "top_k", "--top-k", "1")
"""The fastest sampler options of llama.cpp for greedy decoding."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Answer of peer-rounds. rounds: (earlier tokens, drafted, accepted). us: microseconds."""

    tokens: list[int]
    rounds: list[tuple[int, int, int]]
    us: Mapping[str, list[int]]


class Peer:
    """A target and a drafter, loaded in a peer-rounds process."""

    def __init__(
        self,
        target: Path,
        drafter: Path | None,
        *,
        n_draft: int,
        n_ctx: int,
        options: Sequence[str] = (),
        tools: Path | None = None,
        device: str | None = None,
        module: str | None = None,
    ) -> None:
        """drafter: a DFlash drafter, None for the target's MTP layer. n_draft: tokens of a draft.

        options: further llama.cpp arguments. tools: folder of peer-rounds, None to build it.
        device: ggml's name of a GPU, None for the CPU; module: file of its backend.
        """
        place = ["-ngl", "0", "-ngld", "0"]
        if device is not None:
            # llama.cpp loads the backend of GGML_BACKEND_PATH only if a device is named.
            place = ["--device", device, "-devd", device, "-ngl", "99", "-ngld", "99"]
            place += ["--fit", "off"]
        program = (tools or build([OURS])) / OURS
        command = [str(program), "-m", str(target), "--spec-draft-n-max", str(n_draft)]
        if drafter is None:
            command += ["--spec-type", "draft-mtp"]
        else:
            command += ["--spec-type", "draft-dflash", "-md", str(drafter)]
        command += ["-c", str(n_ctx), "-b", "512", "-fa", "on", *place]
        command += [*GREEDY, "--log-disable", *([] if can_repack() else ["--no-repack"]), *options]
        environment = os.environ | ({"GGML_BACKEND_PATH": module} if module else {})
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the peer-rounds process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._stderr.close()

    def answer(
        self,
        prompt: Sequence[int],
        n_predict: int,
        *,
        text: Sequence[int] | None = None,
        accept: int | None = None,
        is_plain: bool = False,
    ) -> PeerAnswer:
        """Answers a prompt. text: forced answer. accept: drafted tokens that each round accepts.

        is_plain: True to draft nothing.
        """
        job: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "plain": is_plain,
        }
        if text is not None:
            job["text"] = list(text)
        if accept is not None:
            job["accept"] = accept
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("peer-rounds has no pipes")
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            raise SystemExit(f"{OURS} ended: {self._stderr.read()[-2000:]}")
        found = json.loads(line)
        rounds = [(before, drafted, accepted) for before, drafted, accepted in found["rounds"]]
        return PeerAnswer(found["tokens"], rounds, found["us"])


PHASES = ("draft", "inject", "verify", "commit", "host", "round")
"""Phases of a round. inject: the drafter computes its K/V from the target's hidden states, which
our engine does in draft. host: all other time."""

Milliseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forced:
    """Input of equal rounds in both engines. text: answer that the target is forced to choose.

    n_draft, accept: drafted and accepted tokens of each round; 0 drafted: plain steps.
    """

    prompt: list[int]
    text: list[int]
    n_draft: int
    accept: int

    @classmethod
    def random(
        cls, n_vocab: int, n_prompt: int, n_rounds: int, n_draft: int, accept: int, seed: int
    ) -> Forced:
        """Draws a random prompt, and random forced tokens for n_rounds rounds of n_draft tokens."""
        n_text = 1 + n_rounds * (accept + 1) + n_draft
        # Excludes the lowest and highest ids, which may be special tokens.
        ids = np.random.default_rng(seed).integers(300, min(n_vocab, 40000), n_prompt + n_text)
        return cls(ids[:n_prompt].tolist(), ids[n_prompt:].tolist(), n_draft, accept)

    def candidates(self, n_chosen: int) -> list[int]:
        """Returns a draft after n_chosen tokens: `accept` right candidates, the others wrong."""
        wanted = self.text[n_chosen : n_chosen + self.n_draft]
        return [w if i < self.accept else (w + 1) % 8 for i, w in enumerate(wanted)]


class Engine(Protocol):
    """An engine that runs rounds with forced tokens."""

    def rounds(self, work: Forced) -> Milliseconds:
        """Returns milliseconds [n_rounds, len(PHASES)] of all rounds that draft n_draft tokens."""


class Theirs:
    """llama.cpp's draft-dflash or draft-mtp, in a peer-rounds process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def rounds(self, work: Forced) -> Milliseconds:
        """Runs the rounds; adds the first forced token to the prompt, as our prefill samples it."""
        prompt, text = [*work.prompt, work.text[0]], work.text[1:]
        is_plain = work.n_draft == 0
        answer = self._peer.answer(
            prompt, len(text), text=text, accept=work.accept, is_plain=is_plain
        )
        us = {name: np.array(values, dtype=np.float64) for name, values in answer.us.items()}
        full = [i for i, (_, n_drafted, _) in enumerate(answer.rounds) if n_drafted == work.n_draft]
        return _table(us, us["total"])[full] / 1e3


def _table(phases: Mapping[str, NDArray[np.float64]], total: NDArray[np.float64]) -> Milliseconds:
    known = [phases[name] for name in PHASES[:4]]
    return np.stack([*known, total - sum(known), total], axis=1)


def medians(runs: Sequence[Milliseconds]) -> dict[str, float]:
    """Returns the median milliseconds of each phase over the rounds of all runs."""
    row = np.median(np.concatenate(runs), axis=0)
    return dict(zip(PHASES, np.round(row, 3).tolist(), strict=True))


def equal_work(tables: Sequence[Sequence[Milliseconds]]) -> dict[str, Any]:
    """Returns both engines' median milliseconds by phase, and our ratio to llama.cpp's rounds."""
    by_pair = [[np.median(run[:, -1]) for run in side] for side in tables]
    return {"ours": medians(tables[0]), "llama.cpp": medians(tables[1]), **ratio(*by_pair)}


def forced_round(
    sequence: native.Sequence, tree: Tree, chosen: Sequence[int], clock: Clock = untimed
) -> int:
    """Verifies a tree and commits the path of forced tokens, whatever the target's choices are.

    chosen: forced token after each depth of the tree; the target chooses after deeper nodes. clock:
    times "verify", "choose" and "commit". Returns the target's token after the path's last node.
    """
    last = tree.tokens[0]

    def choose(node: int) -> int:
        nonlocal last
        with clock("choose"):
            last = rows.argmax(node)
        depth = tree.depths[node]
        return chosen[depth] if depth < len(chosen) else last

    with clock("verify"):
        if tree.is_chain:
            rows = sequence.verify(tree.tokens)
        else:
            rows = sequence.verify_tree(tree.tokens, tree.parents)
    path, _ = tree.follow(choose, lambda _: False)
    with clock("commit"):
        if tree.is_chain:
            sequence.commit(len(path))
        else:
            sequence.commit_path(path)
    return last


class Ours:
    """This project's engine, called as its own decode loop calls it."""

    def __init__(self, sequence: native.Sequence) -> None:
        self.sequence = sequence

    def rounds(self, work: Forced) -> Milliseconds:
        """Empties the sequence, prefills the prompt and runs the rounds."""
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
                if work.n_draft:
                    with clock("draft"):
                        sequence.draft(root, work.n_draft)
                    tree = Tree.of([root, *work.candidates(n_chosen)])
                    forced_round(sequence, tree, coming, clock)
                else:
                    with clock("verify"):
                        sequence.decode(root).argmax()
            known = seconds["draft"] + seconds["verify"] + seconds["commit"]
            seconds["host"] = seconds["round"] - known
            rows.append([seconds[name] for name in PHASES])
            n_chosen += work.accept + 1
        return 1e3 * np.array(rows)

    def bare_draft_ms(self, last_token: int, n_draft: int) -> float:
        """Returns milliseconds of a draft for which the drafter needs no K/V of new features."""
        times = []
        for _ in range(25):
            self.sequence.verify([last_token] * (n_draft + 1))
            self.sequence.commit(0)
            started = perf_counter()
            self.sequence.draft(last_token, n_draft)
            times.append(perf_counter() - started)
        return 1e3 * float(np.median(times))
