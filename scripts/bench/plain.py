"""Plain speed beside llama.cpp's own library: prefill of 512 tokens, then 128 tokens one by one.

    scripts/bench/plain.py MODEL.gguf... [--pairs 15]
    scripts/bench/plain.py MODEL.gguf... --read-loop [--pairs 15]

Both engines sit in one process, on one ggml, with the same threads, the same default weight
buffers, f16 K/V and flash attention, and read the same random tokens. llama.cpp is driven by
`llama_decode` alone, with logits of the last token only, as its llama-bench does. Ours goes through
`core.Sequence` as the decode loop does, so it also pays for Python's checks and the argmax.

One process rather than two, because then both use one OpenMP pool and take turns within a fraction
of a second: whatever else runs on the machine hits both alike. A pair is one prefill and one decode
of each engine, the one that goes first changing all the time, in a fresh process: where the
operating system puts the weights moves the speed of a whole process by a few per cent.

Prints tokens per second and the ratio ours/theirs: the median over the pairs and its 95 % bootstrap
interval. The last line is one JSON object.

With --read-loop there is no llama.cpp: a few decoded tokens take turns with a loop that only reads
512 MiB of huge pages, on as many threads. The ratio is the weights of a token by its time, over
what the loop reads in its time: 1 is as fast as memory allows, if the weights are many times the
caches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import llama_cpp
import numpy as np
from build_peer import can_repack
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.config import LoadConfig

N_UBATCH = 512
FLASH_ATTENTION_ON = 1  # enum llama_flash_attn_type
TYPE_F16 = 1  # enum ggml_type
LOG_LEVEL_ERROR = 4  # enum ggml_log_level
LOOP_BYTES = 512 << 20

Tokens = NDArray[np.int32]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _print_errors(level: int, text: bytes, _data: object) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


llama_cpp.llama_log_set(_print_errors, ctypes.c_void_p(0))


class Engine(Protocol):
    """What is timed. Calls return when the logits of the last token can be read."""

    def reset(self) -> None: ...
    def prefill(self, tokens: Tokens) -> None: ...
    def decode(self, token: int) -> None: ...
    def close(self) -> None: ...


class Ours:
    """This project's sequence."""

    def __init__(self, path: Path, config: LoadConfig) -> None:
        self.model = native.Model(str(path), config)
        self.sequence = native.Sequence(native.Engine(self.model))

    def reset(self) -> None:
        self.sequence.reset()

    def prefill(self, tokens: Tokens) -> None:
        self.sequence.prefill(tokens).argmax()

    def decode(self, token: int) -> None:
        self.sequence.decode(token).argmax()

    def close(self) -> None:
        self.sequence.close()
        self.sequence.engine.close()
        self.model.close()


class Theirs:
    """llama.cpp's context, through the C functions of its library."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int,
        n_ubatch: int = N_UBATCH,
        n_gpu_layers: int = 0,
    ) -> None:
        """n_gpu_layers: on whatever devices this process has, -1 for all."""
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        model_params.use_extra_bufts = can_repack()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise native.Error(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = params.type_v = TYPE_F16
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise native.Error(f"{path}: llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)

    def _run(self, tokens: Any, n: int) -> None:
        # a batch made so has the logits of its last token
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, n))
        if status != 0:
            raise native.Error(f"llama_decode of {n} tokens returned {status}")
        llama_cpp.llama_synchronize(self.context)

    def prefill(self, tokens: Tokens) -> None:
        self._run((ctypes.c_int32 * len(tokens))(*tokens.tolist()), len(tokens))

    def decode(self, token: int) -> None:
        self._run((ctypes.c_int32 * 1)(token), 1)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


@dataclass(frozen=True, slots=True)
class Work:
    """What one pair runs."""

    path: Path
    n_prompt: int
    n_decode: int
    n_segment: int
    n_threads: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one pair, [ours, theirs]."""

    prefill: tuple[float, float]
    decode: tuple[float, float]
    n_threads: int


def run_pair(work: Work) -> Times:
    """Loads both engines, warms them up and measures."""
    n_ctx = work.n_prompt + work.n_decode
    config = LoadConfig(n_ctx=n_ctx, n_ubatch=N_UBATCH, n_threads=work.n_threads, n_gpu_layers=0)
    ours = Ours(work.path, config)
    n_threads = ours.sequence.engine.n_threads
    engines: list[Engine] = [ours, Theirs(work.path, n_ctx, n_threads)]
    random = np.random.default_rng(work.index)
    tokens = random.integers(0, ours.model.n_vocab, n_ctx, dtype=np.int32)
    prompt, answer = tokens[: work.n_prompt], tokens[work.n_prompt :].tolist()
    segments = [answer[i : i + work.n_segment] for i in range(0, len(answer), work.n_segment)]
    prefill_times(engines, prompt, 1, work.index)  # warms up
    prefill = prefill_times(engines, prompt, 2, work.index)
    decode = decode_times(engines, segments, work.index)
    return Times(prefill, decode, n_threads)


def prefill_times(
    engines: Sequence[Engine], prompt: Tokens, n_runs: int, first: int
) -> tuple[float, float]:
    """Seconds of n_runs prefills from an empty cache, engines alternating."""
    times = [0.0, 0.0]
    for run in range(n_runs):
        for i in ((first + run) % 2, (first + run + 1) % 2):
            engines[i].reset()
            start = time.perf_counter()
            engines[i].prefill(prompt)
            times[i] += time.perf_counter() - start
    return times[0] / n_runs, times[1] / n_runs


