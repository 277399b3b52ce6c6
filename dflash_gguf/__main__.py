"""Runs dflash-run as `python -m dflash_gguf`."""

import sys

from ._entry import dflash_run

if __name__ == "__main__":
    sys.exit(dflash_run())
