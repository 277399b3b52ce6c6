"""Answers in pieces: an interrupted run goes on, and gives what an uninterrupted one gives."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import pytest
from train import make_answers
from train.overlap import HeldOutRuns

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.train import pieces

PROMPTS = (
    {"kind": "chat", "turns": ["Name a colour."]},
    {"kind": "chat", "turns": []},
    {"kind": "summary", "turns": ["Describe bread.", "Summarize this.\n\n{answer}"]},
    {"kind": "chat", "turns": ["Tell me what the held-out prompt is about, please."]},
    {"kind": "code", "turns": ["Write a Python function that adds two numbers."]},
)


@pytest.mark.parametrize(
    "line", ["", "{", '{"kind": "x", "turns": []}', '{"kind": "chat", "turns": "ab"}']
)
def test_a_bad_prompt_is_refused_before_any_answer(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(PROMPTS[0])}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r'line 2 is no object with "turns", a list of texts'):
        make_answers.items_of(path)


def test_pieces_do_not_replace_each_other(tmp_path: Path) -> None:
    answer = pieces.StoredAnswer(1, 0, "chat", 0.0, 1, (1, 2))
    for _ in range(2):
        make_answers.save(tmp_path, "0", [answer])
    assert {path.name for path in tmp_path.iterdir()} == {"0-00000.xz", "0-00001.xz"}


@pytest.mark.model
def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    held_out = HeldOutRuns(["the held-out prompt is about"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="n_ctx is .*, the model was trained for")
        decoder = dflash_gguf.load(
            bundled.find("smollm2").target, n_ctx=4096, n_threads=1, n_parallel=2
        )

    def run(folder: str, source: Path = prompts) -> dict[tuple[int, int], pieces.StoredAnswer]:
        out = tmp_path / folder
        out.mkdir(exist_ok=True)
        args = argparse.Namespace(out=out, part="0/1", piece=20, tokens=24)
        make_answers.make(args, make_answers.items_of(source), decoder, held_out)
        found = [x for path in sorted(out.glob("*.xz")) for x in pieces.load(path)]
        assert len({(x.index, x.turn) for x in found}) == len(found)
        return {(x.index, x.turn): x for x in found}

    with decoder:
        begun = tmp_path / "begun.jsonl"
        begun.write_text(json.dumps(PROMPTS[0]), encoding="utf-8")
        assert set(run("resumed", begun)) == {(0, 0)}
        resumed, at_once = run("resumed"), run("at once")
        assert resumed == at_once
        assert {(0, 0), (2, 0), (4, 0)} <= set(at_once)
        assert not any(index == 3 for index, _ in at_once)
        for answer in at_once.values():
            again = decoder.generate(
                list(answer.tokens[: answer.n_prompt]), max_tokens=24, draft="none"
            ).tokens
            if answer.temperature == 0:
                whole = answer.tokens[answer.n_prompt :]
                assert again[: len(whole)] == whole
