"""Writes prompts for a drafter of Python code: beginnings of functions of the standard library.

    python scripts/train/python_prompts.py PROMPTS.jsonl [--held-out 64]

The first prompts are the held-out ones, of modules that no other prompt comes from.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from dflash_gguf._files import write_text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from train import corpus


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    training, held_out = from_python(args.seed)
    lines = [json.dumps(text) for text in [*held_out[: args.held_out], *training]]
    write_text(args.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
