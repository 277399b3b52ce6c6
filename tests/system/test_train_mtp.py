"""An MTP layer trained on a target's own answers drafts, in the target's file and in its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf_files import make_gguf

import dflash_gguf
from dflash_gguf.train import command, fit
from dflash_gguf.train.answers import load_answers
from dflash_gguf.train.chain_trainer import ChainTrainer
from dflash_gguf.train.fit import Update

FLAGS = "--kind mtp --plain --answers 12 --held-out 3 --prompt-tokens 24 --new-tokens 64"
STEPS = "--steps 120 --falling 60 --sequences 8 --threads 1 --draft-vocab 400"


def test_a_trained_layer_is_accepted(tmp_path: Path) -> None:
    target, out, prompts = make_gguf(tmp_path, "qwen35"), tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("one fox\ntwo dogs\nadd 345\nit's\ndef f():\n" * 3, encoding="utf-8")
    arguments = [str(target), str(out), "--prompts", str(prompts)]
    assert command.main([*arguments, *FLAGS.split(), *STEPS.split()]) == 0
    tau = json.loads((out / "training.json").read_text())["tau"]
    print(f"{tau} tokens a round")
    assert tau > 3
    for model, drafter in ((out / "model-mtp.gguf", None), (target, out / "drafter.gguf")):
        with dflash_gguf.load(model, drafter=drafter, n_ctx=256, n_threads=1) as decoder:
            rounds = tokens = 0
            for answer in load_answers(out / "held-out.json"):
                prompt, wanted = answer.tokens[: answer.n_prompt], answer.tokens[answer.n_prompt :]
                settings = {"draft": "chain", "draft_type": "mtp", "draft_max": 3}
                found = decoder.generate(prompt, max_tokens=len(wanted), **settings)
                assert found.tokens == wanted
                rounds, tokens = rounds + found.rounds, tokens + found.n_decoded
        assert tokens / rounds == pytest.approx(tau, abs=1e-3)


def test_an_interrupted_training_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_gguf(tmp_path, "qwen35"), tmp_path / "prompts.txt"
    prompts.write_text("one fox\ntwo dogs\nadd 345\nit's\ndef f():\n" * 3, encoding="utf-8")
    flags = [*FLAGS.split(), *STEPS.replace("--steps 120 --falling 60", "--steps 12").split()]

    def run(name: str) -> int:
        return command.main([str(target), str(tmp_path / name), "--prompts", str(prompts), *flags])

    update = ChainTrainer.update

    def interrupted(
        trainer: ChainTrainer, chosen: Sequence[Sequence[int]]
    ) -> Update[Sequence[int]]:
        if trainer.step == 7:
            raise ValueError("interrupted")
        return update(trainer, chosen)

    assert run("whole") == 0
    monkeypatch.setattr(fit, "SAVE_SECONDS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(ChainTrainer, "update", interrupted)
        assert run("parts") == 1
    assert (tmp_path / "parts" / "state.pt").exists()
    assert run("parts") == 0
    for name in ("drafter.gguf", "model-mtp.gguf"):
        whole, parts = (tmp_path / folder / name for folder in ("whole", "parts"))
        assert parts.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("llama", "", "must be a qwen35 file without an MTP layer"),
        ("qwen35", "--answers 12 --held-out 30", "prompts to train on and"),
        ("qwen35", "--answers 12 --held-out 3 --new-tokens 2", "answers of at least 4 tokens"),
        ("qwen35", "--block 8", "--block: an MTP layer has no such setting"),
    ],
)
def test_unfit_arguments_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, flags: str, message: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one fox\n" * 15, encoding="utf-8")
    arguments = [str(make_gguf(tmp_path, kind)), str(tmp_path / "out"), "--prompts", str(prompts)]
    shared = ["--kind", "mtp", "--plain", "--threads", "1"]
    assert command.main([*arguments, *shared, *flags.split()]) == 1
    (sentence,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error: "))
    assert message in sentence
