"""Measures our engine and llama.cpp on the same device, one after the other.

A GPU may have memory for the weights only once, so our engine is freed before llama.cpp loads. Our
figures come first, in lines without a ratio.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import median
from time import perf_counter

import numpy as np
from engines import N_UBATCH, Engine, Tokens
from engines import Ours as OurEngine
from engines import Theirs as TheirEngine
from plain import prefill_seconds
from rounds import Forced, Milliseconds, Ours, Peer, Theirs, equal_work, medians
from turns import ratio

from dflash_gguf.text.gguf_metadata import GgufMetadata
from gpu import null_gpu
from gpu.acceptance import FIRST_ID
from gpu.setting import Figures, Setting
from gpu.speed import close_pair, open_pair

ACCEPTED = (2, 4, 8)
N_DRAFT = 15
N_RUNS = 5
MOST_PROMPT_TOKENS = 16384
"""Maximum prompt tokens of all timed prefills of one length; one prefill may have more."""


def plain(setting: Setting) -> Iterator[Figures]:
    """Measures plain decoding; yields median tokens per second: ours, then both engines'."""
    sizes = setting.sizes
    prompt, answer = _random(setting, sizes.n_prompt, 1), _random(setting, sizes.n_decode, 2)

    kernels: Figures = {}

    def speeds(engine: Engine) -> list[float]:
        found = []
        for _ in range(N_RUNS + 1):
            engine.reset()
            engine.prefill(prompt)
            before = null_gpu.counts()
            started = perf_counter()
            for token in answer:
                engine.decode(token)
            found.append(len(answer) / (perf_counter() - started))
            kernels.update(null_gpu.kernels_a_graph(before, null_gpu.counts()))
        return found[1:]  # the first run warms up

    found: list[list[float]] = []
    for open_ in _engines(setting, sizes.n_prompt + sizes.n_decode):
        with closing(open_()) as engine:
            found.append(speeds(engine))
        rates = _rates([median(runs) for runs in found])
        yield {"n_prompt": sizes.n_prompt, **rates, **kernels}
    yield ratio(*found)


def prefill(setting: Setting) -> Iterator[Figures]:
    """Measures prefill of each prompt length, long prompts in fewer runs: their times vary less."""
    lengths = setting.sizes.prompts
    found: dict[int, list[float]] = {n: [] for n in lengths}
    for open_ in _engines(setting, max(lengths)):
        with closing(open_()) as engine:
            engine.prefill(_random(setting, min(lengths), 1))  # untimed warm-up run
            for n in lengths:
                n_runs = max(1, min(3, MOST_PROMPT_TOKENS // n))
                seconds = [
                    prefill_seconds({"": engine}, _random(setting, n, 1), 1)[""]
                    for _ in range(n_runs)
                ]
                found[n].append(n / median(seconds))
                yield {"tokens": n, "n_ubatch": N_UBATCH, **_rates(found[n])}


def chain(setting: Setting) -> Iterator[Figures]:
    """Measures rounds of 15 drafted tokens, of which 2, 4 or 8 are accepted by force."""
    sizes = setting.sizes
    device = setting.found_device()
    n_ctx = sizes.n_prompt + 64 + sizes.n_rounds * (max(ACCEPTED) + 1)
    sequence = open_pair(setting, n_ctx)
    n_vocab = sequence.engine.model.n_vocab

    def work(accept: int, run: int) -> Forced:
        return Forced.random(n_vocab, sizes.n_prompt, sizes.n_rounds, N_DRAFT, accept, run)

    def table(engine: Ours | Theirs, accept: int) -> list[Milliseconds]:
        engine.rounds(work(accept, 0))  # untimed warm-up run
        return [engine.rounds(work(accept, run + 1)) for run in range(N_RUNS)]

    ours = {}
    for accept in ACCEPTED:
        ours[accept] = table(Ours(sequence), accept)
        yield {"accepted": accept, "ours": medians(ours[accept])}
    close_pair(sequence)
    del sequence
    on_gpu = device.type == "gpu"
    with Peer(
        setting.target,
        setting.drafter,
        n_draft=N_DRAFT,
        n_ctx=n_ctx,
        options=["-t", str(setting.threads or _n_cpus())],
        tools=setting.tools,
        device=device.name if on_gpu else None,
        module=setting.module if on_gpu else None,
    ) as peer:
        for accept in ACCEPTED:
            both = [ours[accept], table(Theirs(peer), accept)]
            yield {"accepted": accept, **equal_work(both)}


def _engines(setting: Setting, n_ctx: int) -> tuple[Callable[[], Engine], Callable[[], Engine]]:
    """Returns two functions, which load the target in our engine and in llama.cpp."""
    on_gpu = -1 if setting.n_gpu_layers is None else setting.n_gpu_layers
    n_layers = 0 if setting.found_device().type == "cpu" else on_gpu
    n_threads = setting.threads or _n_cpus()
    config = setting.load_config(n_ctx=n_ctx, n_ubatch=N_UBATCH)
    return (
        lambda: OurEngine(setting.target, config),
        lambda: TheirEngine(setting.target, n_ctx, n_threads, n_gpu_layers=n_layers),
    )


def _rates(tokens_per_s: Sequence[float]) -> Figures:
    """Returns fields for the tokens per second of our engine, or of both engines with a ratio."""
    names = ("ours_tokens_per_s", "llama.cpp_tokens_per_s")
    figures: Figures = {x: round(y, 2) for x, y in zip(names, tokens_per_s, strict=False)}
    if len(tokens_per_s) == len(names):
        figures["ratio"] = round(tokens_per_s[0] / tokens_per_s[1], 4)
    return figures


def _random(setting: Setting, n: int, seed: int) -> Tokens:
    with GgufMetadata(setting.target) as file:
        n_vocab = file.entries["tokenizer.ggml.tokens"].count
    return np.random.default_rng(seed).integers(FIRST_ID, n_vocab, n, dtype=np.int32)


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0))
