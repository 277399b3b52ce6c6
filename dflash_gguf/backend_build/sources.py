"""Downloads the llama.cpp sources of the installed llama-cpp-python, with ggml, as its sdist."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import tarfile
import tempfile
from pathlib import Path

from .._cache_dir import cache_folder
from .._run_module import module_command
from ..native import Error

PACKAGE = "llama-cpp-python"
SHA256 = {"0.3.36": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"}
"""SHA-256 of the sdist of each version: its code is compiled and loaded."""
DEFAULT_CACHE = cache_folder()


def installed_version() -> str:
    """Returns the version of the installed llama-cpp-python, which this package pins."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise Error(f"{PACKAGE} is not installed; reinstall dflash-gguf") from None


def fetch(cache: Path = DEFAULT_CACHE) -> Path:
    """Returns the folder of llama.cpp's sources; downloads them if missing (Error if it fails)."""
    version = installed_version()
    home = cache / f"llama.cpp-{version}"
    if home.is_dir():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as temporary:
        sdist = _download(version, Path(temporary), home)
        sources = _unpack(sdist, Path(temporary))
        try:
            sources.rename(home)
        except OSError:
            if not home.is_dir():
                raise
    return home


def _download(version: str, folder: Path, home: Path) -> Path:
    command = [*module_command("pip"), "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or len(archives) != 1:
        said = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise Error(
            f"cannot download {PACKAGE} {version} ({said[-1]}): without a package index copy "
            f"{home.name} into {home.parent} from a machine that has it"
        )
    _check_hash(archives[0], version)
    return archives[0]


def _check_hash(sdist: Path, version: str) -> None:
    """Raises Error for an sdist that is not the one whose hash this package knows."""
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SHA256.get(version):
        raise Error(
            f"{sdist.name} has the SHA-256 {found}, expected is {SHA256.get(version, 'none')}: the "
            "package index serves other sources than PyPI did"
        )


def _unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks vendor/llama.cpp without files that no build needs."""
    with tarfile.open(sdist) as archive:
        root = f"{sdist.name.removesuffix('.tar.gz')}/vendor/llama.cpp"
        skipped = tuple(f"{root}/{part}/" for part in ("models", "media", "docs", "app", "tests"))
        members = [
            member
            for member in archive.getmembers()
            if member.name.startswith(root + "/") and not member.name.startswith(skipped)
        ]
        if not members:
            raise Error(f"{sdist.name} has no vendor/llama.cpp, the sources of ggml")
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, members, filter="data")
        else:
            archive.extractall(folder, members)
    return folder / root
