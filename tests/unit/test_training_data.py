"""Prompts share no long run of words with held-out texts, and pieces of answers lose nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from train import collect_prompts, text_prompts
from train.overlap import RUN, HeldOutRuns

from dflash_gguf.train import pieces
from dflash_gguf.train.pieces import StoredAnswer

WORDS = [f"word{i}" for i in range(40)]


def test_a_run_of_13_words_is_found_whatever_stands_between_them() -> None:
    held_out = HeldOutRuns([" ".join(WORDS), "What is a stack?"])
    run = WORDS[20 : 20 + RUN]
    assert held_out.are_in("before, " + ",\n\n  ".join(run).upper() + "; after")
    assert not held_out.are_in(" ".join(run[:-1]))
    assert not held_out.are_in(" ".join([*run[:6], "other", *run[6:]]))
    assert held_out.are_in("Tell me: what is a STACK, and what a queue?")
    assert not held_out.are_in("what is a queue?")


def test_all_held_out_texts_are_found() -> None:
    """Those are 164 of HumanEval, 50 and 10 of the benchmarks, and at least 200 functions."""
    texts = collect_prompts.held_out_texts()
    assert len(texts) > 424
    assert any("has_close_elements" in text for text in texts)
    assert "Why do cats purr?" in texts


def test_pieces_return_all_answers_and_can_be_joined(tmp_path: Path) -> None:
    answers = [
        StoredAnswer(index, index % 2, "json", 0.5, 2, (49151, 0, *range(index % 7)))
        for index in (0, 65_535, 65_536, 70_001)
    ]
    pieces.save(tmp_path / "a.xz", answers[:3])
    pieces.save(tmp_path / "b.xz", answers[3:])
    pieces.join([tmp_path / "a.xz", tmp_path / "b.xz"], tmp_path / "all.xz")
    assert pieces.load(tmp_path / "all.xz") == answers


@pytest.mark.parametrize("make", [text_prompts.chat, text_prompts.json_facts])
def test_templates_leave_no_field_open(make: object) -> None:
    stream = make(random.Random(0))  # type: ignore[operator]
    for _ in range(300):
        _, turns = next(stream)
        assert "{" not in turns[0]
