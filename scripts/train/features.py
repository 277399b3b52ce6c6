"""Writes a file of features, the hidden states of the target that its drafter reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from dflash.model import extract_context_feature
from torch import Tensor

from .answers import Answer


class Features:
    """The features of all tokens of some answers, a file of bfloat16 [tokens, taps * hidden].

    Behind a token's features the file may have the input of the target's output head.
    """

    def __init__(
        self, path: Path, answers: Sequence[Answer], width: int, head_width: int = 0
    ) -> None:
        """Maps a file that `write` made. width: taps * hidden, the size of a token's features.

        head_width: size of the output head's input, 0 if the file does not have it.
        """
        self.answers = answers
        self.offsets = offsets(answers)
        size = self.offsets[-1] * (width + head_width)
        stored = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
        rows = stored.view(-1, width + head_width)
        self.rows, self.head_inputs = rows[:, :width], rows[:, width:]

    def tokens(self, chosen: Sequence[int], room: int = 0) -> Tensor:
        """Returns token ids of answers [answers, longest answer + room], each padded with 0."""
        longest = max(len(self.answers[i].tokens) for i in chosen) + room
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        for row, i in enumerate(chosen):
            tokens[row, : len(self.answers[i].tokens)] = torch.tensor(self.answers[i].tokens)
        return tokens

    def batch(self, chosen: Sequence[int], room: int = 0) -> tuple[Tensor, Tensor]:
        """Returns token ids, features [answers, longest answer + room, width], padded with 0."""
        tokens = self.tokens(chosen, room)
        features = torch.zeros(*tokens.shape, self.rows.shape[1])
        for row, i in enumerate(chosen):
            n = len(self.answers[i].tokens)
            features[row, :n] = self.rows[self.offsets[i] : self.offsets[i] + n]
        return tokens, features

    def head_input(self, chosen: Sequence[int], positions: Tensor) -> Tensor:
        """Returns inputs of the target's head at positions [answers, ...] of the answers."""
        first = torch.tensor([self.offsets[i] for i in chosen])
        places = first.view(-1, *[1] * (positions.ndim - 1)) + positions
        return self.head_inputs[places.flatten()].float().view(*places.shape, -1)


def offsets(answers: Sequence[Answer]) -> list[int]:
    """Returns each answer's first row in the features' file, then the number of all rows."""
    found = [0]
    for answer in answers:
        found.append(found[-1] + len(answer.tokens))
    return found


def write(
    path: Path,
    target: Any,
    answers: Sequence[Answer],
    layer_ids: Sequence[int],
    *,
    n_batch: int,
    n_threads: int = 1,
    log_every_s: float = 30.0,
    with_head_input: bool = False,
) -> None:
    """Writes the outputs of the target's layers `layer_ids`; `path` exists when complete.

    with_head_input: True to write the input of the target's output head behind them.
    """
    starts = offsets(answers)
    n_states = len(layer_ids) + with_head_input
    width = n_states * target.config.get_text_config().hidden_size
    beside = path.with_name(path.name + ".part")
    beside.unlink(missing_ok=True)
    rows = torch.from_file(
        str(beside), shared=True, size=starts[-1] * width, dtype=torch.bfloat16
    ).view(-1, width)
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens))
    batches = [order[begin : begin + n_batch] for begin in range(0, len(order), n_batch)]

    def run(chosen: list[int]) -> int:
        longest = max(len(answers[i].tokens) for i in chosen)
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        for row, i in enumerate(chosen):
            tokens[row, : len(answers[i].tokens)] = torch.tensor(answers[i].tokens)
        with torch.inference_mode():
            # No attention mask: attention is causal, and padding follows the answer.
            found = target.get_decoder()(
                tokens.to(target.device), use_cache=False, output_hidden_states=True
            )
        taps = extract_context_feature(found.hidden_states, list(layer_ids))
        if with_head_input:
            taps = torch.cat([taps, found.last_hidden_state], -1)
        taps = taps.to("cpu", torch.bfloat16)
        for row, i in enumerate(chosen):
            n = len(answers[i].tokens)
            rows[starts[i] : starts[i] + n] = taps[row, :n]
        return len(chosen)

    done, reported = 0, time.monotonic()
    with ThreadPoolExecutor(n_threads) as pool:
        for n in pool.map(run, batches):
            done += n
            if time.monotonic() - reported > log_every_s:
                print(f"features: {done} of {len(answers)} answers", flush=True)
                reported = time.monotonic()
    beside.replace(path)
