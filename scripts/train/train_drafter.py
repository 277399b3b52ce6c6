"""Trains a DFlash drafter for a target, on answers of the target itself.

    python scripts/train/train_drafter.py TARGET OUT_DIR --prompts prompts.jsonl

TARGET is a Hugging Face folder or a GGUF. OUT_DIR becomes a folder for convert-hf-to-gguf. After an
interruption the same command continues. docs/train-a-drafter.md has a walkthrough.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import dflash_gguf
from dflash_gguf._files import write_text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from train import features as cached
from train.acceptance import measure, prompt_lookup, repeated_share
from train.answers import Answer, load_answers
from train.ask import make_answers
from train.curve import draw
from train.delta_rule import fast_delta_rule
from train.drafter import BlockModel, even_start, new_drafter, take_weights
from train.fit import Fit, History, Recipe
from train.memory import CPU_PIECE_BYTES, free_bytes, piece_size
from train.target import load_target

# Arguments that may change when a training continues; all others must stay the same.
FREE = ("steps", "falling", "threads", "device")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="a Hugging Face folder or a GGUF")
    add("out", type=Path, metavar="OUT_DIR", help="output folder of the drafter")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text file with a prompt in each line, or .jsonl",
    )
    source.add_argument(
        "--python", action="store_true", help="use beginnings of Python functions as prompts"
    )
    source.add_argument("--chat", action="store_true", help="let the target write the user turns")
    add(
        "--plain", action="store_true", help="continue the prompts as text, without a chat template"
    )
    add("--answers", type=int, default=4000, help="answers to train on")
    add("--held-out", type=int, default=64, help="answers to measure tau on")
    add("--prompt-tokens", type=int, default=256, help="maximum tokens of a prompt")
    add("--new-tokens", type=int, default=256, help="maximum tokens of an answer")
    add("--instruction", metavar="TEXT", help="text before every prompt, followed by an empty line")
    add("--temperature", type=float, default=0.0, help="temperature of the training answers")
    add(
        "--sampled",
        type=float,
        default=1.0,
        help="share of training answers sampled at --temperature, 0 to 1",
    )
    add(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="the target as it will run; it generates the answers",
    )
    add("--batch", type=int, default=64, help="answers that are generated at once")
    add("--layers", type=int, default=3, help="layers of the drafter")
    add("--ffn", type=int, help="width of the drafter's feed-forward; None: the target's")
    add("--taps", type=int, default=5, help="number of target layers that the drafter reads")
    add("--block", type=int, default=16, help="tokens of a block, the given first one included")
    add(
        "--mask-token",
        metavar="TEXT",
        help="token that the target never writes; None: <|mask|>",
    )
    add("--steps", type=int, default=3000, help="number of updates")
    add("--falling", type=int, default=500, help="updates at the end with falling learning rate")
    add("--sequences", type=int, default=32, help="answers per update")
    add("--blocks", type=int, default=16, help="blocks per answer and update")
    add(
        "--decay",
        type=float,
        default=None,
        help="decay of loss weights within a block, in tokens; None: block / 2",
    )
    add("--words", type=int, default=8192, help="vocabulary entries of an update's softmax, 0: all")
    add(
        "--begin",
        type=Path,
        metavar="DIR",
        help="start from this trained drafter of the same sizes",
    )
    add("--seed", type=int, default=1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads on a CPU")
    return parser.parse_args(arguments)


def remember(args: argparse.Namespace) -> None:
    """Writes the arguments to the output folder; ValueError if the folder has different ones."""
    mine = {k: str(v) for k, v in vars(args).items() if k not in (*FREE, "out")}
    path = args.out / "arguments.json"
    if path.exists():
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            if mine.get(name) != value:
                raise ValueError(
                    f"{args.out}: was begun with {name} = {value}, now it is {mine.get(name)}; "
                    "name another output folder"
                )
    write_text(path, json.dumps(mine, indent=1))


def mask_token_of(tokenizer: Any, text: str | None) -> int:
    """Returns the mask token's id; raises ValueError if the vocabulary lacks the token."""
    wanted = text or "<|mask|>"
    vocabulary = tokenizer.get_vocab()
    if wanted not in vocabulary:
        raise ValueError(
            f"the target's vocabulary has no token {wanted!r}; "
            "name a token that it never writes with --mask-token"
        )
    return int(vocabulary[wanted])


def prepare(args: argparse.Namespace) -> tuple[BlockModel, cached.Features, cached.Features]:
    """Returns the model, and features of training and held-out answers; makes missing files."""
    target, tokenizer = load_target(args.target, args.device, args.out / "target")
    mask_token = mask_token_of(tokenizer, args.mask_token)
    drafter = new_drafter(
        target.config,
        n_layers=args.layers,
        n_taps=args.taps,
        n_ff=args.ffn,
        block_size=args.block,
        mask_token=mask_token,
        seed=args.seed,
    )
    if not (args.out / "held-out.json").exists():
        with fast_delta_rule():
            make_answers(args, target, tokenizer)
    width = len(drafter.target_layer_ids) * drafter.config.hidden_size
    found = []
    for name in ("answers", "held-out"):
        answers: list[Answer] = load_answers(args.out / f"{name}.json")
        path = args.out / f"{name}.features"
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
                )
        found.append(cached.Features(path, answers, width))
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


def run(args: argparse.Namespace) -> None:
    """Runs a whole training; raises ValueError or OSError for unusable arguments or files."""
    if not 0 <= args.sampled <= 1:
        raise ValueError(f"--sampled {args.sampled}: a share lies between 0 and 1")
    args.out.mkdir(parents=True, exist_ok=True)
    remember(args)
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


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        run(parse(arguments))
    except (ValueError, OSError, ArithmeticError, dflash_gguf.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
