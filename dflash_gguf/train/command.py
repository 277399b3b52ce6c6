"""dflash-train: trains a drafter for a target, on answers of the target itself."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import bundled
from .._files import check_file, write_text
from ..cli.command import guarded
from ..cli.model_arguments import new_parser
from ..config import DecodeConfig
from ..convert.errors import ConvertError
from ..native import MAX_VERIFY
from ..speculative.proposers.dflash import N_RANKED
from .mask_token import mask_token_of

DESCRIPTION = "Trains a drafter for a target, on answers of the target itself."
EPILOG = """\
  dflash-train target.gguf OUT --prompts prompts.txt
  dflash-run -m target.gguf -md OUT/drafter.gguf

After an interruption the same command continues. OUT/curve.png shows the course of the training,
OUT/training.json has its figures. docs/train-a-drafter.md walks through a run.
"""
FREE = ("steps", "falling", "threads", "device", "outtype")
"""Arguments that may change when a training continues; all others must stay the same."""
ARGUMENTS = "arguments.json"
DRAFTER = ("model.safetensors", "config.json", "drafter.gguf")
"""Files of a drafter, which a training replaces."""
KINDS = ("dflash", "mtp")
OF_DFLASH = (
    *("layers", "ffn", "kv_heads", "taps", "block", "mask_token", "blocks", "decay", "distil"),
    *("words", "begin", "outtype", "device"),
)
"""Arguments that no training of an MTP layer takes."""
SHARES = ("sampled", "distil")
MAY_BE_ZERO = ("falling", "words", "draft_vocab")
COUNTS = ("answers", "held_out", "steps", "falling", "words", "draft_vocab")
MTP_TOKENS = 4
"""Tokens that an answer must have to train an MTP layer: the first, and a chain of 3."""
MAX_COUNT, MAX_SIZE = 1 << 24, 1 << 16
"""Largest numbers for COUNTS, and for the sizes of a drafter or of a batch."""
OUTTYPES = ("q8_0", "f16", "bf16", "f32", "q4_0", "q4_1")


def parser() -> argparse.ArgumentParser:
    """Builds the parser of dflash-train."""
    p = new_parser("dflash-train", DESCRIPTION, EPILOG)

    def add(flags: str, about: str, default: Any = None, **settings: Any) -> None:
        if default is not None:
            settings = {"type": type(default), "default": default, **settings}
            about += " (default: %(default)s)"
        p.add_argument(*flags.split(), help=about, **settings)

    add(
        "target",
        "a GGUF file, the name of a bundled model, or a Hugging Face folder, which is converted "
        "to OUT/target.gguf with 8-bit weights",
        type=Path,
        metavar="TARGET",
    )
    add("out", "output folder", type=Path, metavar="OUT")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text file with a prompt in each line, or .jsonl; the first prompts are held out",
    )
    source.add_argument("--chat", action="store_true", help="let the target write the user turns")
    source.add_argument(
        "--pieces",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="finished answers, as scripts/train/make_answers.py writes them",
    )
    add(
        "--kind",
        "dflash: drafts a block at once; mtp: an MTP layer, which drafts step by step, for a "
        "target of architecture qwen35",
        "dflash",
        choices=KINDS,
    )
    add("--plain", "continue the prompts as text, without a chat template", action="store_true")
    add("--instruction", "text before every prompt, followed by an empty line", metavar="TEXT")
    add("--answers", "answers to train on", 4000, metavar="N")
    add("--held-out", "answers to measure tau on", 64, metavar="N")
    add("--prompt-tokens", "maximum tokens of a prompt", 256, metavar="N")
    add("--new-tokens", "maximum tokens of an answer", 256, metavar="N")
    add("--temperature", "temperature of the training answers", 0.0, metavar="T")
    add("--sampled", "share of training answers at --temperature, 0 to 1", 1.0, metavar="SHARE")
    add("--layers", "layers of the drafter", 3, metavar="N")
    add("--ffn", "width of its feed-forward (default: the target's)", type=int, metavar="N")
    add(
        "--kv-heads",
        "heads of its keys and values (default: the target's)",
        type=int,
        metavar="N",
    )
    add("--taps", "number of target layers that the drafter reads", 5, metavar="N")
    add("--block", "tokens of a block, the given first one included", 16, metavar="N")
    add(
        "--mask-token",
        "token that the target never writes (default: a mask, reserved or unused token)",
        metavar="TEXT",
    )
    add("--pre", "pre-tokenizer of a folder, as for convert-hf-to-gguf", metavar="NAME")
    add("--steps", "number of updates", 3000, metavar="N")
    add("--falling", "updates at the end with falling learning rate", 500, metavar="N")
    add("--sequences", "answers per update", 32, metavar="N")
    add("--blocks", "blocks per answer and update", 16, metavar="N")
    add(
        "--decay",
        "decay of loss weights within a block, in tokens (default: half a block)",
        type=float,
        metavar="TOKENS",
    )
    add(
        "--distil",
        "share of the loss that compares with the target's distribution, 0 to 1",
        0.0,
        metavar="SHARE",
    )
    add("--words", "vocabulary entries of an update's softmax, 0: all", 8192, metavar="N")
    add(
        "--draft-vocab",
        "tokens that the drafter can draft, the answers' most frequent ones, 0: all",
        0,
        metavar="N",
    )
    add(
        "--begin",
        "start from the drafter of this OUT, which has the same sizes",
        type=Path,
        metavar="DIR",
    )
    add("--outtype", "type of the drafter's weights in its file", "q8_0", choices=OUTTYPES)
    add("--seed", "seed of the weights, the order of the answers and the samples", 1, metavar="N")
    add("--device", "device of the updates (default: cuda if present)", choices=("cuda", "cpu"))
    add("-t --threads", "threads on a CPU (default: one for each core)", type=int, metavar="N")
    return p


def remember(args: argparse.Namespace) -> None:
    """Writes the arguments to the output folder.

    Errors: ValueError if the folder has different ones, or a drafter and no arguments.
    """
    mine = {k: str(v) for k, v in vars(args).items() if k not in (*FREE, "out")}
    path = args.out / ARGUMENTS
    if not path.exists():
        for name in DRAFTER:
            if (args.out / name).exists():
                raise ValueError(
                    f"{args.out}: has a {name} of another origin, which the training would "
                    "replace; name another output folder"
                )
    else:
        try:
            theirs = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise ValueError(f"{path}: is damaged; name another output folder") from None
        for name, value in theirs.items():
            if mine.get(name) != value:
                raise ValueError(
                    f"{args.out}: was begun with {name} = {value}, now it is {mine.get(name)}; "
                    "name another output folder"
                )
    write_text(path, json.dumps(mine, indent=1))


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Makes an output folder, and holds it; ValueError while another process holds it."""
    import fcntl  # Windows has no such module

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process trains in this folder") from None
        yield
    finally:
        os.close(descriptor)


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError for an integer or a share that no training can use."""
    for name, value in vars(args).items():
        flag = "--" + name.replace("_", "-")
        if name in SHARES and not 0 <= value <= 1:
            raise ValueError(f"{flag} {value}: a share lies between 0 and 1")
        if type(value) is int and name != "seed":
            least = 0 if name in MAY_BE_ZERO else 1
            most = MAX_COUNT if name in COUNTS else MAX_SIZE
            if value < least:
                raise ValueError(f"{flag} {value}: at least {least} is needed")
            if value > most:
                raise ValueError(f"{flag} {value}: at most {most} is possible")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for arguments that no training can use."""
    check_numbers(args)
    DecodeConfig(temperature=args.temperature, seed=args.seed)  # ValueError if out of range
    if args.sampled != parser().get_default("sampled") and not args.temperature:
        raise ValueError(f"--sampled {args.sampled}: give a --temperature to sample at")
    if 0 < args.draft_vocab < N_RANKED:
        raise ValueError(
            f"--draft-vocab {args.draft_vocab}: give 0 for all tokens, or at least {N_RANKED}"
        )
    if not 2 <= args.block <= MAX_VERIFY:
        raise ValueError(f"--block {args.block}: a block has 2 to {MAX_VERIFY} tokens")
    if args.kind == "mtp":
        for name in OF_DFLASH:
            if getattr(args, name) != parser().get_default(name):
                raise ValueError(f"--{name.replace('_', '-')}: an MTP layer has no such setting")
    least = args.block if args.kind == "dflash" else MTP_TOKENS
    if not args.pieces and args.new_tokens < least:
        raise ValueError(
            f"--new-tokens {args.new_tokens}: training needs answers of at least {least} tokens"
        )
    if args.decay is not None and not args.decay > 0:
        raise ValueError(f"--decay {args.decay}: must be above 0")
    for flag, paths in (("--pieces", args.pieces or ()), ("--prompts", [args.prompts])):
        for path in paths:
            if path is not None and not path.is_file():
                raise ValueError(f"{flag} {path}: no such file")
    if args.begin is not None and not (args.begin / "config.json").is_file():
        raise ValueError(f"--begin {args.begin}: no folder of a drafter")
    if args.begin is not None and args.draft_vocab:
        raise ValueError(
            f"--draft-vocab {args.draft_vocab}: the drafter of --begin keeps its own tokens"
        )
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out}: is a file, OUT must be a folder")


