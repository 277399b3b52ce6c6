"""Command-line flags of loading a model, made from the options of LoadConfig."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from .. import __version__
from ..memory.plan import has_gpu
from ..native import DEFAULTS, OPTIONS, LoadConfig, Option


def new_parser(
    prog: str, description: str, epilog: str, *, raises: bool = False
) -> argparse.ArgumentParser:
    """Returns a command's parser without arguments. raises: ValueError in place of exit code 2."""
    parser = (_RaisingParser if raises else _Parser)(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return parser


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line; refuses unknown -hf, which argparse would read as -h -f."""

    def error(self, message: str) -> NoReturn:
        word, _, rest = message.partition(" ")
        for action in self._actions:
            flags = [flag for flag in action.option_strings if flag.startswith("--")]
            if action.dest == word and flags:  # replaces a Python field's name by its flag
                message = f"{flags[0]} {rest}"
        self.exit(2, f"error: {message}; see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        known = {flag for action in self._actions for flag in action.option_strings}
        for word in words:
            flag = word.partition("=")[0]
            if re.fullmatch(r"-[a-zA-Z][a-zA-Z-][\w-]*", flag) and flag not in known:
                self.error(f"unrecognized arguments: {word}")
        return super().parse_known_args(words, namespace)


class _RaisingParser(_Parser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def add_options(p: argparse.ArgumentParser, *, but: str | None = None) -> None:
    """Adds a flag for each option of LoadConfig, None by default. but: an option to leave out."""
    group = p.add_argument_group("model")
    for name, option in OPTIONS.items():
        if name != but:
            _add(group.add_mutually_exclusive_group() if option.shorthands else group, name, option)


def add_fit(p: argparse.ArgumentParser) -> None:
    """Adds --fit and --vram."""
    group = p.add_argument_group("memory")
    group.add_argument(
        "--fit",
        action="store_true",
        help="choose a value that fits for each of -c, -ctk, -ctv, -ub, --draft-window not given",
    )
    group.add_argument(
        "--vram",
        type=byte_size,
        metavar="SIZE",
        help="GPU memory to use, like 24G; with --plan also for an NVIDIA GPU that this machine "
        "lacks",
    )


def _add(group: argparse._ActionsContainer, name: str, option: Option) -> None:
    default = option.none or ("yes" if DEFAULTS[name] is True else DEFAULTS[name])
    notes = [option.note, f"{' or '.join(['default', *option.none_words])}: {default}"]
    settings: dict[str, Any] = {
        "dest": name,
        "help": f"{option.about} ({'; '.join(filter(None, notes))})",
    }
    if option.values is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif isinstance(option.values, range):
        settings |= {"type": number_or(option.none_words), "metavar": option.metavar}
    elif option.values is str:
        settings["metavar"] = option.metavar
    else:
        settings["choices"] = option.values
    group.add_argument(*option.flags, **settings)
    for flags, value, about in option.shorthands:
        group.add_argument(
            *flags, dest=name, action="store_const", const=value, help=about or argparse.SUPPRESS
        )


def load_config(args: argparse.Namespace, n_ctx_train: int | None) -> LoadConfig:
    """Converts flags to a LoadConfig; ValueError for a bad value. n_ctx_train: value of -c 0."""
    given = {name: getattr(args, name, None) for name in OPTIONS}
    if given["n_ctx"] == 0:
        given["n_ctx"] = n_ctx_train
    return LoadConfig(**{name: value for name, value in given.items() if value is not None})


def on_present_devices(config: LoadConfig, args: argparse.Namespace) -> LoadConfig:
    """Returns a config whose layers are on the CPU if the machine has no GPU, with a warning."""
    is_planned = getattr(args, "vram", None) is not None  # maybe for a GPU of another machine
    if config.n_gpu_layers and config.device is None and not is_planned and not has_gpu(config):
        print(
            f"warning: --gpu-layers is {config.n_gpu_layers}, but ggml finds no GPU: all layers "
            "are on the CPU; build a GPU backend with dflash-backend",
            file=sys.stderr,
        )
        config = replace(config, n_gpu_layers=0)
    return config


def number_or(words: tuple[str, ...]) -> Callable[[str], int | None]:
    """Returns a parser of integers that also accepts some words, each of which means None."""

    def read(text: str) -> int | None:
        if text in words:
            return None
        try:
            return int(text)
        except ValueError:
            named = " or ".join(["a number", *words])
            raise argparse.ArgumentTypeError(f"{text!r}: expected {named}") from None

    return read


def byte_size(text: str) -> int:
    """Parses a size like "24", "24G" or "512M": powers of 1024, GiB without a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(?:i?B)?|(B))?", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size like 24G")
    unit = (match[2] or match[3] or "G").upper()
    return int(float(match[1]) * 1024 ** "BKMGT".index(unit))
