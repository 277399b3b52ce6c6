"""dflash-backend lists devices and compiles modules for the installed ggml."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import compiled_device

from dflash_gguf.backend_build import for_tests
from dflash_gguf.backend_build.build import module_path
from dflash_gguf.backend_build.command import main
from dflash_gguf.backend_build.sources import fetch, installed_version

COMMAND = "import sys; from dflash_gguf.backend_build.command import main; sys.exit(main())"
CMAKE = """\
#!{python}
import pathlib, shutil, sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1] == "--build":
    shutil.copy({module!r}, pathlib.Path(sys.argv[2]) / "libggml-vulkan.so")
else:
    pathlib.Path(sys.argv[sys.argv.index("-B") + 1]).mkdir()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs dflash-backend in a child process, which keeps loaded backends out of this one."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    sources = fetch()
    (folder / sources.name).symlink_to(sources)
    return folder


def test_a_module_is_compiled_once(cache: Path, tmp_path: Path) -> None:
    """A fake cmake copies a module instead of compiling one."""
    log, built = tmp_path / "cmake.log", compiled_device(tmp_path / "built.so")
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text(CMAKE.format(python=sys.executable, log=str(log), module=str(built)))
    cmake.chmod(cmake.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(cmake.parent), os.environ["PATH"]])
    module = module_path("vulkan", cache)
    for said in (f"compiling {module} ", ""):
        done = run("build", "vulkan", "--cache", str(cache), "--jobs", "3", PATH=path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{module}\n"
        assert done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == bool(said)
    configured, compiled = log.read_text().splitlines()
    assert {"-DGGML_BACKEND_DL=ON", "-DGGML_VULKAN=ON"} <= set(configured.split())
    assert compiled.endswith("--target ggml-vulkan --parallel 3")
    assert os.listdir(module.parent) == [module.name]
    listed = run("list", "--cache", str(cache))
    assert listed.returncode == 0, listed.stderr
    names = [line.partition(":")[0] for line in listed.stdout.splitlines()]
    assert {"CPU", "Fake0"} < set(names)
    assert listed.stdout.splitlines()[-1] == f"module: {module}"


def test_a_module_that_does_not_load_is_listed_with_the_reason(tmp_path: Path) -> None:
    module = module_path("vulkan", tmp_path)
    module.parent.mkdir()
    module.write_bytes(b"of another machine")
    done = run("list", "--cache", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("CPU: ")
    assert last.startswith(f"error: backend module {module}: not a ggml backend")


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    done = run("sources", "--cache", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"error: cannot download llama-cpp-python {installed_version()}")
    assert f"copy llama.cpp-{installed_version()} into {tmp_path}" in said
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    """llama-cpp-python with CUDA may lack cuBLAS or the driver."""
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('libmissing.so: cannot open')")
    (tmp_path / "empty.c").write_text("")
    shared = ["cc", "-shared", "-fPIC", "empty.c", "-o"]
    subprocess.run([*shared, "libmissing.so"], cwd=tmp_path, check=True)
    needing = ["-Wl,--no-as-needed", "-L.", "-lmissing"]
    subprocess.run([*shared, "llama_cpp/lib/libggml.so.0", *needing], cwd=tmp_path, check=True)
    (tmp_path / "libmissing.so").unlink()
    for module, *arguments in (
        ["dflash_gguf.backend_build.command", "list", "--cache", str(tmp_path)],
        ["dflash_gguf.cli.command", "--list-devices"],
        ["dflash_gguf.cli.command", "-p", "x"],
    ):
        code = COMMAND.replace("dflash_gguf.backend_build.command", module)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        said = done.stderr.splitlines()[-1]
        assert said.startswith("error: cannot open the core library: ")
        assert "libmissing.so: cannot open" in said
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["vulkan", "--arch", "86"], "--arch is for cuda only, leave it out"),
        (["cuda", "--jobs", "-1"], "--jobs is -1, must be at least 0"),
    ],
)
def test_a_bad_argument_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *arguments]) == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_sources_are_there_for_a_second_call(cache: Path) -> None:
    done = run("sources", "--cache", str(cache), PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "ggml" / "CMakeLists.txt").is_file()


def test_a_kernel_that_was_left_out_ends_the_process(tmp_path: Path) -> None:
    source, made = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text(
        "void ggml_cuda_op_x();\nint other();\n"
        'extern "C" void call() { ggml_cuda_op_x(); other(); }\nint other() { return 1; }\n'
    )
    subprocess.run(["c++", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    module = tmp_path / "module" / "libggml-cuda.so"
    for_tests._link(module, [made])
    call = f"import ctypes; ctypes.CDLL({str(module)!r}).call()"
    environment = os.environ | {"LD_LIBRARY_PATH": str(module.parent)}
    done = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True)
    assert done.returncode == 70
    assert done.stderr.decode().startswith(f"{for_tests.LEFT_OUT} _Z14ggml_cuda_op_xv")
