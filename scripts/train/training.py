"""A whole training of a drafter: answers, features, updates, figures."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from dflash_gguf._files import write_text

from . import features as cached
from .acceptance import measure, prompt_lookup, repeated_share
from .answers import Answer, load_answers
from .ask import make_answers
from .curve import draw
from .delta_rule import fast_delta_rule
from .drafter import BlockModel, even_start, new_drafter, take_weights
from .fit import Fit, History, Recipe
from .memory import CPU_PIECE_BYTES, free_bytes, piece_size
from .target import load_target


def prepare(args: argparse.Namespace) -> tuple[BlockModel, cached.Features, cached.Features]:
    """Returns the model, and features of training and held-out answers; makes missing files."""
    target, tokenizer = load_target(args.target, args.device, args.out / "target")
    drafter = new_drafter(
        target.config,
        n_layers=args.layers,
        n_taps=args.taps,
        n_ff=args.ffn,
        block_size=args.block,
        mask_token=int(tokenizer.get_vocab()[args.mask_token]),
        seed=args.seed,
    )
    if not (args.out / "held-out.json").exists():
        with fast_delta_rule():
            make_answers(args, target, tokenizer)
    width = len(drafter.target_layer_ids) * drafter.config.hidden_size
    found = []
    for name in ("answers", "held-out"):
        answers: list[Answer] = load_answers(args.out / f"{name}.json")
        with_head_input = args.distil > 0 and name == "answers"
        path = args.out / f"{name}{'-head' * with_head_input}.features"
        if not path.exists():
            n_threads = args.threads if args.device == "cpu" else 1
            with fast_delta_rule():
                cached.write(
                    path,
                    target,
                    answers,
                    drafter.target_layer_ids,
                    n_batch=args.batch,
                    n_threads=n_threads,
                    with_head_input=with_head_input,
                )
        head_width = drafter.config.hidden_size * with_head_input
        found.append(cached.Features(path, answers, width, head_width))
    embeddings = target.get_input_embeddings().weight.detach().float()
    head = target.get_output_embeddings().weight.detach().float()
    if args.begin is None:
        even_start(drafter, head)
    else:
        take_weights(drafter, args.begin)
    return BlockModel(drafter, embeddings, head), found[0], found[1]


def report(fit: Fit) -> dict[str, Any]:
    """Returns figures for the model card; prompt lookup's tau on the same answers is among them."""
    answers = [(a.tokens, a.n_prompt) for a in fit.held_out.answers]
    ours = fit.evaluate()
    lookup = measure(
        answers,
        lambda places: [prompt_lookup(answers[i][0][: p + 1], fit.size - 1) for i, p in places],
    )
    fresh = [tokens[n_prompt:] for tokens, n_prompt in answers]
    return {
        "tau": round(ours.tau, 3),
        "accepted_by_place": [round(n / ours.rounds, 3) for n in ours.accepted],
        "tau_prompt_lookup": round(lookup.tau, 3),
        "repeated_8_grams": round(repeated_share(fresh), 3),
        "held_out_tokens": sum(map(len, fresh)),
        "training_tokens": sum(len(a.tokens) - a.n_prompt for a in fit.data.answers),
        "parameters": sum(p.numel() for p in fit.model.drafter.parameters()),
        "steps": fit.step,
    }


def train(args: argparse.Namespace) -> None:
    """Runs a training; raises ValueError or OSError for unusable arguments or files.

    args: as `train_drafter.parse` returns them, with a mask token that the target has.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.threads = args.threads or torch.get_num_threads()
    # parallel.py has threads of its own, so torch's operations must not start further ones.
    torch.set_num_threads(1)
    model, data, held_out = prepare(args)
    device = torch.device(args.device)
    n_threads = args.threads if device.type == "cpu" else 1
    free = free_bytes(device)
    if device.type == "cpu":
        free = min(free, CPU_PIECE_BYTES * n_threads)
    n_words = min(args.words or model.head.shape[0], model.head.shape[0])
    recipe = Recipe(
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
    fit = Fit(model, data, held_out, recipe, args.out, device)

    def keep(history: History) -> None:
        model.drafter.save_pretrained(args.out)
        draw(history, args.out / "curve.png")

    fit.run(keep)
    figures = report(fit)
    write_text(
        args.out / "training.json",
        json.dumps({**figures, "losses": fit.history.losses, "taus": fit.history.taus}),
    )
    print(json.dumps(figures))
