"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A runner in the background has SIGINT ignored, and so would every child; Ctrl-C is tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One converted f32 file of each kind, made on first use; its checkpoint lies beside it."""
    from gguf_files import make_gguf

    made: dict[str, Path] = {}

    def of_kind(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_gguf(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of_kind
