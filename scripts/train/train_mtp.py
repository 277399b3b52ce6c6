"""Trains an MTP layer for a GGUF target of architecture qwen35, on answers of the target itself.

    python scripts/train/train_mtp.py TARGET.gguf OUT --prompts prompts.txt

OUT becomes a folder with two files: TARGET-mtp.gguf, the target with the layer, which drafts with
-m alone, and mtp-TARGET.gguf, the layer for -md. A repeated command takes the answers and hidden
states that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dflash_gguf.convert.errors import ConvertError
from torch import Tensor
from torch.nn import functional as F

import dflash_gguf
from dflash_gguf._files import write_text
from dflash_gguf.train.answers import Answer
from dflash_gguf.train.checkpoint import pick
from dflash_gguf.train.command import check_numbers, remember, sole_user
from dflash_gguf.train.features import AnswerFeatures
from dflash_gguf.train.parallel import Workers
from dflash_gguf.train.schedule import Optimizers
from dflash_gguf.train.training import load_decoder, prepare_answers, prepare_features
from dflash_gguf.train.words import most_frequent

sys.path.append(str(Path(__file__).resolve().parents[1]))
from train.mtp import N_STEPS, GgufTarget, chain_losses

PIECE = 4
"""Answers that a thread computes at once."""
STEP_DECAY = 0.8
"""Weight of the loss of a chain's step, relative to that of the step before."""
LOG_STEPS = 20


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(pieces=None, instruction=None, temperature=0.0)
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET.gguf", help="the target, without an MTP layer")
    add("out", type=Path, metavar="OUT", help="output folder")
    add("--prompts", type=Path, metavar="FILE", required=True, help="text or .jsonl file")
    add("--plain", action="store_true", help="continue the prompts as text")
    add("--answers", type=int, default=4000, help="answers to train on")
    add("--held-out", type=int, default=64, help="answers to measure acceptance on")
    add("--prompt-tokens", type=int, default=256, help="maximum tokens of a prompt")
    add("--new-tokens", type=int, default=256, help="maximum tokens of an answer")
    add("--steps", type=int, default=400, help="number of updates")
    add("--falling", type=int, default=200, help="updates at the end with falling learning rate")
    add("--sequences", type=int, default=24, help="answers per update")
    add("--draft-vocab", type=int, metavar="N", help="draft the N most frequent tokens of answers")
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=2)
    return parser.parse_args(arguments)


