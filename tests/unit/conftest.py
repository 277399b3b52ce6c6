"""Unit tests import no torch and start no process, so that they run in seconds after every edit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dflash_gguf.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    here = Path(__file__).parent
    # Tests of other folders may import torch.
    if all(here in item.path.parents for item in request.session.items):
        assert "torch" not in sys.modules, "a unit test imports torch"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test starts a process")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture(autouse=True)
def templates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders chat templates in this process; system/test_template_process.py tests the other."""
    from dflash_gguf.text import template_process

    def call(_: object, name: str, *args: Any, **settings: Any) -> str:
        return template_process.FUNCTIONS[name](*args, **settings) or ""

    monkeypatch.setattr(template_process.TemplateProcess, "_call", call)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A tokenizer of the tiny byte-level vocabulary, which adds no BOS token."""
    from vocabularies import byte_level, write

    from dflash_gguf.text.tokenizer import Tokenizer

    found = Tokenizer.from_file(write(tmp_path / "a.gguf", byte_level(add_bos_token=False)))
    assert found is not None
    return found
