"""llama.cpp's converter and tools, which scripts fetch and build on first use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from dflash_gguf.backend_build.sources import fetch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PeerJob:
    """One run of llama.cpp's converter; `pre` replaces the pre-tokenizer lookup by hash."""

    arguments: list[str]
    pre: str | None = None


def _script(name: str, *arguments: str) -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"scripts/bench/{name} failed: {done.stderr}")
    return Path(done.stdout.splitlines()[-1])


@cache
def llama_cpp_sources() -> Path:
    return fetch()


@cache
def peer_tools() -> Path:
    return _script("build_peer.py")


def run_peer_converter(jobs: Sequence[PeerJob]) -> None:
    """Runs all jobs in one process, since its start takes longer than a conversion."""
    driver = Path(__file__).parent / "peer_converter.py"
    jobs_json = json.dumps([asdict(job) for job in jobs])
    command = [sys.executable, str(driver), str(llama_cpp_sources()), jobs_json]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp's converter failed: {done.stderr[-2000:]}")
