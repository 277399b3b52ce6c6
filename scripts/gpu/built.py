"""Builds the GPU's backend module, and peer-rounds with llama.cpp's drafting loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import build_peer

from dflash_gguf import native
from dflash_gguf.backend_build import build
from gpu.setting import Figures, Setting


def module(setting: Setting) -> Iterator[Figures]:
    """Builds the backend that --build names, unless a built module loads; yields its path."""
    if setting.build is None:
        raise ValueError("no backend to build; name its kind with --build")
    started = time.perf_counter()
    path = build.module_path(setting.build, setting.cache, setting.arch)
    is_there = path.is_file() and _loads(path)
    if not is_there:
        build.build(setting.build, setting.cache, arch=setting.arch, again=True)
        native.load_backend(str(path))
    yield {
        "module": str(path),
        "bytes": path.stat().st_size,
        "compiled": not is_there,
        "seconds": round(time.perf_counter() - started, 1),
    }


def tools(setting: Setting) -> Iterator[Figures]:
    """Builds peer-rounds, or takes the folder of --tools; yields the folder."""
    started = time.perf_counter()
    folder = setting.tools or build_peer.build([build_peer.OURS], setting.cache)
    yield {"folder": str(folder), "seconds": round(time.perf_counter() - started, 1)}


def _loads(path: Path) -> bool:
    try:
        native.load_backend(str(path))
    except native.Error:
        return False
    return True
