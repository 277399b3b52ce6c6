"""Stores answers in small compressed files.

A file is an xz stream of little-endian uint16: for each answer its `FIELDS`, then its token ids.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._files import replacing

KINDS = ("code", "chat", "rewrite", "summary", "json", "prose", "edit")
FIELDS = ("index, low", "index, high", "turn", "kind", "temperature", "prompt", "answer")
MAX_VOCAB = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer of the target to a collected prompt.

    index: number of the prompt in the list. turn: 1 if the prompt contains the answer to another.
    tokens: ids of prompt and answer, n_prompt of which are the prompt's.
    """

    index: int
    turn: int
    kind: str
    temperature: float
    n_prompt: int
    tokens: tuple[int, ...]

    @property
    def n_answer(self) -> int:
        """Number of the answer's tokens."""
        return len(self.tokens) - self.n_prompt


def save(path: Path, answers: Iterable[StoredAnswer]) -> None:
    """Writes a file, which exists once it is complete."""
    rows: list[int] = []
    for x in answers:
        rows += [x.index & 0xFFFF, x.index >> 16, x.turn, KINDS.index(x.kind)]
        rows += [round(100 * x.temperature), x.n_prompt, x.n_answer, *x.tokens]
    with replacing(path) as file:
        file.write(lzma.compress(np.array(rows, "<u2").tobytes(), preset=9))


def load(path: Path) -> list[StoredAnswer]:
    """Reads a file that `save` wrote; ValueError for another file."""
    try:
        rows = np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").tolist()
        return _answers(rows)
    except (lzma.LZMAError, ValueError, IndexError):
        raise ValueError(f"{path}: is not a file of answers, or damaged") from None


def _answers(rows: list[int]) -> list[StoredAnswer]:
    answers, at = [], 0
    while at < len(rows):
        low, high, turn, kind, temperature, n_prompt, n_answer = rows[at : at + len(FIELDS)]
        at += len(FIELDS)
        tokens = tuple(rows[at : at + n_prompt + n_answer])
        at += len(tokens)
        index = low | high << 16
        answers.append(StoredAnswer(index, turn, KINDS[kind], temperature / 100, n_prompt, tokens))
    return answers


def join(paths: Iterable[Path], path: Path) -> None:
    """Writes the answers of several files as one, by prompt, which is smaller than the pieces."""
    answers = [answer for piece in paths for answer in load(piece)]
    save(path, sorted(answers, key=lambda x: (x.index, x.turn)))


def loop_end(tokens: Sequence[int], n_prompt: int, size: int = 12) -> int:
    """Returns where `size` tokens of an answer occur a third time, or the answer's end."""
    counts: dict[tuple[int, ...], int] = {}
    for end in range(n_prompt + size, len(tokens) + 1):
        run = tuple(tokens[end - size : end])
        counts[run] = counts.get(run, 0) + 1
        if counts[run] == 3:
            return end
    return len(tokens)
