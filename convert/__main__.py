"""Command line of the converter: convert-hf-to-gguf, or python -m dflash_gguf.convert."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dflash_gguf._files import check_output, message_of, replaced

from .arch import Options
from .conversion import OUTTYPES, Conversion, prepare
from .errors import ConvertError
from .gguf_header import read_parts
from .schema import Arch
from .write import data_bytes, tensor_bytes, write_gguf


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns exit code 1 after a one-sentence error on stderr."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.inspect is None and args.model_dir is None:
        parser.error("MODEL_DIR is required")
    if args.expect is not None and args.inspect is None:
        parser.error("--expect needs --inspect FILE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of tokens are not all ASCII, and stdout's encoding may lack their characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.outfile and not (args.dry_run or args.inspect or args.check):
        try:
            check_output("--outfile", args.outfile)
            _check_is_no_input(args)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(args)
    except (ConvertError, OSError, UnicodeError) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 1


def _check_is_no_input(args: argparse.Namespace) -> None:
    """Raises ValueError if --outfile would replace a file that the conversion reads."""
    out, target = args.outfile, args.target_model_dir
    is_of_model = out.parent.resolve() == args.model_dir.resolve() and out.suffix != ".gguf"
    is_target = target is not None and target.exists() and out.exists() and out.samefile(target)
    if is_target or (is_of_model and out.is_file()):
        raise ValueError(f"--outfile {out}: is a file of the model, give another name")


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert-hf-to-gguf",
        description="Converts a Hugging Face checkpoint or a DFlash drafter to a GGUF file.",
    )
    add = parser.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, nargs="?", help="folder of the checkpoint")
    add(
        "--outfile",
        type=Path,
        metavar="FILE",
        help="GGUF file to write (default: MODEL_DIR/NAME-OUTTYPE.gguf)",
    )
    add(
        "--outtype",
        type=str.lower,
        choices=OUTTYPES,
        default="auto",
        help="type of the weights (default: auto, the 16-bit type of the checkpoint)",
    )
    add(
        "--target-model-dir",
        type=Path,
        metavar="DIR",
        help="target of a drafter: its folder, of which config and tokenizer are enough, or its "
        "GGUF file",
    )
    add(
        "--pre",
        metavar="NAME",
        help="name of the pre-tokenizer in llama.cpp, such as qwen2 or llama-bpe (default: found "
        "by a hash of the tokens of a test text; needed for tokenizers that are not known)",
    )
    mtp = parser.add_mutually_exclusive_group()
    mtp.add_argument(
        "--mtp",
        action="store_true",
        help="write the multi-token-prediction (MTP) layer alone, as a drafter",
    )
    mtp.add_argument("--no-mtp", action="store_true", help="leave out MTP layers")
    add(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="let the MTP layer draft the N lowest token ids and the end tokens only; llama.cpp "
        "refuses such a file (default: all)",
    )
    add(
        "--scaled-embeddings",
        action="store_true",
        help="scale the target's embeddings by sqrt(hidden_size) for a drafter that has no "
        "input_embedding_scale (default: no scale)",
    )
    add("--dry-run", action="store_true", help="show what would be written, write nothing")
    add("--verbose", action="store_true", help="list every tensor while it is written")
    add(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare a GGUF file with MODEL_DIR, write nothing",
    )
    add(
        "--inspect",
        type=Path,
        metavar="FILE",
        help="describe a GGUF file, write nothing; exit code 1 if it is incomplete",
    )
    add(
        "--expect",
        choices=("instruct", "base"),
        help="with --inspect: exit code 1 unless FILE is a model of this variant with weights",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.inspect is not None:
        from .inspect import expect, inspect

        print(inspect(args.inspect))
        if args.expect is not None:
            expect(args.inspect, args.expect)
        return 1 if any(part.missing_bytes for part in read_parts(args.inspect)) else 0
    if args.check is not None:
        from .compare import check

        report = check(args.model_dir, args.check, args.target_model_dir)
        print(report)
        return 0 if report.ok else 1
    options = Options(
        args.target_model_dir,
        not args.no_mtp,
        args.mtp,
        args.scaled_embeddings,
        args.draft_vocab,
    )
    conversion = prepare(args.model_dir, args.outtype, options, args.pre)
    for note in conversion.metadata.notes:
        print(f"warning: {note}", file=sys.stderr)
    if args.scaled_embeddings and conversion.metadata.arch != Arch.DFLASH:
        raise ConvertError(
            f"{args.model_dir}: --scaled-embeddings is for drafters only, leave it out"
        )
    if args.dry_run:
        print(_table(conversion))
        return 0
    folder = args.model_dir.resolve()
    name = f"{'mtp-' * args.mtp}{folder.name}-{conversion.outtype}.gguf"
    outfile = args.outfile or folder / name
    with _ProgressBar() as bar:
        write_gguf(
            outfile,
            conversion.metadata,
            conversion.plans,
            conversion.types,
            progress=_Listing(conversion) if args.verbose else bar,
            release=conversion.checkpoint.release,
        )
    if replaced(outfile) is not None:  # a device or pipe may be stdout itself
        print(f"{outfile}: {_summary(conversion)}")
    return 0


def _row(conversion: Conversion, index: int) -> str:
    plan = conversion.plans[index]
    kind = conversion.types[plan.name]
    shape = " x ".join(map(str, plan.shape))
    return f"{plan.name:<40} {shape:>20} {kind:>5} {tensor_bytes(plan, kind):>14,}"


def _table(conversion: Conversion) -> str:
    rows = [_row(conversion, index) for index in range(len(conversion.plans))]
    return "\n".join([*rows, _summary(conversion)])


def _summary(conversion: Conversion) -> str:
    total = data_bytes(conversion.plans, conversion.types)
    return (
        f"{conversion.metadata.arch}, {conversion.outtype}: {len(conversion.plans)} tensors, "
        f"{total:,} bytes of data, {len(conversion.metadata.values)} metadata entries"
    )


class _Listing:
    """Progress report: prints a line per tensor to stderr."""

    def __init__(self, conversion: Conversion) -> None:
        self._rows = {
            plan.name: _row(conversion, index) for index, plan in enumerate(conversion.plans)
        }

    def __call__(self, name: str, _done: int, _total: int) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            print(row, file=sys.stderr)


class _ProgressBar:
    """Progress bar on stderr; prints nothing if stderr is no terminal."""

    WIDTH = 30

    def __init__(self) -> None:
        self._active = sys.stderr.isatty()
        self._shown = -1

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown >= 0:
            print(file=sys.stderr)

    def __call__(self, name: str, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if not self._active or percent == self._shown:
            return
        self._shown = percent
        filled = "#" * (self.WIDTH * percent // 100)
        line = f"\r[{filled:<{self.WIDTH}}] {percent:3d} % {name:<40.40}"
        print(line, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
