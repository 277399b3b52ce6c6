"""Our engine beside llama.cpp on the same device and kernels, one after the other.

One after the other, since a card that just holds the weights once has no room for them twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
from bench_plain import Engine, Tokens, median_interval
from bench_plain import Ours as OurEngine
from bench_plain import Theirs as TheirEngine
from bench_prefill import rates
from draft_rounds import Forced, Milliseconds, Ours, Theirs, equal_work
from peer_rounds import Peer

from dflash_gguf.gguf_metadata import Metadata
from gpu.acceptance import FIRST_ID
from gpu.setting import Figures, Setting
from gpu.speed import open_pair

ACCEPTED = (2, 4, 8)
N_DRAFT = 15
N_RUNS = 5
N_UBATCH = 512
LONG_PROMPT = 8192


def plain(setting: Setting) -> Iterator[Figures]:
    """Tokens one by one, as many a second as the median run has."""
    sizes = setting.sizes
    prompt, answer = _random(setting, sizes.n_prompt, 1), _random(setting, sizes.n_decode, 2)

    def speeds(engine: Engine) -> list[float]:
        found = []
        for _ in range(N_RUNS + 1):
            engine.reset()
            engine.prefill(prompt)
            started = perf_counter()
            for token in answer:
                engine.decode(token)
            found.append(len(answer) / (perf_counter() - started))
        return found[1:]  # the first warms up

    n_ctx = sizes.n_prompt + sizes.n_decode
    found = {name: _with(open_, speeds) for name, open_ in _engines(setting, n_ctx).items()}
    yield {"n_prompt": sizes.n_prompt, **_ratio(found)}


def prefill(setting: Setting) -> Iterator[Figures]:
    """Prompts of several lengths, each engine's median of three runs, two of long ones."""
    lengths = setting.sizes.prompts

    def speeds(engine: Engine) -> list[float]:
        engine.prefill(_random(setting, min(lengths), 1))  # warms up
        n_runs = {n: 3 if n <= LONG_PROMPT else 2 for n in lengths}
        return [rates({"": engine}, _random(setting, n, 1), n_runs[n])[""] for n in lengths]

    opens = _engines(setting, max(lengths))
    found = {name: _with(open_, speeds) for name, open_ in opens.items()}
    for index, n in enumerate(lengths):
        ours, theirs = (found[name][index] for name in opens)
        yield {
            "tokens": n,
            "n_ubatch": N_UBATCH,
            "ours_tokens_per_s": round(ours, 1),
            "llama.cpp_tokens_per_s": round(theirs, 1),
            "ratio": round(ours / theirs, 4),
        }


def chain(setting: Setting) -> Iterator[Figures]:
    """Rounds of equal work: 15 drafted, 16 verified, so many accepted by force."""
    sizes = setting.sizes
    device = setting.found_device()
    n_ctx = sizes.n_prompt + 64 + sizes.n_rounds * (max(ACCEPTED) + 1)
    session = open_pair(setting, n_ctx)
    n_vocab = session.model.n_vocab

    def work(accept: int, run: int) -> Forced:
        return Forced.random(n_vocab, sizes.n_prompt, sizes.n_rounds, N_DRAFT, accept, run)

    def tables(engine: Ours | Theirs) -> dict[int, list[Milliseconds]]:
        for accept in ACCEPTED:
            engine.rounds(work(accept, 0))  # warms up
        return {n: [engine.rounds(work(n, run + 1)) for run in range(N_RUNS)] for n in ACCEPTED}

    ours = tables(Ours(session))
    session.close()
    session.model.close()
    del session
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
        theirs = tables(Theirs(peer))
    for accept in ACCEPTED:
        yield {"accepted": accept, **equal_work([ours[accept], theirs[accept]])}


def _engines(setting: Setting, n_ctx: int) -> dict[str, Callable[[], Engine]]:
    n_layers = 0 if setting.found_device().type == "cpu" else -1
    n_threads = setting.threads or _n_cpus()
    config = setting.load_config(n_ctx=n_ctx, n_ubatch=N_UBATCH)
    return {
        "ours": lambda: OurEngine(setting.target, config),
        "llama.cpp": lambda: TheirEngine(setting.target, n_ctx, n_threads, N_UBATCH, n_layers),
    }


def _with(open_: Callable[[], Engine], use: Callable[[Engine], list[float]]) -> list[float]:
    engine = open_()
    try:
        return use(engine)
    finally:
        engine.close()


def _ratio(found: dict[str, list[float]]) -> Figures:
    ours, theirs = (np.array(values) for values in found.values())
    median, low, high = median_interval(ours / theirs)
    return {
        "ours_tokens_per_s": round(float(np.median(ours)), 2),
        "llama.cpp_tokens_per_s": round(float(np.median(theirs)), 2),
        "ratio": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def _random(setting: Setting, n: int, seed: int) -> Tokens:
    with Metadata(setting.target) as file:
        n_vocab = file.entries["tokenizer.ggml.tokens"].count
    return np.random.default_rng(seed).integers(FIRST_ID, n_vocab, n, dtype=np.int32)


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0))
