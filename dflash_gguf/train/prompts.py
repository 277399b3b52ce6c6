"""Reads prompts from a file, or lets the target write them."""

from __future__ import annotations

import json
from pathlib import Path

from ..decoder import Decoder
from .answers import generate

MARK = "\N{BLACK STAR}message\N{BLACK STAR}"


def from_file(path: Path) -> list[str]:
    """Returns the lines of a text file, or the strings or "prompt" fields of a .jsonl file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 at byte {error.start}") from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            value = None
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise ValueError(
                f'{path}: line {number} is neither a JSON string nor an object with "prompt"'
            )
        found.append(prompt)
    return found


def has_template(decoder: Decoder) -> bool:
    """True if the target has a chat template."""
    return decoder.tokenizer is not None and bool(decoder.tokenizer.templates.get(""))


def user_turn(decoder: Decoder) -> list[int]:
    """Returns the tokens of the chat template before a user message.

    Errors: ValueError without a template, or for one that changes the message.
    """
    if not has_template(decoder):
        raise ValueError("--chat: the target has no chat template; give prompts with --prompts")
    text = decoder.detokenize(decoder.chat_prompt(MARK), special=True)
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(
            "--chat: the target's chat template does not show the user's message unchanged; "
            "give prompts with --prompts"
        )
    return decoder.tokenize(before, add_special=False)


def from_chat(decoder: Decoder, n: int, n_new: int, seed: int, folder: Path) -> list[str]:
    """Returns n user messages that the target itself samples at its template's user turn.

    Source: Magpie (arXiv 2406.08464). folder: as for `generate`.
    """
    start = user_turn(decoder)
    found = generate(decoder, [start] * n, n_new=n_new, temperature=1.0, seed=seed, folder=folder)
    return [decoder.detokenize(x.tokens[x.n_prompt :]).strip() or "Hello" for x in found]
