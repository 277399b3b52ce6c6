"""Generates the target's answers to many prompts, on which a drafter is trained."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import appending, write_text
from ..config import DecodeConfig
from ..decoder import Decoder
from ..outputs import Result
from .pieces import loop_end

LOG_EVERY_S = 30.0
KEPT = "drawn-"
"""Beginning of the names of files with answers that a run saved before it was interrupted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's answer to it, as token ids; n_prompt: tokens of the prompt."""

    tokens: tuple[int, ...]
    n_prompt: int


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    n_new: int,
    temperature: float = 0.0,
    seed: int = 0,
    folder: Path | None = None,
) -> list[Answer]:
    """Continues every prompt by up to `n_new` tokens; a stop token ends an answer and stays in it.

    folder: folder where finished answers are saved, so that an interrupted run continues.
    """
    config = DecodeConfig(
        max_tokens=n_new, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, draft="none"
    )
    work = [(list(prompt), config, seed + i) for i, prompt in enumerate(prompts)]
    kept = None if folder is None else Kept(folder, [n_new, temperature, work])
    answers = {} if kept is None else kept.answers()
    if answers:
        print(f"answers: {len(answers)} of {len(prompts)} were saved before", flush=True)
    missing = [i for i in range(len(prompts)) if i not in answers]
    started = reported = time.monotonic()
    n_tokens = 0

    def add(at: int, result: Result) -> None:
        nonlocal n_tokens, reported
        i, now = missing[at], time.monotonic()
        answers[i] = Answer((*prompts[i], *result.tokens), len(prompts[i]))
        n_tokens += len(result.tokens)
        if kept is not None:
            kept.add(i, answers[i])
        if now - reported > LOG_EVERY_S:
            speed = n_tokens / (now - started)
            print(f"answers: {len(answers)} of {len(prompts)}, {speed:.0f} tokens/s", flush=True)
            reported = now

    chosen, seeds = [list(prompts[i]) for i in missing], [seed + i for i in missing]
    decoder.generate_batch(chosen, config, seed=seeds, on_result=add)
    return [answers[i] for i in range(len(prompts))]


class Kept:
    """A file of finished answers by the numbers of their prompts, one JSON line for each."""

    def __init__(self, folder: Path, what: Any) -> None:
        """Names the file by a hash of `what`, all values on which the answers depend."""
        digest = hashlib.sha256(repr(what).encode()).hexdigest()
        self._path = folder / f"{KEPT}{digest[:16]}.jsonl"

    def answers(self) -> dict[int, Answer]:
        """Returns the saved answers; cuts off a last line that an interruption left incomplete."""
        if not self._path.is_file():
            return {}
        *lines, cut = self._path.read_text(encoding="utf-8").split("\n")
        if cut:
            write_text(self._path, "".join(f"{line}\n" for line in lines))
        return {i: Answer(tuple(tokens), n) for i, n, tokens in map(json.loads, lines)}

    def add(self, i: int, answer: Answer) -> None:
        """Appends the answer to prompt i to the file."""
        with appending(self._path) as file:
            file.write(json.dumps([i, answer.n_prompt, answer.tokens]).encode() + b"\n")


def without_loops(answer: Answer, size: int = 12) -> Answer:
    """Cuts an answer where `size` tokens occur a third time: loops teach a drafter nothing."""
    end = loop_end(answer.tokens, answer.n_prompt, size)
    return Answer(answer.tokens[:end], answer.n_prompt)


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Writes answers as JSON."""
    write_text(path, json.dumps([[a.n_prompt, a.tokens] for a in answers]))


def load_answers(path: Path) -> list[Answer]:
    """Reads a file that `save_answers` wrote; ValueError for another file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Answer(tuple(map(int, tokens)), int(n)) for n, tokens in rows]
    except (ValueError, TypeError):
        raise ValueError(f"{path}: is not a file of answers, or damaged") from None
