"""Generates answers with this package's own engine, from the target's GGUF file."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash_gguf
from dflash_gguf._files import appending, write_text

from .answers import LOG_EVERY_S, Answer

N_AT_ONCE = 16
"""Number of answers that are generated at once."""
ROUND_UP = 64
"""K/V cells that the last page of an answer may leave unused."""
N_KEPT = 128
"""Number of answers after which finished ones are saved."""


def generate(
    path: Path,
    prompts: Sequence[Sequence[int]],
    *,
    n_new: int,
    temperature: float = 0.0,
    seed: int = 0,
    n_threads: int = 1,
    folder: Path | None = None,
) -> list[Answer]:
    """Continues every prompt by up to `n_new` tokens; a stop token ends an answer and stays in it.

    folder: folder where finished answers are saved, so that an interrupted run continues.
    """
    n_ctx = N_AT_ONCE * (max(map(len, prompts), default=1) + n_new + ROUND_UP)
    config = dflash_gguf.DecodeConfig(
        max_tokens=n_new, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, draft="none"
    )
    work = [(list(prompt), config, seed + i) for i, prompt in enumerate(prompts)]
    kept = None if folder is None else Kept(folder, [path.stat().st_size, n_new, temperature, work])
    answers = [] if kept is None else kept.answers()
    if answers:
        print(f"answers: {len(answers)} of {len(prompts)} were saved before", flush=True)
    reported = time.monotonic()
    options = {"n_ctx": n_ctx, "n_threads": n_threads, "n_parallel": N_AT_ONCE}
    with warnings.catch_warnings():
        # n_ctx is shared by all answers, so no answer exceeds the trained context.
        warnings.filterwarnings("ignore", message="n_ctx is .*, the model was trained for")
        decoder = dflash_gguf.load(path, **options)
    with decoder:
        while len(answers) < len(prompts):
            chosen = range(len(answers), min(len(answers) + N_KEPT, len(prompts)))
            results = decoder.generate_batch(
                [prompts[i] for i in chosen], config, seed=[seed + i for i in chosen]
            )
            for i, result in zip(chosen, results, strict=True):
                answers.append(Answer((*prompts[i], *result.tokens), len(prompts[i])))
                if kept is not None:
                    kept.add(answers[-1])
            if time.monotonic() - reported > LOG_EVERY_S:
                print(f"answers: {len(answers)} of {len(prompts)}", flush=True)
                reported = time.monotonic()
    return answers


class Kept:
    """A file of finished answers, one JSON line for each, in the order of their prompts."""

    def __init__(self, folder: Path, what: Any) -> None:
        """Names the file by a hash of `what`, all values on which the answers depend."""
        digest = hashlib.sha256(repr(what).encode()).hexdigest()
        self._path = folder / f"drawn-{digest[:16]}.jsonl"

    def answers(self) -> list[Answer]:
        """Returns the saved answers; cuts off a last line that an interruption left incomplete."""
        if not self._path.is_file():
            return []
        *lines, cut = self._path.read_text(encoding="utf-8").split("\n")
        if cut:
            write_text(self._path, "".join(f"{line}\n" for line in lines))
        return [Answer(tuple(tokens), n) for n, tokens in map(json.loads, lines)]

    def add(self, answer: Answer) -> None:
        """Appends an answer to the file."""
        with appending(self._path) as file:
            file.write(json.dumps([answer.n_prompt, answer.tokens]).encode() + b"\n")
