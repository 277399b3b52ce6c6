"""The random models of true shape, written before the parts that need them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from synthetic_gguf import write_model
from synthetic_shapes import PRESETS

from gpu.setting import Figures, Setting

OUTTYPE = "q4_k_m"


def write_pair(folder: Path, preset: str, outtype: str, seed: int = 1) -> tuple[Path, Path]:
    """A random target of a preset and its drafter."""
    target, drafter = folder / f"{preset}.gguf", folder / f"{preset}-dflash.gguf"
    write_model(target, PRESETS[preset], preset, outtype, seed)
    write_model(drafter, PRESETS[f"{preset}-dflash"], preset, outtype, seed + 1, target)
    return target, drafter


def measure(setting: Setting) -> Iterator[Figures]:
    """Writes what is not there."""
    if setting.target_file is not None:
        yield {"written": [], "bytes": 0, "seconds": 0.0}
        return
    setting.folder.mkdir(parents=True, exist_ok=True)
    if setting.target.is_file() and setting.drafter.is_file():
        yield {"written": [], "bytes": 0, "seconds": 0.0}
        return
    started = time.perf_counter()
    pair = write_pair(setting.folder, setting.sizes.preset, OUTTYPE)
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in pair)
    yield {
        "written": [path.name for path in pair],
        "bytes": size,
        "seconds": round(seconds, 2),
        "gb_per_s": round(size / seconds / 1e9, 2),
    }
