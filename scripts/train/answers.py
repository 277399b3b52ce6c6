"""Generates the target's answers to many prompts, on which a drafter is trained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_gguf._files import write_text

from .pieces import loop_end

LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's answer to it, as token ids; n_prompt: tokens of the prompt."""

    tokens: tuple[int, ...]
    n_prompt: int


def generate(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_new: int,
    n_batch: int,
    stop_tokens: Iterable[int],
    pad_token: int,
    temperature: float = 0.0,
    seed: int = 0,
    n_threads: int = 1,
) -> list[Answer]:
    """Continues every prompt by up to `n_new` tokens; a stop token ends an answer and stays in it.

    target: a causal language model of transformers.
    """
    stop = sorted(set(stop_tokens))
    settings: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[begin : begin + n_batch] for begin in range(0, len(order), n_batch)]

    def run(chosen: list[int]) -> list[tuple[int, Answer]]:
        rows, known = _left_padded([prompts[i] for i in chosen], pad_token)
        with torch.inference_mode():
            out = target.generate(
                rows.to(target.device),
                attention_mask=known.to(target.device),
                max_new_tokens=n_new,
                eos_token_id=stop,
                pad_token_id=pad_token,
                **settings,
            )
        found = []
        for row, i in enumerate(chosen):
            fresh = out[row, rows.shape[1] :].tolist()
            end = next((k + 1 for k, token in enumerate(fresh) if token in stop), len(fresh))
            found.append((i, Answer((*prompts[i], *fresh[:end]), len(prompts[i]))))
        return found

    answers: dict[int, Answer] = {}
    reported = time.monotonic()
    inside = torch.get_num_threads()
    # Samples batches one after the other in a fixed order, as they share a random generator.
    at_a_time = 1 if temperature > 0 else n_threads
    torch.set_num_threads(max(inside, n_threads // at_a_time))
    with ThreadPoolExecutor(at_a_time) as pool:
        for found in pool.map(run, batches):
            answers.update(found)
            if time.monotonic() - reported > LOG_EVERY_S:
                print(f"answers: {len(answers)} of {len(prompts)}", flush=True)
                reported = time.monotonic()
    torch.set_num_threads(inside)
    return [answers[i] for i in range(len(prompts))]


def _left_padded(prompts: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    rows = torch.full((len(prompts), width), pad_token)
    known = torch.zeros_like(rows)
    for row, prompt in enumerate(prompts):
        rows[row, width - len(prompt) :] = torch.tensor(prompt)
        known[row, width - len(prompt) :] = 1
    return rows, known


def without_loops(answer: Answer, size: int = 12) -> Answer:
    """Cuts an answer where `size` tokens occur a third time: loops teach a drafter nothing."""
    end = loop_end(answer.tokens, answer.n_prompt, size)
    return Answer(answer.tokens[:end], answer.n_prompt)


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Writes answers as JSON."""
    write_text(path, json.dumps([[a.n_prompt, a.tokens] for a in answers]))


def load_answers(path: Path) -> list[Answer]:
    """Reads a file that `save_answers` wrote."""
    return [Answer(tuple(tokens), n) for n, tokens in json.loads(path.read_text(encoding="utf-8"))]