class Training:
    """A layer in training, its target, and answers with their hidden states."""

    def __init__(self, args: argparse.Namespace, target: GgufTarget, data: AnswerFeatures) -> None:
        self.args, self.target, self.data = args, target, data
        self.usable = [
            i for i, x in enumerate(data.answers) if len(x.tokens) - x.n_prompt > N_STEPS
        ]
        if not self.usable:
            raise ValueError(f"no answer has more than {N_STEPS} tokens; raise --new-tokens")
        self.model = target.new_layer(args.seed)
        self.layer = self.model.layers[0]
        self.workers = Workers(self.layer, args.threads)
        self.optimizers = Optimizers(
            self.layer,
            n_steps=args.steps,
            warmup=20,
            decay=args.falling,
            muon_rate=5e-3,
            adam_rate=2e-3,
        )

    def update(self, step: int) -> list[float]:
        """Runs one update; returns its loss, and the share of right tokens by step of a chain."""
        n, answers = self.args.sequences, self.data.answers
        order = [self.usable[i] for i in pick(len(self.usable), self.args.seed, step * n, n)]
        order.sort(key=lambda i: len(answers[i].tokens))
        pieces = [order[i : i + PIECE] for i in range(0, n, PIECE)]
        n_rows = sum(len(answers[i].tokens) - answers[i].n_prompt for i in order)
        logs = self.workers.gradients(pieces, self.loss, 1 / n_rows) / n_rows
        if not math.isfinite(float(logs[0])):
            raise ArithmeticError(f"the loss is {float(logs[0])} at step {step + 1}")
        torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        self.workers.alone(partial(self.optimizers.step, step))
        means: list[float] = logs.tolist()
        return means

    def loss(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the summed loss of answers; then the same with the right tokens of each step."""
        tokens, hidden = self.data.batch(chosen)
        positions = torch.arange(tokens.shape[1])
        answers = [self.data.answers[i] for i in chosen]
        begins = torch.tensor([[x.n_prompt] for x in answers])
        ends = torch.tensor([[len(x.tokens)] for x in answers])
        is_wanted = (begins <= positions) & (positions < ends)
        right = []

        def of_step(step: int, left: Tensor) -> Tensor:
            is_row = is_wanted[:, step + 1 :]
            logits = F.linear(left[:, :-1][is_row], self.target.head)
            wanted = tokens[:, step + 1 :][is_row]
            right.append((logits.argmax(-1) == wanted).sum())
            return F.cross_entropy(logits, wanted, reduction="sum") * STEP_DECAY ** (step - 1)

        value = chain_losses(self.model, self.target.embeddings[tokens], hidden, of_step)
        return value, torch.stack([value.detach(), *right])


def measure(path: Path, answers: list[Answer], n_threads: int) -> float:
    """Returns tokens a round of greedy chains of N_STEPS; ValueError if an answer changes."""
    n_rounds = n_tokens = 0
    n_ctx = max(len(answer.tokens) for answer in answers) + N_STEPS + 1
    with dflash_gguf.load(path, n_ctx=n_ctx, n_threads=n_threads) as decoder:
        for answer in answers:
            prompt, wanted = answer.tokens[: answer.n_prompt], answer.tokens[answer.n_prompt :]
            result = decoder.generate(
                prompt,
                max_tokens=len(wanted),
                temperature=0.0,
                draft="chain",
                draft_type="mtp",
                draft_max=N_STEPS,
            )
            if result.tokens != wanted:
                raise ValueError(f"{path}: drafts changed an answer")
            n_rounds, n_tokens = n_rounds + result.rounds, n_tokens + result.n_decoded
    return n_tokens / n_rounds


def run(args: argparse.Namespace) -> None:
    """Runs a whole training; raises ValueError or OSError for unusable arguments or files."""
    check_numbers(args)
    target = GgufTarget(args.target)
    with sole_user(args.out):
        remember(args)
        train(args, target)


def train(args: argparse.Namespace, target: GgufTarget) -> None:
    """Trains a layer in a folder that no other process uses."""
    torch.set_num_threads(1)  # parallel.py has threads of its own
    with load_decoder(args) as decoder:
        answers, held_out = prepare_answers(args, lambda: decoder)
        path, taps = args.out / "answers.features", [decoder.model.n_layer + 1]
        n_embd = target.embeddings.shape[1]
        data = prepare_features(path, answers, taps, n_embd, lambda: decoder)
        training = Training(args, target, data)
    drafted: list[int] = []
    if args.draft_vocab:
        texts = (answer.tokens[answer.n_prompt :] for answer in answers)
        drafted = most_frequent(texts, args.draft_vocab).tolist()
    whole, alone = args.out / f"{args.target.stem}-mtp.gguf", args.out / f"mtp-{args.target.name}"
    recent: list[list[float]] = []
    for step in range(args.steps):
        recent.append(training.update(step))
        if step % LOG_STEPS == LOG_STEPS - 1 or step + 1 == args.steps:
            means = " ".join(f"{x:.3f}" for x in np.mean(recent, axis=0))
            print(f"{time.strftime('%H:%M:%S')} step {step + 1} loss, right {means}", flush=True)
            recent.clear()
            target.write(whole, training.layer, drafted, is_alone=False)
            target.write(alone, training.layer, drafted, is_alone=True)
    figures = {
        "tau": round(measure(whole, held_out, args.threads), 3),
        "training_tokens": sum(len(x.tokens) - x.n_prompt for x in answers),
        "parameters": sum(p.numel() for p in training.layer.parameters()),
    }
    write_text(args.out / "training.json", json.dumps(figures))
    print(json.dumps(figures))


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        run(parse(arguments))
    except (ValueError, OSError, ArithmeticError, ConvertError, dflash_gguf.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
