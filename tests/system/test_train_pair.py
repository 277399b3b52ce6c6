"""A small pair trained from scratch learns, resumes, converts, and drafts in our core."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_target
from dflash.model import DFlashDraftModel, dflash_generate
from gguf_files import make_gguf
from pairs import Pair, convert_drafter, draft_logits, open_pair
from reference import Reference
from train import engine, features, pieces, train_drafter, train_tiny_target
from train.answers import Answer, load_answers
from train.fit import Fit
from train.gguf_tokenizer import read_tokenizer
from train.vocabulary import PRE
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_gguf
from dflash_gguf.text.tokenizer import Tokenizer

TARGET = "--modules 60 --vocab 400 --hidden 64 --layers 4 --ffn 128 --heads 1 --value-heads 4"
RATES = "--muon-rate 5e-3 --adam-rate 3e-3"  # higher rates suit narrow models
TARGET_STEPS = f"{RATES} --threads 1 --steps 30 --decay 10 --sequences 8 --tokens 128"
DRAFTER = "--python --plain --answers 48 --held-out 6 --prompt-tokens 24 --new-tokens 48"
EXACT: dict[str, Any] = {"n_threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
"""Settings that compute in float32 throughout, as transformers does."""
DRAFTER_STEPS = "--layers 1 --taps 1 --block 6 --steps 80 --falling 20 --sequences 8 --threads 1"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained pair, and the figures that its training reported."""

    pair: Pair
    target_losses: list[float]
    drafter_losses: list[list[float]]
    tau: float


def train_target(folder: Path, steps: str = TARGET_STEPS) -> Path:
    args = train_tiny_target.parse([str(folder), *TARGET.split(), *steps.split()])
    train_tiny_target.run(args)
    return folder


def train_a_drafter(target: Path, folder: Path, steps: str = DRAFTER_STEPS) -> Path:
    flags = [*DRAFTER.split(), *steps.split(), "--device", "cpu"]
    train_drafter.run(train_drafter.parse([str(target), str(folder), *flags]))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    target = train_target(folder / "target")
    drafter = train_a_drafter(target, folder / "drafter")
    command = [sys.executable, "-m", "dflash_gguf.convert", str(target), "--pre", PRE]
    subprocess.run(
        [*command, "--outtype", "f32", "--outfile", str(folder / "target.gguf")], check=True
    )
    command[3] = str(drafter)
    command += ["--target-model-dir", str(target), "--outfile", str(folder / "drafter.gguf")]
    subprocess.run([*command, "--outtype", "f32"], check=True)
    report = json.loads((drafter / "training.json").read_text())
    return Trained(
        Pair(target, drafter, folder / "target.gguf", folder / "drafter.gguf"),
        json.loads((target / "training.json").read_text())["losses"],
        report["losses"],
        report["tau"],
    )


def test_both_losses_fall(trained: Trained) -> None:
    """Observed losses: target 6.0 to 4.6, drafter 5.4 to 3.3; without learning above 5.9 and 5."""
    assert trained.target_losses[-1] < trained.target_losses[0] - 0.8
    losses = [row[1] for row in trained.drafter_losses]
    assert losses[-1] < losses[0] - 0.8


