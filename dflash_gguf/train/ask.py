"""Gets the prompts that a training's arguments name, and the target's answers to them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..decoder import Decoder
from . import pieces, prompts
from .answers import KEPT, Answer, generate, save_answers, without_loops

HELD_OUT_EVERY = 40
"""Number of prompts of pieces, of which one is held out."""


def from_pieces(paths: Sequence[Path], n: int, n_held_out: int) -> tuple[list[Answer], ...]:
    """Returns up to n answers to train on, and greedy held-out ones; ValueError if too few.

    Answers to one prompt, and to its answer, are all held out or none.
    """
    stored = [x for path in paths for x in pieces.load(path)]
    stored.sort(key=lambda x: (x.index, x.turn))
    training: list[Answer] = []
    held_out: list[Answer] = []
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


def make_answers(args: argparse.Namespace, decoder: Decoder) -> tuple[list[Answer], list[Answer]]:
    """Returns the target's answers to train on, and greedy held-out ones; ValueError if too few.

    Finished answers are saved in the output folder until `save` has written all.
    """
    n = args.answers + args.held_out
    texts = (
        prompts.from_file(args.prompts)
        if args.prompts
        else prompts.from_chat(decoder, n, args.prompt_tokens // 2, args.seed, args.out)
    )
    ids = prompt_ids(args, decoder, texts)
    held_out, training = ids[: args.held_out], ids[args.held_out : n]
    if not training or len(held_out) < args.held_out:
        raise ValueError(
            f"{len(training)} prompts to train on and {len(held_out)} held out, of 1 to "
            f"{args.prompt_tokens} tokens: at least 1 and {args.held_out} are needed; give more "
            "prompts, a larger --prompt-tokens or a smaller --held-out"
        )
    drawn = spread(len(training), args.sampled if args.temperature > 0 else 0.0)
    greedy = sorted(set(range(len(training))).difference(drawn))
    answers: dict[int, Answer] = {}
    for chosen, temperature in ((greedy, 0.0), (drawn, args.temperature)):
        found = generate(
            decoder,
            [training[i] for i in chosen],
            n_new=args.new_tokens,
            temperature=temperature,
            seed=args.seed,
            folder=args.out,
        )
        answers.update(zip(chosen, found, strict=True))
    return (
        [without_loops(answers[i]) for i in range(len(training))],
        generate(decoder, held_out, n_new=args.new_tokens, folder=args.out),
    )


def save(folder: Path, training: Sequence[Answer], held_out: Sequence[Answer]) -> None:
    """Writes answers.json and held-out.json, and removes the answers of interrupted runs."""
    save_answers(folder / "answers.json", training)
    save_answers(folder / "held-out.json", held_out)
    for path in folder.glob(f"{KEPT}*.jsonl"):
        path.unlink()


def spread(n: int, share: float) -> list[int]:
    """Returns int(n * share) evenly spaced integers from 0 to n - 1."""
    return [i for i in range(n) if int((i + 1) * share) > int(i * share)]


def prompt_ids(args: argparse.Namespace, decoder: Decoder, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of texts as user turns, or as plain text without a chat template.

    A plain text keeps its last --prompt-tokens tokens; a turn with more tokens is left out, as a
    cut would break the template.
    """
    if args.instruction:
        texts = [f"{args.instruction}\n\n{text}" for text in texts]
    if args.plain or not prompts.has_template(decoder):
        rows = [decoder.tokenize(text)[-args.prompt_tokens :] for text in texts]
    else:
        rows = [list(decoder.chat_prompt(text)) for text in texts]
    return [row for row in rows if 0 < len(row) <= args.prompt_tokens]
