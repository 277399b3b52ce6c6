"""The core's library in child processes."""

import os
import subprocess
import sys

import pytest


def test_importing_the_package_loads_no_library():
    code = (
        "import sys, dflash_gguf;"
        "maps = open('/proc/self/maps').read();"
        "sys.exit('libggml' in maps or 'libdflash' in maps)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


_MAPPED = """
def mapped():
    lines = open("/proc/self/maps").read().splitlines()
    return sorted(x.split()[-1] for x in lines if "libggml" in x and "r-xp" in x)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import llama_cpp; before = mapped(); import dflash_gguf; dflash_gguf.devices()",
        "import dflash_gguf; dflash_gguf.devices(); before = mapped(); import llama_cpp",
    ],
    ids=["llama_cpp first", "dflash_gguf first"],
)
def test_one_ggml_serves_the_process(code):
    check = "\nassert len(before) >= 3 and mapped() == before, (before, mapped())"
    done = subprocess.run(
        [sys.executable, "-c", _MAPPED + code + check], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_threads_that_come_first_together_open_the_library_once():
    code = (
        "import threading; from dflash_gguf import native\n"
        "start, failed = threading.Barrier(8), []\n"
        "def first():\n"
        "    start.wait()\n"
        "    try: native.ggml_version()\n"
        "    except Exception as error: failed.append(error)\n"
        "threads = [threading.Thread(target=first) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not failed, failed\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_of_the_environment_is_loaded_or_named(tmp_path):
    code = (
        "from dflash_gguf import native\ntry: native.devices()\nexcept native.Error as e: print(e)"
    )
    environment = {**os.environ, "GGML_BACKEND_PATH": str(tmp_path / "absent.so")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "absent.so: no such file" in done.stdout, done.stderr
