"""What experts do to the times of passes, and whether `auto` ever loses on a mixture of experts.

    scripts/bench/moe.py MODEL.gguf [--passes 1200]
    scripts/bench/moe.py MODEL.gguf -md DRAFTER.gguf [--right 0,0.5,0.9] [--prompts 20]

Without a drafter: verifies of 1 to 16 rows of texts that touch few or many experts, in random
order, and how far their times are from what was told before each of them (`policy/costs.py`, after
the first hundred): by rows alone, and with the experts that passes touched.

With one: `auto` by plain decoding, a process for each share of right candidates, which finds
nothing measured before. Where the dice say so, the drafter's best candidate is replaced by the
token that is to come; so files of random weights will do. Both answer in turns of a round.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import auto
import numpy as np
from numpy.typing import NDArray

import dflash_gguf
from dflash_gguf import native
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Draft
from dflash_gguf.speculative.cost_model import Costs, Round
from dflash_gguf.speculative.proposers.dflash import DFlash
from dflash_gguf.speculative.proposers.proposer import Request
from dflash_gguf.speculative.tree import Tree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
N_CTX = 1024
N_PROMPT, N_PASSES, N_LEARNING = 50, 60, 100
"""Tokens before the passes of a text, passes of a text, and the first ones, which do not count."""

Tokens = NDArray[np.int64]


def texts(n_vocab: int, rng: np.random.Generator) -> dict[str, Tokens]:
    """Texts of which neighbours are alike, of few tokens, of some frequent ones, of all."""
    length = N_PROMPT + N_PASSES + SIZES[-1]
    rare = rng.integers(0, n_vocab, length)
    return {
        "one": np.full(length, rare[0]),
        "few": rng.choice(rare[:6], length),
        "frequent": rng.zipf(1.3, length) * 37 % n_vocab,
        "all": rare,
    }


def passes(path: str, n_passes: int, threads: int | None) -> dict[str, Any]:
    """Mean and median error of told times by their measured ones, as parts of these."""
    model = native.Model(path, LoadConfig(n_ctx=N_CTX, n_threads=threads, n_gpu_layers=0))
    engine = native.Engine(model)
    engine.reserve_verify(SIZES[-1])
    sequence, rng = native.Sequence(engine), np.random.default_rng(0)
    told = {"rows": Costs(), "experts": Costs()}
    errors: dict[str, list[float]] = {name: [] for name in told}
    touched: dict[str, dict[int, list[int]]] = {}
    for number in range(-(-n_passes // N_PASSES)):
        named = list(texts(model.n_vocab, rng).items())
        name, text = named[number % len(named)]
        sequence.reset()
        sequence.prefill(text[:N_PROMPT].tolist())
        for at in range(N_PROMPT, N_PROMPT + N_PASSES):
            n_rows = int(rng.choice(SIZES))
            started = time.perf_counter()
            sequence.verify(text[at : at + n_rows].tolist()).argmax()
            done = Round(at, n_drafted=n_rows - 1, n_tokens=1)
            done.pass_s = time.perf_counter() - started
            sequence.commit(1)
            touched.setdefault(name, {}).setdefault(n_rows, []).append(engine.n_experts)
            for kind, costs in told.items():
                if costs.n_observed >= N_LEARNING:
                    error = costs.pass_s(at, n_rows) / done.pass_s - 1.0
                    errors[kind].append(abs(error))
                done.n_experts = engine.n_experts if kind == "experts" else 0
                costs.observe(done)
    for name, by_rows in touched.items():
        means = "  ".join(f"{n}: {np.mean(by_rows[n]):.0f}" for n in sorted(by_rows))
        print(f"{name:10} experts touched by rows  {means}")
    found = {
        kind: {"mean": round(float(np.mean(x)), 4), "median": round(float(np.median(x)), 4)}
        for kind, x in errors.items()
    }
    for kind, figures in found.items():
        print(f"told by {kind:8} mean error {figures['mean']:.4f}, median {figures['median']:.4f}")
    cost_ms = 1000.0 * told["experts"].experts.cost_s
    return {"model": os.path.basename(path), "error": found, "expert_ms": round(cost_ms, 4)}


class Partly(DFlash):
    """A drafter of whose best candidates a share is right."""

    def __init__(self, max_draft: int, share: float) -> None:
        super().__init__(max_draft)
        self._share, self._dice = share, np.random.default_rng(0)
        self.answer: list[int] = []
        """Prompt and answer."""

    def _tree(self, request: Request, draft: Draft) -> Tree:
        coming = self.answer[len(request.seen) :][: len(draft.tokens)]
        for position, token in enumerate(coming):
            if self._dice.random() < self._share:
                draft.tokens[position, 0] = token
                draft.logits[position, 0] = draft.logits[position].max() + 9.0
                draft.log_sum_exp[position] = draft.logits[position, 0]
        return super()._tree(request, draft)


def answers(args: argparse.Namespace, share: float) -> dict[str, Any]:
    """`auto` and plain decoding in this process."""
    settings = ("none", "auto")
    first, second = decoders = [
        dflash_gguf.load(args.model, drafter=args.drafter, n_ctx=N_CTX, n_threads=args.threads)
        for _ in settings
    ]
    gc.freeze()  # as dflash-run does
    auto.TURN_S = 0.0  # rounds are long
    proposers = first._drafting.proposers
    at = next(i for i, x in enumerate(proposers) if isinstance(x, DFlash))
    drafter = proposers[at] = Partly(proposers[at].max_draft, share)
    # Where its weights lie makes one of two equal decoders faster: they change places, and what one
    # learns the other knows.
    second._drafting.proposers, second._drafting.known = proposers, first._drafting.known
    rng, n_vocab = np.random.default_rng(1), first.model.n_vocab
    ratios: list[float] = []
    seconds = dict.fromkeys(settings, 0.0)
    rounds: dict[str, int] = {}
    for number in range(args.prompts):
        prompt = rng.integers(0, n_vocab, 40).tolist()
        how: dict[str, Any] = {"max_tokens": args.tokens, "temperature": 1.0, "seed": number}
        how["ignore_eos"] = True
        plain = first.generate(prompt, draft="none", **how)
        drafter.answer = [*prompt, *plain.tokens]
        both = dict(zip(settings, decoders[:: (-1) ** number], strict=True))
        streams = {x: decoder.stream(prompt, draft=x, **how) for x, decoder in both.items()}
        results = auto.Turns(streams).run(number // 2)
        for name, result in results.items():
            if result.tokens != plain.tokens:
                raise SystemExit(f"prompt {number}: {name} says something else")
            seconds[name] += result.decode_s
        ratios.append(results["none"].decode_s / results["auto"].decode_s)
        for kind, count in (results["auto"].rounds_by_draft or {}).items():
            rounds[kind] = rounds.get(kind, 0) + count
    return {
        "right": share,
        "answers": args.prompts,
        "plain tokens/s": round(args.prompts * args.tokens / seconds["none"], 1),
        "all": round(seconds["none"] / seconds["auto"], 4),
        "interval": [round(x, 4) for x in ratio_interval(ratios)],
        "first": round(ratios[0], 4),
        "rounds": dict(sorted(rounds.items(), key=lambda item: -item[1])[:8]),
    }


def in_process(args: argparse.Namespace, share: float) -> dict[str, Any]:
    """The same in a new process that finds nothing measured before."""
    command = [sys.executable, __file__, args.model, "-md", args.drafter, "--one", str(share)]
    command += ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    command += [] if args.threads is None else ["-t", str(args.threads)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-md", "--drafter", metavar="DRAFTER.gguf")
    parser.add_argument("--passes", type=int, default=1200)
    parser.add_argument("--right", default="0,0.5,0.9", help="shares of right candidates")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(answers(args, args.one)))
    elif args.drafter is None:
        print(json.dumps(passes(args.model, args.passes, args.threads)))
    else:
        rows = []
        for share in map(float, args.right.split(",")):
            row = in_process(args, share)
            rows.append(row)
            mean, low, high = row["interval"]
            print(
                f"{share:4.0%} right: {row['all']:.3f} of plain decoding ({mean:.3f}, {low:.3f} to "
                f"{high:.3f}; first {row['first']:.3f}), rounds {row['rounds']}",
                flush=True,
            )
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
