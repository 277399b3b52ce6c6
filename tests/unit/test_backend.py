"""Messages of failed builds name the cause."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from dflash_gguf.backend_build import command, sources
from dflash_gguf.backend_build.build import first_error
from dflash_gguf.backend_build.kernels import patched
from dflash_gguf.native import Error


def test_a_cache_that_cannot_be_written_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(cache: object) -> None:
        raise PermissionError(13, "Permission denied", str(cache))

    monkeypatch.setattr(command, "fetch", refuse)
    assert command.main(["sources", "--cache", "/c"]) == 1
    said = capsys.readouterr().err
    assert said == "error: /c: Permission denied; name a writable folder with --cache\n"


def test_other_sources_than_the_known_ones_are_refused(tmp_path: Path) -> None:
    sdist = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    sdist.write_bytes(b"malicious")
    for version in ("0.3.36", "0.3.37"):
        with pytest.raises(Error, match=r"has the SHA-256 [0-9a-f]{64}, expected is"):
            sources._check_hash(sdist, version)


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
    cmake += "\n  a.cpp:1:10: fatal error: vulkan.h: No such file"
    assert first_error(cmake) == "a.cpp:1:10: fatal error: vulkan.h: No such file"
    assert first_error("killed\n") == "killed"


def test_a_module_for_tests_is_cudas(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["vulkan"], ["cuda", "--arch", "86-real"]):
        assert command.main(["build", *more, "--for-tests", "few"]) == 1
        assert "--for-tests is for cuda only, and without --arch" in capsys.readouterr().err


PATCH = """\
--- a
+++ a
@@ -1,3 +1,4 @@
 one
+added
 two
-three
@@ -9,2 +9,2 @@
-nine
+9
"""


def test_a_patch_replaces_the_places_that_its_hunks_fit() -> None:
    assert patched("zero\none\ntwo\nthree\nnine\n", PATCH) == "zero\none\nadded\ntwo\n9\n"


@pytest.mark.parametrize(("text", "n"), [("one\nthree\n", 0), ("one\ntwo\nthree\n" * 2, 2)])
def test_a_patch_for_other_sources_is_an_error(text: str, n: int) -> None:
    with pytest.raises(Error, match=f"fits {n} places of ggml-cuda.cu"):
        patched(text, PATCH)
