"""dflash-backend: lists devices and builds ggml backends."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from .._files import message_of
from ..cli.command import guarded, list_devices
from ..cli.model_arguments import new_parser
from ..native import Error, load_backend
from .build import KINDS, build, built_modules
from .for_tests import SETS, build_for_tests
from .sources import DEFAULT_CACHE, fetch

DESCRIPTION = "Builds ggml backends as modules for the installed llama-cpp-python."
EPILOG = """\
A module is used by `dflash-run --backend-module FILE`, and by every command with
GGML_BACKEND_PATH=FILE
in the environment. A llama-cpp-python that was built with the backend needs none.

cuda needs nvcc, and cuBLAS from a toolkit or from the nvidia-cublas package: an hour on two cores,
under five minutes on sixteen. vulkan needs libvulkan-dev, glslc and spirv-headers (Debian's names):
three minutes on two cores. Both need cmake, and ninja to be quick: pip install '.[backend]'.
"""


def parser() -> argparse.ArgumentParser:
    """Builds the parser of dflash-backend."""
    p = new_parser("dflash-backend", DESCRIPTION, EPILOG)
    commands = p.add_subparsers(dest="command", required=True)
    cache = argparse.ArgumentParser(add_help=False)
    cache.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, metavar="FOLDER", help="default: %(default)s"
    )
    making = commands.add_parser(
        "build", parents=[cache], help="compile a module; its path is the last line"
    )
    making.add_argument("kind", choices=KINDS)
    making.add_argument("--jobs", type=int, default=0, metavar="N", help="default: one a core")
    making.add_argument(
        "--arch",
        default="",
        metavar="A;B",
        help="CUDA architectures, such as 86-real;89-real (default: of the GPUs in this machine)",
    )
    making.add_argument(
        "--for-tests",
        choices=tuple(SETS),
        help="cuda as PTX for a GPU in software, with few or all of the kernels that tests launch",
    )
    commands.add_parser(
        "list", parents=[cache], help="the devices here, with those of the modules that were built"
    )
    commands.add_parser(
        "sources", parents=[cache], help="fetch what a module is compiled from; prints the folder"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    return guarded(lambda: _run(parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.command == "list":
        return _list(args.cache)
    try:
        return _make(args)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        raise ValueError(f"{message_of(error)}; name a writable folder with --cache") from None


def _make(args: argparse.Namespace) -> int:
    """Fetches the sources or builds a module."""
    if args.command == "sources":
        print(fetch(args.cache))
        return 0
    if args.jobs < 0:
        raise ValueError(f"--jobs is {args.jobs}, must be at least 0")
    if args.arch and args.kind != "cuda":
        raise ValueError("--arch is for cuda only, leave it out")
    if args.for_tests is not None:
        if args.kind != "cuda" or args.arch:
            raise ValueError("--for-tests is for cuda only, and without --arch")
        print(build_for_tests(args.for_tests, args.cache, jobs=args.jobs, tell=_tell))
        return 0
    module = build(args.kind, args.cache, jobs=args.jobs, arch=args.arch, tell=_tell)
    print(module)
    return 0


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _list(cache: Path) -> int:
    """Prints all devices, then each built backend module or the error of loading it."""
    modules = built_modules(cache)
    failed = {}
    for module in modules:
        try:
            load_backend(str(module))
        except Error as error:
            failed[module] = error
    list_devices()
    for module in modules:
        print(f"error: {failed[module]}" if module in failed else f"module: {module}")
    return 0