def test_the_course_is_drawn(trained: Trained) -> None:
    data = (trained.pair.drafter_dir / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")


def test_a_chat_model_draws_its_own_user_turns(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "qwen3", num_hidden_layers=4)
    flags = "--chat --instruction Hi! --answers 6 --held-out 2 --new-tokens 16 --taps 1"
    steps = "--layers 1 --block 4 --steps 4 --falling 1 --sequences 2 --threads 1 --device cpu"
    arguments = [str(target), str(tmp_path / "out"), "--mask-token", "<tool_call>"]
    arguments += ["--prompt-tokens", "200"]
    assert train_drafter.main([*arguments, *flags.split(), *steps.split()]) == 0
    answers = load_answers(tmp_path / "out" / "answers.json")
    start, end = (
        AutoTokenizer.from_pretrained(target).convert_tokens_to_ids(text)
        for text in ("<|im_start|>", "<|im_end|>")
    )
    for answer in answers:
        prompt = answer.tokens[: answer.n_prompt]
        assert (prompt.count(start), prompt.count(end)) == (2, 1)
    convert_drafter(tmp_path / "out", target, tmp_path / "drafter.gguf", "qwen3")


def test_our_engine_draws_the_targets_answers(trained: Trained) -> None:
    """F16 K/V adds noise, so texts may differ where two logits tie."""
    answers = load_answers(trained.pair.drafter_dir / "held-out.json")
    prompts = [answer.tokens[: answer.n_prompt] for answer in answers]
    path = trained.pair.target
    target = AutoModelForCausalLM.from_pretrained(trained.pair.target_dir, dtype=torch.float32)
    for found, expected in zip(
        engine.generate(path, prompts, n_new=48, n_threads=2), answers, strict=True
    ):
        if found != expected:
            both = zip(found.tokens, expected.tokens, strict=False)
            at, pair = next((i, pair) for i, pair in enumerate(both) if pair[0] != pair[1])
            logits = target(torch.tensor([expected.tokens[:at]])).logits[0, -1, list(pair)]
            assert at >= expected.n_prompt
            assert abs(float(logits[0] - logits[1])) < 0.02
    drawn = [
        engine.generate(path, prompts, n_new=8, temperature=1.0, seed=5, n_threads=n)
        for n in (1, 2)
    ]
    assert drawn[0] == drawn[1]


def test_answers_that_were_drawn_before_an_interruption_are_kept(
    trained: Trained, tmp_path: Path
) -> None:
    prompts = [
        answer.tokens[: answer.n_prompt]
        for answer in load_answers(trained.pair.drafter_dir / "held-out.json")
    ][:3]

    def draw(n_new: int = 8) -> list[Answer]:
        return engine.generate(trained.pair.target, prompts, n_new=n_new, folder=tmp_path)

    answers = draw()
    (kept,) = tmp_path.iterdir()
    first, second, third = kept.read_text().splitlines()
    marked = first.replace("]", ", 7]", 1)
    kept.write_text(f"{marked}\n{second}\n{third[:-5]}")
    marked_answer = Answer((*answers[0].tokens, 7), answers[0].n_prompt)
    assert draw() == [marked_answer, *answers[1:]]
    assert kept.read_text().splitlines() == [marked, second, third]
    assert draw(n_new=4)[0] != marked_answer
    assert len(list(tmp_path.iterdir())) == 2


def test_the_targets_distribution_is_learned_from_pieces(trained: Trained, tmp_path: Path) -> None:
    """The head predicts a token from its input at the token before."""
    answers = load_answers(trained.pair.drafter_dir / "answers.json")
    stored = [
        pieces.StoredAnswer(i, 0, "code", 0.0, answer.n_prompt, answer.tokens)
        for i, answer in enumerate(answers)
    ]
    pieces.save(tmp_path / "pieces.xz", stored)
    flags = f"--pieces {tmp_path / 'pieces.xz'} --held-out 2 --distil 1 --device cpu"
    out = tmp_path / "out"
    arguments = [str(trained.pair.target_dir), str(out), *flags.split(), *DRAFTER_STEPS.split()]
    train_drafter.run(train_drafter.parse(arguments))
    losses = [row[1] for row in json.loads((out / "training.json").read_text())["losses"]]
    assert losses[-1] < losses[0] - 0.5
    assert load_answers(out / "held-out.json") == [answers[0], answers[40]]
    data = features.Features(
        out / "answers-head.features", load_answers(out / "answers.json"), 64, head_width=64
    )
    target = AutoModelForCausalLM.from_pretrained(trained.pair.target_dir, dtype=torch.float32)
    n_right = n = 0
    for i, answer in enumerate(data.answers):
        positions = torch.arange(answer.n_prompt - 1, len(answer.tokens) - 1)
        found = target.lm_head(data.head_input([i], positions[None])).argmax(-1)[0]
        n_right += int((found == torch.tensor(answer.tokens[answer.n_prompt :])).sum())
        n += len(positions)
    assert n_right > 0.97 * n  # the file has bfloat16


def test_a_missing_file_for_the_answers_is_named(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*DRAFTER.split(), *DRAFTER_STEPS.split(), "--device", "cpu"]
    flags += ["--gguf", str(tmp_path / "missing.gguf")]
    assert train_drafter.main([str(trained.pair.target_dir), str(tmp_path / "out"), *flags]) == 1
    assert "missing.gguf" in capsys.readouterr().err


def test_a_gguf_is_a_target(tmp_path: Path) -> None:
    """The target has random weights; only the sizes of drafter and target must fit."""
    target = make_gguf(tmp_path, "llama", num_hidden_layers=4)
    flags = (
        "--answers 6 --held-out 2 --new-tokens 16 --taps 1 --plain --temperature 1 --sampled 0.5"
    )
    steps = "--layers 1 --block 4 --steps 4 --falling 1 --sequences 2 --threads 1 --device cpu"
    (tmp_path / "prompts.txt").write_text("one fox\ntwo dogs\nadd 345\nit's\ndef f():\n" * 2)
    arguments = [str(target), str(tmp_path / "out"), "--mask-token", "<tool_call>"]
    arguments += ["--prompts", str(tmp_path / "prompts.txt"), *flags.split(), *steps.split()]
    assert train_drafter.main(arguments) == 0
    drafter = convert_drafter(
        tmp_path / "out", tmp_path / "out" / "target", tmp_path / "drafter.gguf", "llama"
    )
    with dflash_gguf.load(target, drafter=drafter, n_ctx=64, **EXACT) as decoder:
        for answer in load_answers(tmp_path / "out" / "held-out.json"):
            prompt = answer.tokens[: answer.n_prompt]
            result = decoder.generate(prompt, max_tokens=16, draft="chain")
            assert result.tokens == answer.tokens[answer.n_prompt :]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_the_tokenizer_of_a_gguf_is_llama_cpps(tmp_path: Path, kind: str) -> None:
    path = make_gguf(tmp_path, kind)
    mine, theirs = read_tokenizer(path), Tokenizer.from_file(path)
    assert theirs is not None
    for text in ("it's 12345 Größe\n\n  def f(x):\r\n\t", "a<|im_end|>b<tool_call>c", " IT'S  "):
        assert mine(text).input_ids == theirs.tokenize(text, parse_special=True)
    assert mine.eos_token == "<|im_end|>"
    assert mine.chat_template


def test_other_ggufs_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_gguf(tmp_path, "qwen35")
    flags = ["--python", "--mask-token", "<tool_call>"]
    assert train_drafter.main([str(path), str(tmp_path / "out"), *flags]) == 1
    assert f"error: {path}: transformers cannot load it: " in capsys.readouterr().err


def test_drafts_are_the_references(trained: Trained) -> None:
    answer = load_answers(trained.pair.drafter_dir / "held-out.json")[0]
    tokens = list(answer.tokens)
    reference, sequence = Reference(trained.pair, tokens), open_pair(trained.pair)
    sequence.prefill(tokens[: answer.n_prompt])
    expected = reference.draft_logits(answer.n_prompt, 5)
    np.testing.assert_allclose(
        draft_logits(sequence, tokens[answer.n_prompt], 5), expected, atol=2e-3
    )


def test_tau_is_what_decoding_shows(trained: Trained) -> None:
    answers = load_answers(trained.pair.drafter_dir / "held-out.json")
    rounds = tokens = 0
    with dflash_gguf.load(
        trained.pair.target, drafter=trained.pair.drafter, n_ctx=256, **EXACT
    ) as decoder:
        for answer in answers:
            n_new = len(answer.tokens) - answer.n_prompt
            prompt = answer.tokens[: answer.n_prompt]
            result = decoder.generate(prompt, max_tokens=n_new, draft="chain")
            assert result.tokens == answer.tokens[answer.n_prompt :]
            rounds += result.rounds
            tokens += result.n_decoded
    assert tokens / rounds == pytest.approx(trained.tau, abs=0.02)
    assert trained.tau > 1.3


def test_the_reference_accepts_as_often(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.model._cuda_time", lambda: 0.0)
    answer = load_answers(trained.pair.drafter_dir / "held-out.json")[0]
    target = AutoModelForCausalLM.from_pretrained(trained.pair.target_dir, dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(trained.pair.drafter_dir, dtype=torch.float32)
    done = dflash_generate(
        drafter,
        target,
        torch.tensor([answer.tokens[: answer.n_prompt]]),
        len(answer.tokens) - answer.n_prompt,
        None,
        return_stats=True,
    )
    assert done.output_ids[0].tolist() == list(answer.tokens)
    with dflash_gguf.load(
        trained.pair.target, drafter=trained.pair.drafter, n_ctx=256, **EXACT
    ) as decoder:
        n_new = len(answer.tokens) - answer.n_prompt
        prompt = answer.tokens[: answer.n_prompt]
        result = decoder.generate(prompt, max_tokens=n_new, draft="chain")
    assert result.rounds == len(done.acceptance_lengths)


def test_an_interrupted_training_ends_the_same(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, steps = trained.pair.target_dir, "--layers 1 --taps 1 --block 6 --sequences 4"
    for name in ("answers.json", "held-out.json", "answers.features", "held-out.features"):
        for folder in ("whole", "parts"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).symlink_to(trained.pair.drafter_dir / name)
    train_a_drafter(target, tmp_path / "whole", f"{steps} --steps 10 --falling 2")
    done = 0

    def interrupt(*_: object) -> None:
        nonlocal done
        done += 1
        if done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("train.fit.SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        save = Fit._save
        patch.setattr(Fit, "_save", lambda fit: (save(fit), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            train_a_drafter(target, tmp_path / "parts", f"{steps} --steps 10 --falling 2")
    train_a_drafter(target, tmp_path / "parts", f"{steps} --steps 10 --falling 2")
    whole, parts = (
        DFlashDraftModel.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "parts")
    )
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts {tmp}/none.txt", "{tmp}/none.txt"),
        ("--python --mask-token <nothing>", "has no token '<nothing>'"),
        ("--python --taps 9", "9 taps do not fit into a target of 4 layers"),
        ("--python --sampled 1.5", "--sampled 1.5: a share lies between 0 and 1"),
        ("--python --held-out 4000", "held out: at least"),
        ("--python --distil -0.1", "--distil -0.1: a share lies between 0 and 1"),
        ("--pieces {tmp}/none.xz", "--pieces {tmp}/none.xz: no such file"),
        ("--chat --held-out 2", "the target has no chat template"),
    ],
)
def test_bad_input_is_one_sentence(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    folders = [str(trained.pair.target_dir), str(tmp_path / "out"), "--taps", "1"]
    assert train_drafter.main([*folders, *flags.format(tmp=tmp_path).split()]) == 1
    sentences = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(sentences) == 1
    assert message.format(tmp=tmp_path) in sentences[0]
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked_before_torch_is_loaded(trained: Trained, tmp_path: Path) -> None:
    scripts = Path(train_drafter.__file__).parents[1]
    code = (
        "import sys; from train import train_drafter; status = train_drafter.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    flags = ["--python", "--mask-token", "<nothing>"]
    command = [sys.executable, "-c", code, str(trained.pair.target_dir), str(tmp_path / "out")]
    done = subprocess.run([*command, *flags], cwd=scripts, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: --mask-token: the target's vocabulary has no token")


def test_a_folder_belongs_to_one_training(trained: Trained) -> None:
    with pytest.raises(ValueError, match="was begun with seed = 1, now it is 2"):
        train_a_drafter(
            trained.pair.target_dir, trained.pair.drafter_dir, f"{DRAFTER_STEPS} --seed 2"
        )
