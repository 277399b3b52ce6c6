"""Calls C functions: opens ggml and libdflash on first use, turns error codes into exceptions.

cffi reads its declarations from `dflash.h` when this module is imported, because limits are in that
file. ggml is the file in llama-cpp-python that libllama links to, so that the process has one ggml.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from cffi import FFI

ABI_VERSION = 31

ffi: Any = FFI()

_LIBRARY_NAMES = {"darwin": "lib{}.dylib", "win32": "{}.dll"}


class Error(Exception):
    """Raised when a call of the core fails. The message is one sentence for the user."""


def library_name(stem: str) -> str:
    return _LIBRARY_NAMES.get(sys.platform, "lib{}.so").format(stem)


def installed_file(name: str) -> Path:
    """Returns the path of a file that CMake installs; Error if it is missing."""
    # Python files and compiled ones may lie in two folders, in a clone and in site-packages.
    folders = list(sys.modules["dflash_gguf"].__path__)
    for folder in folders:
        if (path := Path(folder) / name).is_file():
            return path
    raise Error(f"{name}: not found in {folders}; run `pip install .` in the clone")


def library_build() -> str:
    """Returns a key of this build of libdflash: the size and modification time of its file."""
    stat = installed_file(library_name("dflash")).stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def ggml_library() -> Path:
    """Returns the path of the libggml that llama-cpp-python loads."""
    spec = importlib.util.find_spec("llama_cpp")
    plain = library_name("ggml")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # Prefer the name that libllama links to: in a wheel the other file is a second ggml.
        for name in (f"{plain}.0", plain):
            if (path := Path(folder) / "lib" / name).is_file():
                return path
    raise Error(
        "llama-cpp-python, which has the ggml libraries, is not installed; reinstall dflash-gguf"
    )


def lib() -> Any:
    """Returns libdflash; Error unless it has this package's ABI and was built for this ggml."""
    with _opening:  # lru_cache alone would let several threads open the library
        return _open()


def value(function: str, *args: Any) -> int:
    """Returns the integer of `dfl_<function>(*args)`, a function that cannot fail."""
    return int(_function("dfl_" + function)(*args))


def _declarations() -> str:
    header = installed_file("dflash.h").read_text(encoding="utf-8")
    lines = [x for x in header.splitlines() if not x.startswith("#") and 'extern "C"' not in x]
    # The lone closing brace belongs to `extern "C" {`, a line of dflash.h that is left out too.
    return "\n".join(x for x in lines if x.strip() != "}")


ffi.cdef(_declarations())


def constants(enum: str) -> dict[str, int]:
    return dict(ffi.typeof(enum).relements)


def fields_of(struct: str) -> set[str]:
    return {name for name, _ in ffi.typeof(struct).fields}


@lru_cache(maxsize=1)
def _open() -> Any:
    try:
        keep = ffi.dlopen(str(ggml_library()), ffi.RTLD_NOW | ffi.RTLD_GLOBAL)
        core = ffi.dlopen(str(installed_file(library_name("dflash"))), ffi.RTLD_NOW)
    except OSError as error:
        raise Error(f"cannot open the core library: {error}") from error
    if (version := core.dfl_abi_version()) != ABI_VERSION:
        raise Error(
            f"libdflash has ABI version {version}, this package needs {ABI_VERSION}; "
            "reinstall dflash-gguf"
        )
    have, want = (
        ffi.string(f()).decode() for f in (core.dfl_ggml_version, core.dfl_ggml_build_version)
    )
    if have != want:
        raise Error(
            f"ggml {have} is loaded, libdflash was built with ggml {want}; reinstall dflash-gguf"
        )
    _keep_alive.append(keep)
    return core


_keep_alive: list[Any] = []
_opening = threading.Lock()


_functions: dict[str, Any] = {}
_of_thread = threading.local()


def _function(name: str) -> Any:
    """Returns a C function from a cache, as cffi's look-up takes as long as a short call."""
    function = _functions.get(name)
    if function is None:
        function = _functions[name] = getattr(lib(), name)
    return function


def call(function: str, *args: Any) -> None:
    """Calls `dfl_<function>(*args, err)` and raises Error unless it returns DFL_STATUS_OK."""
    run = _function("dfl_" + function)
    try:
        err = _of_thread.err
    except AttributeError:
        err = _of_thread.err = new("dfl_error *")
    if run(*args, err) != 0:
        raise Error(ffi.string(err.message).decode(errors="replace"))


def create(kind: str, function: str, *args: Any) -> Any:
    """Returns the handle that `dfl_<function>(*args, &handle, err)` creates; Python frees it."""
    out = new(f"dfl_{kind} **")
    call(function, *args, out)
    return ffi.gc(out[0], getattr(lib(), f"dfl_{kind}_free"))


def new(cdecl: str, init: Any = None) -> Any:
    return ffi.new(cdecl, init)


def text(value: Any) -> str:
    return str(ffi.string(value).decode(errors="replace"))
