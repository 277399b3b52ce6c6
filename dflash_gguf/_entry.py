"""Entry points of the installed commands: Ctrl-C ends a command without a traceback.

This module imports almost nothing, because a Ctrl-C before its handler is set shows a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from types import FrameType

INTERRUPTED = 130


def _command(module: str) -> Callable[[], int]:
    def run() -> int:
        # Shell scripts start background jobs with SIGINT ignored: do not handle SIGINT there.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default:
            signal.signal(signal.SIGINT, _leave)
        try:
            main = import_module(module).main
        except ModuleNotFoundError as error:
            if (name := error.name or "") == "dflash_gguf" or name.startswith("dflash_gguf."):
                raise
            print(
                f"error: the package {name} is not installed: pip install 'dflash-gguf[server]'"
                if ".serve." in module
                else f"error: the package {name} is not installed: install dflash-gguf again",
                file=sys.stderr,
            )
            return 1
        warnings.showwarning = show_warning  # type: ignore[assignment]
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code: int = main()
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at exit would print a traceback
        return code

    return run


def show_warning(message: Warning | str, *_: object) -> None:
    """Prints a warning in one line, without the place in the code that gave it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Ends the process on Ctrl-C, as imports and destructors print and drop KeyboardInterrupt."""
    os._exit(INTERRUPTED)


convert_hf_to_gguf = _command("dflash_gguf.convert.__main__")
dflash_backend = _command("dflash_gguf.backend_build.command")
dflash_bench = _command("dflash_gguf.bench.command")
dflash_run = _command("dflash_gguf.cli")
dflash_serve = _command("dflash_gguf.serve.command")
dflash_train = _command("dflash_gguf.train.command")
