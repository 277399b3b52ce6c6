"""ggml's log stays off the terminal unless the application asks for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import make_gguf

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Model
from dflash_gguf.native._ffi import ggml_library

LEVELS = {"debug": 1, "info": 2, "warning": 3, "error": 4}  # values of enum ggml_log_level
Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@pytest.fixture
def ggml() -> Iterator[Any]:
    """The ggml library with its default log callback, which prints everything."""
    library = ctypes.CDLL(str(ggml_library()))
    library.ggml_log_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    old, data = ctypes.c_void_p(), ctypes.c_void_p()
    library.ggml_log_get(ctypes.byref(old), ctypes.byref(data))
    library.ggml_log_set(None, None)
    yield library
    library.ggml_log_set(old, data)


def log_all(library: Any) -> None:
    for name, level in LEVELS.items():
        library.ggml_log_internal(level, f"{name}\n".encode())


def load(path: Path) -> None:
    Model(str(path), LoadConfig(n_ctx=64, n_threads=1, n_gpu_layers=0))


def test_only_warnings_and_errors_are_printed(
    ggml: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(make_gguf(tmp_path, "llama"))
    capfd.readouterr()
    log_all(ggml)
    assert capfd.readouterr().err == "warning\nerror\n"


def test_a_callback_that_was_set_stays(ggml: Any, tmp_path: Path) -> None:
    lines: list[bytes] = []
    callback = Callback(lambda _level, text, _data: lines.append(text))
    ggml.ggml_log_set(ctypes.cast(callback, ctypes.c_void_p), None)
    load(make_gguf(tmp_path, "llama"))
    lines.clear()
    log_all(ggml)
    assert lines == [f"{name}\n".encode() for name in LEVELS]
