"""Holds unit tests to what they are: without torch, transformers and other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HEAVY = {"torch", "transformers"}


def _refuse(*command: Any, **_: Any) -> None:
    raise AssertionError(f"a unit test starts {command}; move it to tests/model or tests/system")


@pytest.fixture(scope="session")
def is_alone(request: pytest.FixtureRequest) -> bool:
    """True if the session runs unit tests only, so that nothing else has imported anything."""
    return all(Path(__file__).parent in item.path.parents for item in request.session.items)


@pytest.fixture(autouse=True)
def _is_light(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    yield
    assert not (is_alone and HEAVY & sys.modules.keys())
