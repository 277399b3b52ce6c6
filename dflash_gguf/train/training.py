"""A whole training of a drafter: answers, features, updates, file and figures."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from .._files import write_text
from ..config import DecodeConfig
from ..convert.arch import Options
from ..convert.conversion import prepare as plan_conversion
from ..convert.write import write_gguf
from ..decoder import Decoder
from ..loading import load
from . import ask, features
from .acceptance import measure, prompt_lookup, repeated_share
from .answers import Answer, load_answers
from .block_trainer import BlockRecipe, BlockTrainer
from .chain_trainer import ChainTrainer, tau_of
from .curve import draw
from .drafter import BlockModel, even_start, new_drafter, take_weights
from .fit import History, Recipe, Trainer
from .mask_token import mask_token_of
from .memory import CPU_PIECE_BYTES, free_bytes, piece_size
from .mtp import GgufTarget
from .target import read_embeddings, read_head, read_sizes
from .words import most_frequent

N_AT_ONCE = 16
"""Number of answers that are generated at once."""
N_SAMPLED = 4096
"""Tokens whose features give the scales of all features."""
ROUND_UP = 64
"""K/V cells that the last page of an answer may leave unused."""
Trained = tuple[Trainer[Any], Sequence[Answer], dict[str, Any]]
"""A finished trainer, the held-out answers, and further entries of training.json."""


def load_decoder(args: argparse.Namespace) -> Decoder:
    """Loads the target for answers and hidden states."""
    each = args.prompt_tokens + args.new_tokens + ROUND_UP
    options: dict[str, Any] = {"n_threads": args.threads} if args.threads else {}
    with warnings.catch_warnings():
        # n_ctx is shared by all answers, so no answer exceeds the trained context.
        warnings.filterwarnings("ignore", message="n_ctx is .*, the model was trained for")
        return load(args.target, n_ctx=N_AT_ONCE * each, n_parallel=N_AT_ONCE, mtp=False, **options)


def prepare_answers(
    args: argparse.Namespace, decoder: Callable[[], Decoder]
) -> tuple[list[Answer], list[Answer]]:
    """Returns answers to train on and held-out ones; makes those that the folder lacks."""
    if not (args.out / "held-out.json").exists():
        if args.pieces:
            found = ask.from_pieces(args.pieces, args.answers, args.held_out)
        else:
            found = ask.make_answers(args, decoder())
        ask.save(args.out, *found)
    return load_answers(args.out / "answers.json"), load_answers(args.out / "held-out.json")


def prepare_features(
    path: Path,
    answers: Sequence[Answer],
    taps: Sequence[int],
    n_embd: int,
    decoder: Callable[[], Decoder],
    *,
    with_head_input: bool = False,
) -> features.AnswerFeatures:
    """Returns the hidden states of answers at `taps`; computes them if the file is missing.

    n_embd: size of a hidden state. with_head_input: True to have the input of the target's output
    head behind them. Errors: ValueError for a file of another size.
    """
    if not path.exists():
        model = decoder().model
        head_input = [model.n_layer + 1] * with_head_input
        features.write(path, model, answers, [*taps, *head_input])
    n_rows = features.offsets(answers)[-1]
    if path.stat().st_size != 2 * n_rows * (len(taps) + with_head_input) * n_embd:
        raise ValueError(f"{path}: is not the features of these {n_rows} tokens; remove the file")
    return features.AnswerFeatures(path, answers, len(taps) * n_embd, n_embd * with_head_input)


@contextmanager
def decoder_when_needed(args: argparse.Namespace) -> Iterator[Callable[[], Decoder]]:
    """Gives a function that loads the target at its first call, and closes the decoder."""
    decoder = cache(lambda: load_decoder(args))
    try:
        yield decoder
    finally:
        if decoder.cache_info().currsize:
            decoder().close()


def prepare(
    args: argparse.Namespace,
) -> tuple[BlockModel, features.AnswerFeatures, features.AnswerFeatures]:
    """Returns the model, and features of training and held-out answers; makes missing files."""
    sizes = read_sizes(args.target)
    drafter = new_drafter(
        sizes,
        n_layers=args.layers,
        n_taps=args.taps,
        n_ff=args.ffn,
        n_head_kv=args.kv_heads,
        block_size=args.block,
        mask_token=mask_token_of(args.target, args.mask_token),
        seed=args.seed,
    )
    tokens = None if args.begin is None else take_weights(drafter, args.begin)
    with decoder_when_needed(args) as decoder:
        training, held_out = prepare_answers(args, decoder)
        taps = [i + 1 for i in drafter.target_layer_ids]  # the output of a layer enters the next
        distils = args.distil > 0
        data = prepare_features(
            args.out / f"answers{'-head' * distils}.features",
            training,
            taps,
            sizes.n_embd,
            decoder,
            with_head_input=distils,
        )
        path = args.out / "held-out.features"
        measured = prepare_features(path, held_out, taps, sizes.n_embd, decoder)
    head = read_head(args.target)
    if args.draft_vocab:
        tokens = drafted_tokens(args, training)
    model = BlockModel(drafter, read_embeddings(args.target), head, tokens)
    model.standardise(data.rows[:N_SAMPLED])
    if args.begin is None:
        even_start(drafter, head)
    else:
        drafter.fc.weight.data /= model.feature_scale
    return model, data, measured


def drafted_tokens(args: argparse.Namespace, answers: Sequence[Answer]) -> torch.Tensor:
    """Returns the sorted ids of the --draft-vocab most frequent tokens of answers."""
    return most_frequent((a.tokens[a.n_prompt :] for a in answers), args.draft_vocab)


def convert_target(folder: Path, path: Path, pre: str | None) -> Path:
    """Converts a Hugging Face folder to a GGUF with 8-bit weights, unless it is there already."""
    if not path.exists():
        plan = plan_conversion(folder, "q8_0", pre=pre)
        write_gguf(path, plan.metadata, plan.plans, plan.types)
    return path


def export(folder: Path, target: Path, outtype: str) -> None:
    """Writes the drafter in a folder as drafter.gguf."""
    plan = plan_conversion(folder, outtype, Options(target_model_dir=target))
    write_gguf(folder / "drafter.gguf", plan.metadata, plan.plans, plan.types)


def measure_gain(
    target: Path, drafter: Path, answers: Sequence[Answer], n_threads: int
) -> dict[str, float]:
    """Decodes held-out prompts with and without the drafter, one after the other.

    Returns tokens per second of both, `auto` divided by plain, and tokens a round of `auto`.
    """
    n_ctx = max(len(answer.tokens) for answer in answers) + ROUND_UP
    seconds, rounds, tokens = {"none": 0.0, "auto": 0.0}, 0, 0
    with load(target, drafter=drafter, n_ctx=n_ctx, n_threads=n_threads) as decoder:
        for answer in answers:
            prompt, n_new = list(answer.tokens[: answer.n_prompt]), len(answer.tokens)
            config = DecodeConfig(max_tokens=n_new - answer.n_prompt, temperature=0.0)
            plain = decoder.generate(prompt, config, draft="none")
            drafted = decoder.generate(prompt, config, draft="auto")
            seconds["none"] += plain.decode_s
            seconds["auto"] += drafted.decode_s
            rounds += drafted.rounds
            tokens += drafted.n_decoded
    return {
        "plain_tokens_per_s": round(tokens / max(seconds["none"], 1e-9), 1),
        "auto_tokens_per_s": round(tokens / max(seconds["auto"], 1e-9), 1),
        "gain": round(seconds["none"] / max(seconds["auto"], 1e-9), 3),
        "auto_tokens_per_round": round(tokens / max(rounds, 1), 3),
    }


def report(trainer: BlockTrainer) -> dict[str, Any]:
    """Returns figures of the held-out answers; prompt lookup's tau on them is among them."""
    answers = [(a.tokens, a.n_prompt) for a in trainer.held_out.answers]
    ours = trainer.evaluate()
    lookup = measure(
        answers,
        lambda places: [prompt_lookup(answers[i][0][: p + 1], trainer.size - 1) for i, p in places],
    )
    fresh = [tokens[n_prompt:] for tokens, n_prompt in answers]
    return {
        "accepted_by_place": [round(n / ours.rounds, 3) for n in ours.accepted],
        "tau_prompt_lookup": round(lookup.tau, 3),
        "repeated_8_grams": round(repeated_share(fresh), 3),
    }


