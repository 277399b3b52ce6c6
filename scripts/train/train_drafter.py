"""Trains a DFlash drafter for a target, on answers of the target itself.

    python scripts/train/train_drafter.py TARGET OUT_DIR --prompts prompts.jsonl

TARGET is a Hugging Face folder or a GGUF. OUT_DIR becomes a folder for convert-hf-to-gguf. After an
interruption the same command continues. docs/train-a-drafter.md has a walkthrough.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import dflash_gguf
from dflash_gguf._files import write_text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from train.mask_token import mask_token_of

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
    source.add_argument(
        "--pieces",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="finished answers, as make_answers.py writes them",
    )
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
        help="token that the target never writes; None: a mask, reserved or unused token",
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
    add(
        "--distil",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the loss that compares with the target's distribution, 0 to 1",
    )
    add("--words", type=int, default=8192, help="vocabulary entries of an update's softmax, 0: all")
    add(
        "--begin",
        type=Path,
        metavar="DIR",
        help="start from this trained drafter of the same sizes",
    )
    add("--seed", type=int, default=1)
    add("--device", help="cuda or cpu; None: cuda if there is a GPU")
    add("--threads", type=int, help="threads on a CPU; None: one for each core")
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


def run(args: argparse.Namespace) -> None:
    """Runs a whole training; raises ValueError or OSError for unusable arguments or files.

    If it fails before the first answers are written, the output folder is left as it was.
    """
    if not 0 <= args.sampled <= 1:
        raise ValueError(f"--sampled {args.sampled}: a share lies between 0 and 1")
    if not 0 <= args.distil <= 1:
        raise ValueError(f"--distil {args.distil}: a share lies between 0 and 1")
    for path in args.pieces or ():
        if not path.is_file():
            raise ValueError(f"--pieces {path}: no such file")
    if args.prompts is not None and not args.prompts.is_file():
        raise ValueError(f"--prompts {args.prompts}: no such file")
    args.mask_token = mask_token_of(args.target, args.mask_token)
    is_new, is_begun = not args.out.exists(), (args.out / "arguments.json").exists()
    args.out.mkdir(parents=True, exist_ok=True)
    remember(args)
    # Loading torch and transformers takes seconds: bad arguments are reported before.
    from train.training import train

    try:
        train(args)
    except Exception:
        if not is_begun and not (args.out / "answers.json").exists():
            (args.out / "arguments.json").unlink(missing_ok=True)
            shutil.rmtree(args.out / "target", ignore_errors=True)
            if is_new:
                args.out.rmdir()
        raise


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
