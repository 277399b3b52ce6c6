"""Damaged vocabularies raise ValueError or load, in child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_fuzzed_vocabularies_never_abort(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz_vocabulary.py")
    for first in range(0, 600, 150):
        child = subprocess.run(
            [sys.executable, str(script), str(tmp_path), str(first), "150"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        last = child.stdout.split()[-2:]
        assert child.returncode == 0, f"seed {last}: {child.stderr[-500:]}"
        assert last[0] == "accepted"
        assert 5 < int(last[1]) < 145