def decode_times(
    engines: Sequence[Engine], segments: Sequence[list[int]], first: int
) -> tuple[float, float]:
    """Seconds of decoding all segments, engines alternating."""
    times = [0.0, 0.0]
    for n, tokens in enumerate(segments):
        for i in ((first + n) % 2, (first + n + 1) % 2):
            start = time.perf_counter()
            for token in tokens:
                engines[i].decode(token)
            times[i] += time.perf_counter() - start
    return times[0], times[1]


def median_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval."""
    random = np.random.default_rng(1)
    draws = np.median(random.choice(values, (10_000, len(values))), axis=1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def summary(times: NDArray[np.float64], n_tokens: int) -> dict[str, Any]:
    """Figures of one phase from seconds [n_pairs, 2]."""
    median, low, high = median_interval(times[:, 1] / times[:, 0])
    ours, theirs = (n_tokens / np.median(times, axis=0)).tolist()
    return {
        "ours_tokens_per_s": round(ours, 2),
        "theirs_tokens_per_s": round(theirs, 2),
        "ratio": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def bench(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one model file."""
    times = []
    for index in range(args.pairs):
        work = Work(path, args.prompt, args.decode, args.segment, args.threads, index)
        # spawn: a forked child would inherit a dead OpenMP pool
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
            times.append(child.submit(run_pair, work).result())
    return {
        "model": path.name,
        "threads": times[0].n_threads,
        "prefill": summary(np.array([x.prefill for x in times]), args.prompt),
        "decode": summary(np.array([x.decode for x in times]), args.decode),
    }


def print_row(result: dict[str, Any]) -> None:
    """One line for each phase."""
    for phase in ("prefill", "decode"):
        x = result[phase]
        low, high = x["interval"]
        print(
            f"{result['model']:32} {phase:8} ours {x['ours_tokens_per_s']:8.1f} tok/s   "
            f"llama.cpp {x['theirs_tokens_per_s']:8.1f} tok/s   "
            f"ratio {x['ratio']:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


def weights_of_a_token(path: Path) -> int:
    """Bytes of the weights that a plain step reads, as they lie in the file."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    counts = [reader.fields.get(f"{arch}.expert_{name}") for name in ("used_count", "count")]
    share = counts[0].contents() / counts[1].contents() if counts[0] and counts[1] else 1.0
    untied = any(tensor.name == "output.weight" for tensor in reader.tensors)
    return sum(
        int(tensor.n_bytes * (share if "_exps." in tensor.name else 1.0))
        for tensor in reader.tensors
        if not (untied and tensor.name == "token_embd.weight")  # of which one row is read
    )


class ReadLoop:
    """A loop that reads memory and does nothing else, on some threads."""

    def __init__(self, n_threads: int) -> None:
        self._threads = ThreadPoolExecutor(n_threads)
        # private: shared memory has small pages
        pages = mmap.mmap(-1, LOOP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        values = np.frombuffer(pages, np.int64)
        values[:] = 1
        self._parts = np.array_split(values, n_threads)

    def speed(self) -> float:
        """Bytes per second of one pass."""
        start = time.perf_counter()
        list(self._threads.map(np.bitwise_or.reduce, self._parts))
        return float(LOOP_BYTES / (time.perf_counter() - start))


def bench_read_loop(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Decoding of one model file by turns with a read loop."""
    n_prompt = min(args.prompt, 128)
    n_ctx = n_prompt + args.pairs * args.segment
    ours = Ours(path, LoadConfig(n_ctx=n_ctx, n_threads=args.threads, n_gpu_layers=0))
    n_threads = ours.sequence.engine.n_threads
    loop, n_bytes = ReadLoop(n_threads), weights_of_a_token(path)
    random = np.random.default_rng(0)
    tokens = random.integers(0, ours.model.n_vocab, n_ctx, dtype=np.int32)
    ours.prefill(tokens[:n_prompt])

    def decode(pair: int) -> float:
        first = n_prompt + pair * args.segment
        start = time.perf_counter()
        for token in tokens[first : first + args.segment].tolist():
            ours.decode(token)
        return float(n_bytes * args.segment / (time.perf_counter() - start))

    speeds = np.empty((args.pairs, 2))
    for pair in range(args.pairs):
        for i in (pair % 2, (pair + 1) % 2):
            speeds[pair, i] = loop.speed() if i else decode(pair)
    ours.close()
    ratio, low, high = median_interval(speeds[:, 0] / speeds[:, 1])
    decoding, reading = (np.median(speeds, axis=0) / 1e9).tolist()
    return {
        "model": path.name,
        "threads": n_threads,
        "weights_mb": round(n_bytes / 1e6, 1),
        "decode_gb_per_s": round(decoding, 2),
        "read_gb_per_s": round(reading, 2),
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def print_share(result: dict[str, Any]) -> None:
    """One line."""
    low, high = result["interval"]
    print(
        f"{result['model']:32} {result['threads']} threads   decode "
        f"{result['decode_gb_per_s']:6.1f} GB/s   read loop {result['read_gb_per_s']:6.1f} GB/s   "
        f"ratio {result['ratio']:.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str | None:
    """The checked-out commit, with a + if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True
    )
    return run.stdout.strip() or None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Plain speed beside llama.cpp's library")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--decode", type=int, default=128, help="tokens decoded after it")
    parser.add_argument("--segment", type=int, default=8, help="tokens before engines change")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument("--read-loop", action="store_true", help="beside a loop that only reads")
    args = parser.parse_args()
    results = []
    for path in args.models:
        try:
            results.append((bench_read_loop if args.read_loop else bench)(path, args))
        except (native.Error, ValueError) as error:
            sys.exit(f"error: {error}")
        (print_share if args.read_loop else print_row)(results[-1])
    facts = {
        "commit": commit(),
        "ggml": native.ggml_version(),
        "cpu": cpu_name(),
        "pairs": args.pairs,
        "prompt": args.prompt,
        "decode": args.decode,
        "results": results,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
