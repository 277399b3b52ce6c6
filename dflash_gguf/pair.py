"""The small pair of target and drafter that comes with the package; pair/README.md is its card."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "pair"
TARGET = FOLDER / "python-tiny-q8_0.gguf"
DRAFTER = FOLDER / "python-tiny-dflash-q8_0.gguf"
