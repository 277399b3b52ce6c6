"""Normal and editable installs from the sdist, each in a new environment, without build isolation.

The environment sees the packages of the test runner, so that only our core is compiled.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
from pathlib import Path

import pytest

from dflash_gguf import native
from dflash_gguf.native._ffi import ABI_VERSION

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Drops PYTHONPATH; compiles without optimisation, since the core hardly runs here."""
    quick = "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_CXX_FLAGS=-DDFL_FEW_ROWS"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"CMAKE_ARGS": quick}


def pip(environment: Path, *arguments: str | Path, cwd: Path) -> str:
    python = environment / "bin" / "python"
    quiet = ("--disable-pip-version-check", "-q")
    return run(sys.executable, "-m", "pip", "--python", python, *quiet, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist. Both installs build in this folder, so that the core is compiled once."""
    folder = tmp_path_factory.mktemp("sdist")
    hook = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", hook, folder, cwd=ROOT)
    (archive,) = folder.glob("dflash_gguf-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(params=["normal", "editable"])
def installed(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    outer = site.getsitepackages()
    (packages / "outer.pth").write_text("\n".join(outer) + "\n")
    editable = ["-e"] if request.param == "editable" else []
    alone = ("install", "--no-build-isolation", "--no-deps", "--no-index")
    pip(environment, *alone, *editable, source, cwd=tmp_path)
    return environment


def test_an_install_works_from_any_folder(installed: Path, source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    binaries = installed / "bin"
    code = "import dflash_gguf; dflash_gguf.devices(); print(dflash_gguf.__file__)"
    for folder in (elsewhere, source):
        where = run(binaries / "python", "-c", code, cwd=folder)
        assert where.startswith((str(installed), str(source)))
        for command in (
            [binaries / "convert-hf-to-gguf"],
            [binaries / "python", "-m", "dflash_gguf.convert"],
            [binaries / "dflash-backend"],
            [binaries / "dflash-run"],
            [binaries / "dflash-train"],
            [binaries / "python", "-m", "dflash_gguf"],
        ):
            assert run(*command, "--help", cwd=folder).startswith("usage: ")


def configure(prefix: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["-DGGML_CUDA=on", f"-DCMAKE_PREFIX_PATH={prefix}"]
    options.append(f"-DPython3_EXECUTABLE={sys.executable}")
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_install_for_cuda_without_it_is_refused(tmp_path: Path) -> None:
    """A cached wheel of llama-cpp-python may lack CUDA."""
    outer = Path(sysconfig.get_path("purelib"))
    done = configure(outer, tmp_path / "refused")
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "GGML_CUDA is wanted, but llama-cpp-python was built without it (ggml-cpu)." in said
    assert "PIP_CACHE_DIR=" in said

    with_cuda = tmp_path / "with-cuda"
    shutil.copytree(outer / "lib" / "cmake", with_cuda / "lib" / "cmake")
    (with_cuda / "include").symlink_to(outer / "include")
    for library in (outer / "lib").glob("libggml*.so"):
        (with_cuda / "lib" / library.name).symlink_to(library)
    (with_cuda / "lib" / "libggml-cuda.so").symlink_to(outer / "lib" / "libggml-cpu.so")
    config = with_cuda / "lib" / "cmake" / "ggml" / "ggml-config.cmake"
    text = config.read_text()
    backends = 'set(GGML_AVAILABLE_BACKENDS "ggml-cpu'
    assert backends in text
    config.write_text(text.replace(backends, backends + ";ggml-cuda"))
    done = configure(with_cuda, tmp_path / "configured")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("abi", "ggml", "message"),
    [
        (ABI_VERSION, "0.0.1", "libdflash was built with ggml 0.0.1; reinstall dflash-gguf"),
        (99, "0.0.1", f"libdflash has ABI version 99, this package needs {ABI_VERSION}"),
    ],
)
def test_a_core_of_other_versions_is_refused(
    abi: int, ggml: str, message: str, source: Path, tmp_path: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler"
    package = tmp_path / "dflash_gguf"
    shutil.copytree(source / "dflash_gguf", package)
    shutil.copytree(source / "convert", package / "convert")
    shutil.copy(source / "csrc" / "dflash.h", package)
    (tmp_path / "fake.c").write_text(
        textwrap.dedent(f"""
            int dfl_abi_version(void) {{ return {abi}; }}
            const char * dfl_ggml_version(void) {{ return "{native.ggml_version()}"; }}
            const char * dfl_ggml_build_version(void) {{ return "{ggml}"; }}
        """)
    )
    run(compiler, "-shared", "-fPIC", "fake.c", "-o", package / "libdflash.so", cwd=tmp_path)
    code = (
        "import sys; sys.path.insert(0, '.'); from dflash_gguf import native\n"
        "try: native.devices()\n"
        "except native.Error as error: print(error)"
    )
    # -S skips .pth files, so that no editable install provides the package.
    packages = site.getsitepackages()
    code = f"import sys; sys.path += {packages!r}\n" + code
    assert message in run(sys.executable, "-S", "-c", code, cwd=tmp_path)
