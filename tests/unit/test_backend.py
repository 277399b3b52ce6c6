"""Messages of failed builds name the cause."""

from __future__ import annotations

import textwrap

import pytest

from dflash_gguf.backend_build import command
from dflash_gguf.backend_build.build import first_error


def test_a_cache_that_cannot_be_written_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(cache: object) -> None:
        raise PermissionError(13, "Permission denied", str(cache))

    monkeypatch.setattr(command, "fetch", refuse)
    assert command.main(["sources", "--cache", "/c"]) == 1
    said = capsys.readouterr().err
    assert said == "error: /c: Permission denied; name a writable folder with --cache\n"


def test_what_a_compiler_says_is_wrong_is_found() -> None:
    log = textwrap.dedent("""\
        [1/2] c++ -Werror -c x.cu
        x.cu(3): error: no such name
        1 error found
        ninja: stopped
        """)
    assert first_error(log) == "x.cu(3): error: no such name"
    cmake = "-- looking\nCMake Error at x.cmake:2 (message):\n\n  no glslc\n\nmore"
    assert first_error(cmake) == "CMake Error at x.cmake:2 (message): no glslc"
    assert first_error("killed\n") == "killed"
