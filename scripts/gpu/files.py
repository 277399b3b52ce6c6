"""Writes random models with the shapes of published ones, for bench_gpu.py's parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from synthetic_gguf import write_model
from synthetic_shapes import PRESETS

from gpu.setting import Figures, Setting

OUTTYPE = "q4_k_m"


def write_pair(
    folder: Path, preset: str, outtype: str, seed: int = 1, *, empty: bool = False
) -> tuple[Path, Path]:
    """Writes a random target and its drafter; returns both paths. preset: name of a shape."""
    name = f"{preset}-empty" if empty else preset
    target, drafter = folder / f"{name}.gguf", folder / f"{name}-dflash.gguf"
    _write(target, drafter, preset, outtype, seed, empty=empty)
    return target, drafter


def _write(
    target: Path, drafter: Path, preset: str, outtype: str, seed: int = 1, *, empty: bool = False
) -> None:
    write_model(target, PRESETS[preset], preset, outtype, seed, header_only=empty)
    shape = PRESETS[f"{preset}-dflash"]
    write_model(drafter, shape, preset, outtype, seed + 1, target, header_only=empty)


def measure(setting: Setting) -> Iterator[Figures]:
    """Writes the random target and drafter, unless they exist or --model names a target."""
    if setting.target_file is not None:
        yield {"written": [], "bytes": 0, "seconds": 0.0}
        return
    setting.folder.mkdir(parents=True, exist_ok=True)
    pair = setting.target, setting.drafter
    if all(path.is_file() for path in pair):
        yield {"written": [], "bytes": 0, "seconds": 0.0}
        return
    started = time.perf_counter()
    _write(*pair, setting.sizes.preset, OUTTYPE, empty=setting.null_gpu is not None)
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in pair)
    yield {
        "written": [path.name for path in pair],
        "bytes": size,
        "seconds": round(seconds, 2),
        "gb_per_s": round(size / seconds / 1e9, 2),
    }
