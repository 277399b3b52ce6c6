"""Gets the prompts that a training's arguments name, and the target's answers to them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import engine, pieces, prompts
from .answers import Answer, generate, save_answers, without_loops
from .target import for_answers


def texts_of(args: argparse.Namespace, target: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Returns training and held-out prompts as user turns, or plain; ValueError if too few."""
    if args.python:
        training, held_out = prompts.from_python(args.seed)
    else:
        found = (
            prompts.from_file(args.prompts)
            if args.prompts
            else prompts.from_chat(
                target, tokenizer, args.answers + args.held_out, args.prompt_tokens // 2, args.seed
            )
        )
        held_out, training = found[: args.held_out], found[args.held_out :]
    if not training or len(held_out) < args.held_out:
        raise ValueError(
            f"{len(training)} prompts to train on and {len(held_out)} held out: at least 1 and "
            f"{args.held_out} are needed; give more prompts or a smaller --held-out"
        )
    before, after = "", ""
    if not args.plain and getattr(tokenizer, "chat_template", None):
        before, after = prompts.chat_frame(tokenizer)
    if args.instruction:
        before += args.instruction + "\n\n"
    training, held_out = (
        [before + text + after for text in texts] for texts in (training, held_out)
    )
    return training[: args.answers], held_out[: args.held_out]


HELD_OUT_EVERY = 40
"""Number of prompts of pieces, of which one is held out."""


def from_pieces(paths: Sequence[Path], n: int, n_held_out: int) -> tuple[list[Answer], ...]:
    """Returns up to n answers to train on, and greedy held-out ones; ValueError if too few.

    Answers to one prompt, and to its answer, are all held out or none.
    """
    stored = [x for path in paths for x in pieces.load(path)]
    stored.sort(key=lambda x: (x.index, x.turn))
    training, held_out = [], []
    for x in stored:
        is_held_out = x.index % HELD_OUT_EVERY == 0
        if not is_held_out or x.temperature == 0:
            (held_out if is_held_out else training).append(Answer(x.tokens, x.n_prompt))
    if not training or len(held_out) < n_held_out:
        raise ValueError(
            f"--pieces: {len(training)} answers to train on and {len(held_out)} greedy ones held "
            f"out: at least 1 and {n_held_out} are needed; give more files or a smaller --held-out"
        )
    return training[:n], held_out[:n_held_out]


def make_answers(args: argparse.Namespace, target: Any, tokenizer: Any) -> None:
    """Writes the answers to train on (answers.json) and greedy held-out ones (held-out.json)."""
    if args.pieces:
        found = from_pieces(args.pieces, args.answers, args.held_out)
        for name, answers in zip(("answers", "held-out"), found, strict=True):
            save_answers(args.out / f"{name}.json", answers)
        return
    training, held_out = (
        _ids(args, tokenizer, texts) for texts in texts_of(args, target, tokenizer)
    )
    drawn = spread(len(training), args.sampled if args.temperature > 0 else 0.0)
    greedy = sorted(set(range(len(training))).difference(drawn))
    fast = for_answers(target)
    answers: dict[int, Answer] = {}
    for chosen, temperature in ((greedy, 0.0), (drawn, args.temperature)):
        ids = [training[i] for i in chosen]
        found = _answers(args, fast, tokenizer, ids, temperature)
        answers.update(zip(chosen, found, strict=True))
    in_order = [without_loops(answers[i]) for i in range(len(training))]
    save_answers(args.out / "answers.json", in_order)
    save_answers(args.out / "held-out.json", _answers(args, target, tokenizer, held_out, 0.0))
    for path in args.out.glob("drawn-*.jsonl"):  # answers that engine.py saved for interrupted runs
        path.unlink()


def spread(n: int, share: float) -> list[int]:
    """Returns evenly spaced numbers of 0..n-1, as many as a share of n."""
    return [i for i in range(n) if int((i + 1) * share) > int(i * share)]


def _ids(args: argparse.Namespace, tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    ids = [tokenizer(text, add_special_tokens=args.plain).input_ids for text in texts]
    if args.plain:
        ids = [row[-args.prompt_tokens :] for row in ids if row]
    else:  # leaves out long chat turns: a cut would break the template
        ids = [row for row in ids if 0 < len(row) <= args.prompt_tokens]
    if not ids:
        raise ValueError(f"no prompt has 1 to {args.prompt_tokens} tokens; raise --prompt-tokens")
    return ids


def _answers(
    args: argparse.Namespace,
    target: Any,
    tokenizer: Any,
    ids: Sequence[Sequence[int]],
    temperature: float,
) -> list[Answer]:
    if args.gguf is not None:
        return engine.generate(
            args.gguf,
            ids,
            n_new=args.new_tokens,
            temperature=temperature,
            seed=args.seed,
            n_threads=args.threads,
            folder=args.out,
        )
    stop = {tokenizer.eos_token_id}
    configured = target.generation_config.eos_token_id
    stop |= set(configured if isinstance(configured, list) else [configured])
    return generate(
        target,
        ids,
        n_new=args.new_tokens,
        n_batch=args.batch,
        stop_tokens=stop - {None},
        pad_token=tokenizer.eos_token_id,
        temperature=temperature,
        seed=args.seed,
        n_threads=args.threads if args.device == "cpu" else 1,
    )
