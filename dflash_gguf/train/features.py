"""Writes a file of features, the hidden states of the target that its drafter reads."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import native
from .._files import appending
from .answers import LOG_EVERY_S, Answer


class AnswerFeatures:
    """The features of all tokens of some answers, a file of bfloat16 [tokens, taps * hidden].

    Behind the features of a token the file may have the input of the target's output head.
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


def write(path: Path, model: native.Model, answers: Sequence[Answer], taps: Sequence[int]) -> None:
    """Writes hidden states of answers, by the target itself; `path` exists when complete.

    taps: hidden states of each token, see `native.Sequence.features`. After an interruption the
    answers that were written before are kept.
    """
    beside = path.with_name(path.name + ".part")
    row_bytes = len(taps) * model.n_embd * 2
    starts = offsets(answers)
    n_rows = beside.stat().st_size // row_bytes if beside.exists() else 0
    n_done = max(i for i, start in enumerate(starts) if start <= n_rows)
    longest = max((len(answer.tokens) for answer in answers), default=1)
    config = dataclasses.replace(model.config, n_parallel=1)
    sequence = native.Sequence(native.Engine(model, longest, config=config, taps=taps))
    reported = time.monotonic()
    with appending(beside) as file:
        os.ftruncate(file.fileno(), starts[n_done] * row_bytes)
        for i in range(n_done, len(answers)):
            states = torch.from_numpy(sequence.features(answers[i].tokens)).to(torch.bfloat16)
            file.write(states.view(torch.int16).numpy().tobytes())
            sequence.reset()
            if time.monotonic() - reported > LOG_EVERY_S:
                print(f"features: {i + 1} of {len(answers)} answers", flush=True)
                reported = time.monotonic()
    beside.replace(path)
