"""Tests one of the CPU's extra buffer types, in the child process that proof.py starts."""

from __future__ import annotations

import sys

from ._ffi import Error
from .ggml import probe_buffer_type
from .proof import REFUTED

if __name__ == "__main__":
    try:
        probe_buffer_type(sys.argv[1])
    except Error as error:
        print(error, file=sys.stderr)
        sys.exit(REFUTED)
