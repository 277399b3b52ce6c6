"""Entry points of the commands."""

from __future__ import annotations

from typing import NoReturn

import pytest

from dflash_gguf import _entry


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_: str) -> NoReturn:
        raise ModuleNotFoundError(name="starlette")

    monkeypatch.setattr(_entry, "import_module", absent)
    assert _entry.dflash_serve() == 1
    assert (
        "starlette is not installed: pip install 'dflash-gguf[server]'" in capsys.readouterr().err
    )
    assert _entry.dflash_run() == 1
    assert "install dflash-gguf again" in capsys.readouterr().err
