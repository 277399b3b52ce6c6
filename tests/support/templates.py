"""Chat templates of many models, from the sources of llama.cpp that backends are built from."""

from __future__ import annotations

import tarfile
import tempfile
from functools import cache
from pathlib import Path

from dflash_gguf.backend_build import sources

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "vendor/llama.cpp/models/templates/"


@cache
def templates() -> dict[str, str]:
    """Returns the templates by file name without ending; downloads them on first use."""
    version = sources.installed_version()
    home = ROOT / "build" / f"templates-{version}"
    if not home.is_dir():
        home.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            sdist = sources._download(version, Path(folder), home)
            made = Path(folder) / "made"
            made.mkdir()
            with tarfile.open(sdist) as archive:
                for member in archive.getmembers():
                    if FOLDER in member.name and (file := archive.extractfile(member)):
                        (made / Path(member.name).name).write_bytes(file.read())
            made.rename(home)
    return {path.stem: path.read_text(encoding="utf-8") for path in home.glob("*.jinja")}
