"""Fixtures of all test folders."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Restores SIGINT, which a background runner ignores and children would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts one f32 file of each kind on first use; its checkpoint lies beside it."""
    from gguf_files import make_gguf

    made: dict[str, Path] = {}

    def of_kind(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_gguf(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of_kind