def train(args: argparse.Namespace) -> None:
    """Runs a training; raises ValueError or OSError for unusable arguments or files.

    args: as `command.parse` returns them; `target` is a GGUF.
    """
    started = time.monotonic()
    args.threads = args.threads or torch.get_num_threads()
    logging.disable_progress_bar()  # of the files that transformers writes
    # parallel.py has threads of its own, so torch's operations must not start further ones.
    torch.set_num_threads(1)
    trainer, held_out, figures = KINDS[args.kind](args)
    path = args.out / "drafter.gguf"
    figures = {
        "tau": round(trainer.history.taus[-1][1], 3),
        **figures,
        "held_out_tokens": sum(len(a.tokens) - a.n_prompt for a in held_out),
        "training_tokens": sum(len(a.tokens) - a.n_prompt for a in trainer.answers),
        "parameters": sum(p.numel() for p in trainer.module.parameters()),
        "steps": trainer.step,
        **measure_gain(args.target, path, held_out, args.threads),
        "seconds": round(time.monotonic() - started),
    }
    write_text(
        args.out / "training.json",
        json.dumps({**figures, "losses": trainer.history.losses, "taus": trainer.history.taus}),
    )
    print(json.dumps(figures))
    print(
        f"{path}: {figures['tau']} tokens a round on held-out answers, "
        f"{figures['gain']} times plain decoding on this machine (--draft auto)"
    )


