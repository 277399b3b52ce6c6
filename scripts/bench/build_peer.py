"""Builds llama.cpp's tools and peer-rounds (peer/rounds.cpp), for tests and benchmarks.

Compiles only these executables, from the sources in llama-cpp-python's sdist, and links the
libraries of the installed wheel, so that both engines run the same kernels. The last line is the
folder of the executables.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash_gguf import Error
from dflash_gguf.backend_build.sources import DEFAULT_CACHE, fetch, installed_version

OURS = "peer-rounds"
DEFAULT_TARGETS = ("llama-speculative-simple", OURS)
PEER = Path(__file__).parent / "peer"
# Source folders that llama-server and llama-cli need besides their own.
SERVER_DIRS = ("tools/ui", "tools/server")


def build(targets: Sequence[str] = DEFAULT_TARGETS, cache: Path = DEFAULT_CACHE) -> Path:
    """Compiles missing llama.cpp tools; returns their folder. Processes may call this at once."""
    site_packages = _site_packages()
    library = site_packages / "lib" / "libllama-common.so"
    if not library.is_file():
        raise SystemExit(f"{library} is missing; build llama-cpp-python from its sdist")
    home = cache / f"peer-{installed_version()}-{_fingerprint(library)}"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [target for target in targets if not (home / target).is_file()]
        if missing:
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
                _compile(missing, fetch(cache), site_packages, Path(folder))
                for target in missing:
                    os.replace(Path(folder) / "bin" / target, home / target)
    return home


def can_repack() -> bool:
    """True unless the CPU has AMX: the wheel's AMX kernels (GCC 12) crash on repacked weights."""
    try:
        return " amx_int8" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _site_packages() -> Path:
    """Returns the folder that holds llama_cpp/ and lib/ of the installed llama-cpp-python."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("llama-cpp-python is not installed; install it with pip")
    return Path(spec.origin).parent.parent


def _fingerprint(library: Path) -> str:
    """Returns a hash of llama.cpp's library and peer-rounds' source: the tools depend on both."""
    stat = library.stat()
    facts = hashlib.sha256(f"{library} {stat.st_size} {stat.st_mtime_ns}".encode())
    for file in sorted(PEER.iterdir()):
        facts.update(file.read_bytes())
    return facts.hexdigest()[:12]


def _folder_of(target: str, sources: Path) -> str:
    for file in sorted(sources.glob("tools/*/CMakeLists.txt")) + sorted(
        sources.glob("examples/*/CMakeLists.txt")
    ):
        if f"set(TARGET {target})" in file.read_text(encoding="utf-8"):
            return file.parent.relative_to(sources).as_posix()
    raise SystemExit(f"llama.cpp has no tool named {target!r}")


def _compile(targets: list[str], sources: Path, site_packages: Path, folder: Path) -> None:
    folders = {_folder_of(target, sources) for target in targets if target != OURS}
    if folders & {"tools/server", "tools/cli"}:
        folders.update(SERVER_DIRS)
    configure = ["cmake", "-S", str(PEER), "-B", str(folder)]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DLLAMA_CPP={sources}"]
    configure += [f"-DSITE_PACKAGES={site_packages}", f"-DTOOL_DIRS={';'.join(sorted(folders))}"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    jobs = str(os.cpu_count() or 1)
    compile_ = ["cmake", "--build", str(folder), "--parallel", jobs, "--target", *targets]
    for command in (configure, compile_):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "targets", nargs="*", default=DEFAULT_TARGETS, help="tools to build; default: %(default)s"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        help="folder for sources and tools; default: %(default)s",
    )
    arguments = parser.parse_args()
    try:
        print(build(arguments.targets, arguments.cache))
    except Error as error:
        raise SystemExit(str(error)) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
