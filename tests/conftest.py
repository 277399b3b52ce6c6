"""Fixtures of all test folders."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("cffi", "dflash", "httpx", "hypothesis", "llama_cpp", "msgspec", "torch")
"""Packages of the core, of the server and of the tests, that stand for all others."""


def pytest_configure() -> None:
    """Restores SIGINT, which a background runner ignores and children would inherit.

    Ends the run with one sentence if the package or a package of its tests is not installed.
    """
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise pytest.UsageError(
            f"{', '.join(lacking)}: not installed; run `pip install -e '.[test]'` in this folder"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts one f32 file of each kind on first use; its checkpoint lies beside it."""
    from gguf_files import make_gguf

    return cache(lambda kind: make_gguf(tmp_path_factory.mktemp(kind), kind))
