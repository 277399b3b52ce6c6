"""Answers drawn by this package itself, from the target's GGUF file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import dflash_gguf

from .answers import LOG_EVERY_S, Answer

# Of one process, which each thread of a training gets.
_decoder: dflash_gguf.Decoder | None = None


def generate(
    path: Path,
    prompts: Sequence[Sequence[int]],
    *,
    n_new: int,
    temperature: float = 0.0,
    seed: int = 0,
    n_threads: int = 1,
) -> list[Answer]:
    """Continues every prompt by up to `n_new` tokens; a stop token ends an answer and stays in it.

    They are the very tokens the file says where it runs, quantised as it is. A process a thread,
    which answers one prompt at a time: for small models several times as fast as batches in
    transformers, for large ones slower.

    Raises:
        ValueError, OSError, dflash_gguf.Error: the file cannot be loaded.
    """
    n_ctx = max(map(len, prompts), default=1) + n_new
    dflash_gguf.load(path, n_ctx=n_ctx).close()  # a bad file fails here, in words
    config = dflash_gguf.DecodeConfig(
        max_tokens=n_new, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, draft="none"
    )
    work = [(list(prompt), config, seed + i) for i, prompt in enumerate(prompts)]
    answers: list[Answer] = []
    reported = time.monotonic()
    with ProcessPoolExecutor(
        n_threads, get_context("spawn"), initializer=_open, initargs=(path, n_ctx)
    ) as pool:
        for answer in pool.map(_answer, work, chunksize=16):
            answers.append(answer)
            if time.monotonic() - reported > LOG_EVERY_S:
                print(f"answers: {len(answers)} of {len(prompts)}", flush=True)
                reported = time.monotonic()
    return answers


def _open(path: Path, n_ctx: int) -> None:
    global _decoder
    _decoder = dflash_gguf.load(path, n_ctx=n_ctx, n_threads=1)


def _answer(work: tuple[list[int], dflash_gguf.DecodeConfig, int]) -> Answer:
    prompt, config, seed = work
    if _decoder is None:
        raise RuntimeError("the process has not opened the file")
    result = _decoder.generate(prompt, config, seed=seed)
    return Answer((*prompt, *result.tokens), len(prompt))