def train_blocks(args: argparse.Namespace) -> Trained:
    """Trains a DFlash drafter."""
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch finds no GPU; leave the flag out to use the CPU")
    device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    model, data, held_out = prepare(args)
    n_threads = args.threads if device.type == "cpu" else 1
    free = free_bytes(device)
    if device.type == "cpu":
        free = min(free, CPU_PIECE_BYTES * n_threads)
    n_words = min(args.words or model.head.shape[0], model.head.shape[0])
    recipe = BlockRecipe(
        n_steps=args.steps,
        n_sequences=args.sequences,
        n_blocks=args.blocks,
        decay=args.decay or args.block / 2,
        distil=args.distil,
        falling=args.falling,
        n_words=args.words,
        seed=args.seed,
        piece=piece_size(args.blocks * args.block, n_words, args.sequences, free, n_threads),
        n_threads=n_threads,
    )
    trainer = BlockTrainer(model, data, held_out, recipe, args.out, device)

    def keep(history: History) -> None:
        try:
            model.drafter.save_pretrained(args.out, state_dict=model.weights())
        except SafetensorError as error:
            raise ValueError(f"{args.out / 'model.safetensors'}: {error}") from None
        draw(history, args.out / "curve.png")

    try:
        trainer.run(keep)
    except torch.OutOfMemoryError:
        raise ValueError(
            "the device has too little memory: use a new folder with fewer --sequences or --words"
        ) from None
    export(args.out, args.target, args.outtype)
    return trainer, held_out.answers, report(trainer)


def train_chains(args: argparse.Namespace) -> Trained:
    """Trains an MTP layer."""
    target, sizes = GgufTarget(args.target), read_sizes(args.target)
    with decoder_when_needed(args) as decoder:
        training, held_out = prepare_answers(args, decoder)
        path = args.out / "answers.features"
        taps = [sizes.n_layer + 1]  # the input of the target's output head
        data = prepare_features(path, training, taps, sizes.n_embd, decoder)
    drafted = drafted_tokens(args, training).tolist() if args.draft_vocab else []
    model = target.new_layer(args.seed)
    path = args.out / "drafter.gguf"

    def measured() -> float:
        target.write(path, model.layers[0], drafted, is_alone=True)
        return tau_of(args.target, path, held_out, args.threads)

    recipe = Recipe(
        n_steps=args.steps,
        n_sequences=args.sequences,
        warmup=20,
        falling=args.falling,
        seed=args.seed,
        n_threads=args.threads,
    )
    trainer = ChainTrainer(model, target, data, recipe, args.out, measured)
    trainer.run(lambda history: draw(history, args.out / "curve.png"))
    whole = args.out / f"{args.target.stem}-mtp.gguf"
    target.write(whole, model.layers[0], drafted, is_alone=False)
    return trainer, held_out, {}


KINDS: dict[str, Callable[[argparse.Namespace], Trained]] = {
    "dflash": train_blocks,
    "mtp": train_chains,
}
