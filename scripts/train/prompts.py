"""Reads or makes prompts: from a file, from Python's standard library, or by the target."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from . import corpus

MARK = "\N{BLACK STAR}message\N{BLACK STAR}"


def from_python(seed: int) -> tuple[list[str], list[str]]:
    """Returns training and held-out prompts, from functions of different Python modules."""
    modules = corpus.standard_library()
    training = [module for module in modules if not module.held_out]
    draw = random.Random(seed)
    begun = []
    for module in training:
        for text in corpus.functions(module):
            lines = text.splitlines(keepends=True)
            begun.append("".join(lines[: draw.randrange(1, len(lines))]))
    heads = corpus.prompts(training)
    held_out = corpus.prompts([module for module in modules if module.held_out])
    for prompts in (heads, begun, held_out):
        draw.shuffle(prompts)
    return [prompt for pair in zip(heads, begun, strict=False) for prompt in pair], held_out


def from_file(path: Path) -> list[str]:
    """Returns the lines of a text file, or the strings or "prompt" fields of a .jsonl file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            value = None
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise ValueError(
                f'{path}: line {number} is neither a JSON string nor an object with "prompt"'
            )
        found.append(prompt)
    return found


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """Returns the chat template's text around a user message; ValueError without a template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template; use --prompts or --python")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, mark, after = text.partition(MARK)
    if not mark:
        raise ValueError(
            "the target's chat template does not show the user's message unchanged; "
            "use --prompts with --plain"
        )
    return before, after


def from_chat(target: Any, tokenizer: Any, n: int, n_new: int, seed: int) -> list[str]:
    """Returns n user messages that the target itself samples at its template's user turn.

    Source: Magpie (arXiv 2406.08464).
    """
    before, _ = chat_frame(tokenizer)
    ids = tokenizer(before, add_special_tokens=False).input_ids
    torch.manual_seed(seed)
    found: list[str] = []
    while len(found) < n:
        rows = torch.tensor([ids] * min(64, n - len(found)), device=target.device)
        with torch.inference_mode():
            out = target.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=n_new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(out[:, len(ids) :], skip_special_tokens=True)
        found += [text.strip() or "Hello" for text in texts]
    return found
