"""Reasoning is separated from answers in three formats, for every cut of the text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dflash_gguf.text.reasoning import Format, Harmony, Splitter, format_of

THINK = "{{ '</think>' }}"
MISTRAL = "{{ '[THINK][/THINK]' }}"
GEMMA = "{{ '<|channel>thought<channel|>' }}"


def split(make: Callable[[], Splitter], pieces: list[str]) -> tuple[str, str]:
    splitter = make()
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    thoughts = "".join(part.text for part in parts if part.kind == "reasoning")
    return thoughts, "".join(part.text for part in parts if part.kind == "text")


def known(template: str, prompt: str = "") -> Format:
    found = format_of(template, prompt)
    assert found is not None
    return found


# Cases: template, end of the prompt, generated text, reasoning, answer.
CASES: dict[str, tuple[str, str, str, str, str]] = {
    "think": (THINK, "", "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
    "think, begun in the prompt": (THINK, "<think>\n", "A\n\n b</think>Yes", "A\n\n b", "Yes"),
    "think, none": (THINK, "", " Yes, <think> is a tag.", "", " Yes, <think> is a tag."),
    "think, closed in the prompt": (THINK, "<think>\n\n</think>\n\n", "Yes.\n", "", "Yes.\n"),
    "think, unfinished": (THINK, "<think>", "Well, </thi", "Well, </thi", ""),
    "think, nothing": (THINK, "", "  ", "", "  "),
    "think, empty": (THINK, "", "<think>\n\n</think>\n\nYes </think>", "", "Yes </think>"),
    "mistral": (MISTRAL, "", "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
    "gemma": (GEMMA, "", "<|channel>thought\nWell.<channel|>Yes.", "Well.", "Yes."),
    "gemma, none": (GEMMA, "<|channel>thought\n<channel|>", "Yes < no", "", "Yes < no"),
    "gemma, begun": (GEMMA, "<|channel>thought\n", "Well.\n<channel|>\nYes.", "Well.", "Yes."),
}  # fmt: skip


def cuts(text: str) -> list[list[str]]:
    generator = random.Random(7)
    ways = [[text], list(text)]
    for _ in range(20):
        at = sorted(generator.choices(range(len(text) + 1), k=4))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize("case", CASES)
def test_thoughts_in_a_block(case: str) -> None:
    template, prompt, text, thoughts, answer = CASES[case]
    for pieces in cuts(text):
        assert split(known(template, prompt).splitter, pieces) == (thoughts, answer), pieces


HARMONY: dict[str, tuple[str, str, str]] = {
    "both": (
        "<|channel|>analysis<|message|>Asks.\n<|start|>assistant<|channel|>final<|message|>Yes.",
        "Asks.\n",
        "Yes.",
    ),
    "with marks of the end": (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>A < b"
        "<|return|>",
        "Hm",
        "A < b",
    ),
    "commentary for the user": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Y",
        "",
        "I look.Y",
    ),
    "a call": (
        "<|channel|>analysis<|message|>Call.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>',
        "Call.",
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}',
    ),
    "unfinished": ("<|channel|>analysis<|message|>User <|en", "User <|en", ""),
    "no marks": ("Just text, " * 40, "", "Just text, " * 40),
    "few words without marks": ("Yes.", "", "Yes."),
}


@pytest.mark.parametrize("case", HARMONY)
def test_channels(case: str) -> None:
    text, thoughts, answer = HARMONY[case]
    for pieces in cuts(text):
        assert split(Harmony, pieces) == (thoughts, answer), pieces


def test_long_text_without_marks_does_not_wait() -> None:
    splitter = Harmony()
    assert sum(len(p.text) for p in splitter.push("word " * 100)) == 500
    assert [p.text for p in splitter.push("more")] == ["more"]


def test_templates_without_thoughts_have_no_format() -> None:
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}", "x") is None
