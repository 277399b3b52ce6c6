"""Threads and signals during calls of the core."""

from __future__ import annotations

import subprocess
import sys

from dflash_gguf import bundled

# A call inside the caller's parallel region gets one thread, calls before and after it get two.
# ggml is built with libgomp here.
NESTED = """
import ctypes, sys
from dflash_gguf import native
from dflash_gguf.config import LoadConfig

gomp = ctypes.CDLL("libgomp.so.1")
model = native.Model(sys.argv[1], LoadConfig(n_ctx=64, n_threads=2, n_gpu_layers=0))
sequence = native.Sequence(native.Engine(model))

def answer(n=6):
    sequence.reset()
    found = [sequence.prefill([1, 2, 3]).argmax()]
    for _ in range(n):
        found.append(sequence.decode(found[-1]).argmax())
    return found

expected, nested = answer(), []

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def region(_):
    if gomp.omp_get_thread_num() == 0:
        nested.append(answer())

gomp.GOMP_parallel(region, None, 2, 0)
assert nested == [expected], (nested, expected)
assert answer() == expected
gomp.omp_set_dynamic(1)
assert answer() == expected
print("same")
"""

INTERRUPTED = """
import random, signal, sys
from dflash_gguf import native
from dflash_gguf.config import LoadConfig

def stop(*_):
    raise KeyboardInterrupt

chosen, n_ended = random.Random(1), 0
signal.signal(signal.SIGALRM, stop)
for _ in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-4, 0.02))
        native.Model(sys.argv[1], LoadConfig(n_threads=1), lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        n_ended += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(n_ended)
"""


def test_calls_from_a_parallel_region_and_after_it() -> None:
    target = bundled.TARGET
    run = subprocess.run(
        [sys.executable, "-c", NESTED, str(target)], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "same", run.stderr


def test_a_signal_ends_a_load() -> None:
    """The signal comes while the core loads, and is raised where the core calls back."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(bundled.TARGET)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert int(run.stdout) > 0, run.stderr
    assert "cffi callback" not in run.stderr