def run(args: argparse.Namespace) -> None:
    """Runs a whole training; raises ValueError or OSError for unusable arguments or files.

    If it fails before the first answer is written, the output folder is left as it was.
    """
    check(args)
    folder = args.target if args.target.is_dir() else None
    if folder is None:
        args.target = Path(bundled.files_of(args.target, None)[0])
        check_file(args.target)
        if args.kind == "dflash":
            mask_token_of(args.target, args.mask_token)
    is_new = not args.out.exists()
    with sole_user(args.out):
        before = set(args.out.iterdir())
        try:
            remember(args)
            # Loading torch takes seconds: bad arguments are reported before.
            from .training import convert_target, train

            if folder is not None:
                args.target = convert_target(folder, args.out / "target.gguf", args.pre)
            train(args)
        except Exception:
            made = set(args.out.iterdir()) - before
            if {path.name for path in made} <= {ARGUMENTS, "target.gguf"}:
                for path in made:
                    path.unlink()
                if is_new:
                    args.out.rmdir()
            raise


def _run(args: argparse.Namespace) -> int:
    try:
        run(args)
    except (ConvertError, ArithmeticError) as error:
        raise ValueError(str(error)) from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the package {error.name} is not installed: pip install 'dflash-gguf[train]'"
        ) from None
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    return guarded(lambda: _run(parser().parse_args(argv)))
