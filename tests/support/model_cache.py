"""Caches random models under build/, so that torch is imported only for new ones.

A folder of build/tiny_models is named by a hash of the code and the packages that make models;
folders of other hashes are removed.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
MAKERS = ("checkpoints", "gguf_files", "hf_models", "mtp_train", "overfit", "pairs")
PACKAGES = ("dflash", "gguf", "llama-cpp-python", "numpy", "safetensors", "tokenizers", "torch")


def _digest(*parts: bytes | str) -> str:
    facts = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        facts.update(len(data).to_bytes(8, "little") + data)
    return facts.hexdigest()[:20]


def _content(path: Path) -> str:
    """Returns a hash of a file, or of all files of a folder with their names."""
    files = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file())
    return _digest(*(x for file in files for x in (str(file.relative_to(path)), file.read_bytes())))


@functools.cache
def _home() -> Path:
    sources = [SUPPORT / f"{name}.py" for name in MAKERS]
    sources += sorted((ROOT / "convert").rglob("*.py"))
    packages = [f"{name} {version(name)}" for name in (*PACKAGES, "transformers")]
    home = ROOT / "build" / "tiny_models" / _digest(*(x.read_bytes() for x in sources), *packages)
    home.mkdir(parents=True, exist_ok=True)
    for other in home.parent.iterdir():
        if other != home:
            shutil.rmtree(other, ignore_errors=True)
    return home


def _key(value: Any) -> str:
    return _content(value) if isinstance(value, Path) else repr(value)


def cached(make: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], Path]:
    """Wraps `make(folder, ...)` so that equal arguments copy the files of the first call.

    Paths among the arguments count by content.
    """

    @functools.wraps(make)
    def copied(folder: Path, *args: P.args, **kwargs: P.kwargs) -> Path:
        facts = [make.__name__, *map(_key, args)]
        facts += [f"{name}={_key(value)}" for name, value in sorted(kwargs.items())]
        entry = _home() / _digest(*facts)
        if not entry.is_dir():
            made = Path(tempfile.mkdtemp(dir=_home(), prefix="making-"))
            make(made, *args, **kwargs)
            try:
                made.rename(entry)
            except OSError:  # this model came from another process first
                shutil.rmtree(made)
        shutil.copytree(entry, folder, dirs_exist_ok=True)
        return folder

    return copied
