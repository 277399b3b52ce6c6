"""Runs dflash-run as `python -m dflash_gguf`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
