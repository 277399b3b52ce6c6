"""python -m dflash_gguf is dflash-run."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
