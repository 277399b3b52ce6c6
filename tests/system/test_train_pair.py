"""A small pair trained from scratch learns, resumes, converts, and drafts in our core."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import PRE_OF_KIND, make_target
from dflash.model import DFlashDraftModel, dflash_generate
from gguf_files import convert, make_gguf
from pairs import Pair, draft_logits, open_pair
from reference import Reference
from safetensors.torch import load_file
from train import train_tiny_target
from train.python_prompts import from_python
from train.vocabulary import PRE
from transformers import AutoModelForCausalLM

import dflash_gguf
from dflash_gguf.native import Model
from dflash_gguf.train import command, features, pieces
from dflash_gguf.train.answers import Answer, generate, load_answers
from dflash_gguf.train.target import read_embeddings, read_head

TARGET = "--modules 60 --vocab 400 --hidden 64 --layers 4 --ffn 128 --heads 1 --value-heads 4"
RATES = "--muon-rate 5e-3 --adam-rate 3e-3"  # higher rates suit narrow models
TARGET_STEPS = f"{RATES} --threads 1 --steps 30 --decay 10 --sequences 8 --tokens 128"
DRAFTER = "--plain --answers 48 --held-out 6 --prompt-tokens 24 --new-tokens 48 --outtype f32"
EXACT: dict[str, Any] = {"n_threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
"""Settings that compute in float32 throughout, as transformers does."""
DRAFTER_STEPS = "--layers 1 --taps 1 --block 6 --steps 80 --falling 20 --sequences 8 -t 1"
FEW_STEPS = "--layers 1 --taps 1 --block 4 --steps 4 --falling 1 --sequences 2 -t 1 --device cpu"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained pair, the prompts of the drafter's training, and the figures of both trainings."""

    pair: Pair
    prompts: Path
    target_losses: list[float]
    report: dict[str, Any]


def train_target(folder: Path) -> Path:
    args = train_tiny_target.parse([str(folder), *TARGET.split(), *TARGET_STEPS.split()])
    train_tiny_target.run(args)
    return folder


def arguments(target: Path, out: Path, prompts: Path, steps: str = DRAFTER_STEPS) -> list[str]:
    flags = [*DRAFTER.split(), *steps.split(), "--device", "cpu"]
    return [str(target), str(out), "--prompts", str(prompts), *flags]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    checkpoint, target, drafter = folder / "target", folder / "target.gguf", folder / "drafter"
    train_target(checkpoint)
    convert(checkpoint, target, "f32", PRE)
    training, held_out = from_python(seed=1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, [*held_out[:6], *training])), encoding="utf-8")
    assert command.main(arguments(target, drafter, prompts)) == 0
    return Trained(
        Pair(checkpoint, drafter, target, drafter / "drafter.gguf"),
        prompts,
        json.loads((checkpoint / "training.json").read_text())["losses"],
        json.loads((drafter / "training.json").read_text()),
    )


def test_both_losses_fall(trained: Trained) -> None:
    """Observed losses: target 6.0 to 4.6, drafter 5.4 to 3.3; without learning above 5.9 and 5."""
    assert trained.target_losses[-1] < trained.target_losses[0] - 0.8
    losses = [row[1] for row in trained.report["losses"]]
    assert losses[-1] < losses[0] - 0.8


def test_the_course_is_drawn(trained: Trained) -> None:
    data = (trained.pair.drafter_dir / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")


def test_a_folder_writes_its_own_user_turns(tmp_path: Path) -> None:
    """The target has random weights; only the sizes of drafter and target must fit."""
    target = make_target(tmp_path / "target", "qwen3", num_hidden_layers=4)
    out = tmp_path / "out"
    flags = "--chat --instruction Hi! --answers 6 --held-out 2 --new-tokens 16 --prompt-tokens 200"
    words = [str(target), str(out), "--mask-token", "<tool_call>", "--pre", PRE_OF_KIND["qwen3"]]
    assert command.main([*words, *flags.split(), *FEW_STEPS.split()]) == 0
    with dflash_gguf.load(out / "target.gguf", drafter=out / "drafter.gguf", n_ctx=512) as decoder:
        start, end = (decoder.tokenize(text)[0] for text in ("<|im_start|>", "<|im_end|>"))
    for answer in load_answers(out / "answers.json"):
        prompt = answer.tokens[: answer.n_prompt]
        assert (prompt.count(start), prompt.count(end)) == (2, 1)


def test_answers_of_an_interrupted_run_are_kept(trained: Trained, tmp_path: Path) -> None:
    prompts = [
        answer.tokens[: answer.n_prompt]
        for answer in load_answers(trained.pair.drafter_dir / "held-out.json")
    ][:3]
    with dflash_gguf.load(trained.pair.target, n_ctx=512, n_parallel=2, **EXACT) as decoder:

        def draw(n_new: int = 8, **settings: Any) -> list[Answer]:
            return generate(decoder, prompts, n_new=n_new, folder=tmp_path, **settings)

        answers = draw()
        (kept,) = tmp_path.iterdir()
        lines = kept.read_text().splitlines()
        marked = lines[0].replace("]]", ", 7]]")
        kept.write_text(f"{marked}\n{lines[1]}\n{lines[2][:-5]}")
        i = json.loads(marked)[0]
        answers[i] = Answer((*answers[i].tokens, 7), answers[i].n_prompt)
        assert draw() == answers
        assert sorted(kept.read_text().splitlines()) == sorted([marked, *lines[1:]])
        assert draw(n_new=4)[i] != answers[i]
        assert len(list(tmp_path.iterdir())) == 2
        sampled = draw(temperature=1.0, seed=5)
    with dflash_gguf.load(trained.pair.target, n_ctx=512, n_threads=2) as decoder:
        assert generate(decoder, prompts, n_new=8, temperature=1.0, seed=5) == sampled


def test_the_targets_distribution_is_learned_from_pieces(trained: Trained, tmp_path: Path) -> None:
    """The head predicts a token from its input at the token before."""
    answers = load_answers(trained.pair.drafter_dir / "answers.json")
    stored = [
        pieces.StoredAnswer(i, 0, "code", 0.0, answer.n_prompt, answer.tokens)
        for i, answer in enumerate(answers)
    ]
    pieces.save(tmp_path / "pieces.xz", stored)
    flags = f"--pieces {tmp_path / 'pieces.xz'} --held-out 2 --distil 1 --device cpu --outtype f32"
    out = tmp_path / "out"
    words = [str(trained.pair.target), str(out), *flags.split(), *DRAFTER_STEPS.split()]
    assert command.main(words) == 0
    losses = [row[1] for row in json.loads((out / "training.json").read_text())["losses"]]
    assert losses[-1] < losses[0] - 0.5
    assert load_answers(out / "held-out.json") == [answers[0], answers[40]]
    data = features.AnswerFeatures(
        out / "answers-head.features", load_answers(out / "answers.json"), 64, head_width=64
    )
    head = read_head(trained.pair.target)
    n_right = n = 0
    for i, answer in enumerate(data.answers):
        positions = torch.arange(answer.n_prompt - 1, len(answer.tokens) - 1)
        found = (data.head_input([i], positions[None]) @ head.T).argmax(-1)[0]
        n_right += int((found == torch.tensor(answer.tokens[answer.n_prompt :])).sum())
        n += len(positions)
    assert n_right > 0.97 * n  # the file has bfloat16


def test_a_drafter_drafts_its_own_tokens_only(trained: Trained, tmp_path: Path) -> None:
    """The file's head has the rows of the answers' most frequent tokens; --begin keeps these."""
    out, more = tmp_path / "out", tmp_path / "more"
    flags = f"{DRAFTER_STEPS} --temperature 1 --sampled 0.5 --draft-vocab 40"
    assert command.main(arguments(trained.pair.target, out, trained.prompts, flags)) == 0
    training = load_answers(out / "answers.json")
    counts = Counter(x for a in training for x in a.tokens[a.n_prompt :])
    assert len(counts) > 40
    found = load_file(out / "model.safetensors")
    tokens = sorted(token for token, _ in counts.most_common(40))
    assert (found["d2t"] + torch.arange(40)).tolist() == tokens
    assert torch.equal(found["lm_head.weight"], read_head(trained.pair.target)[tokens])
    answers = load_answers(out / "held-out.json")
    rounds = n_tokens = 0
    drafter = out / "drafter.gguf"
    with dflash_gguf.load(trained.pair.target, drafter=drafter, n_ctx=256, **EXACT) as decoder:
        for answer in answers:
            n_new = len(answer.tokens) - answer.n_prompt
            prompt = answer.tokens[: answer.n_prompt]
            result = decoder.generate(prompt, max_tokens=n_new, draft="chain")
            rounds += result.rounds
            n_tokens += result.n_decoded
    tau = json.loads((out / "training.json").read_text())["tau"]
    assert n_tokens / rounds == pytest.approx(tau, abs=0.02)
    assert tau > 1.1
    others = shutil.ignore_patterns("state.pt", "arguments.json", *command.DRAFTER)
    shutil.copytree(out, more, ignore=others)
    steps = DRAFTER_STEPS.replace("--steps 80", "--steps 1")
    flags = f"{steps} --temperature 1 --sampled 0.5 --begin {out}"
    assert command.main(arguments(trained.pair.target, more, trained.prompts, flags)) == 0
    begun = load_file(more / "model.safetensors")
    assert torch.equal(begun["d2t"], found["d2t"])
    torch.testing.assert_close(begun["fc.weight"], found["fc.weight"], atol=0.01, rtol=0.1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_sizes_of_a_target_are_its_own(tmp_path: Path, kind: str) -> None:
    """Embeddings are those that enter layer 0, but for their scale."""
    path = make_gguf(tmp_path, kind, outtype="q8_0")
    embeddings, head = read_embeddings(path), read_head(path)
    model = Model(str(path), dflash_gguf.LoadConfig(n_ctx=64, n_threads=1))
    assert embeddings.shape == head.shape == (model.n_vocab, model.n_embd)
    answers = [Answer((5, 6, 7, 5), 2)]
    features.write(tmp_path / "a.features", model, answers, [0])
    rows = features.AnswerFeatures(tmp_path / "a.features", answers, model.n_embd).rows.float()
    expected = embeddings[torch.tensor(answers[0].tokens)]
    scale = float((rows * expected).sum() / expected.square().sum())
    assert scale == pytest.approx(1.0 if kind == "llama" else model.n_embd**0.5, rel=1e-2)
    torch.testing.assert_close(rows, expected * scale, rtol=1e-2, atol=1e-3)


def test_features_go_on_after_an_interruption(trained: Trained, tmp_path: Path) -> None:
    answers = load_answers(trained.pair.drafter_dir / "held-out.json")
    model = Model(str(trained.pair.target), dflash_gguf.LoadConfig(n_ctx=256, n_threads=1))
    path = tmp_path / "a.features"
    features.write(path, model, answers, [1, 2])
    whole = path.read_bytes()
    n_bytes = len(answers[0].tokens) * 2 * model.n_embd * 2
    for n_kept in (n_bytes - 1, n_bytes, n_bytes + 3):
        # Marks the first answer, to see that it is kept if it is complete.
        path.with_name("a.features.part").write_bytes(b"x" * n_kept)
        features.write(path, model, answers, [1, 2])
        kept = b"x" * n_bytes if n_kept >= n_bytes else whole[:n_bytes]
        assert path.read_bytes() == kept + whole[n_bytes:]


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
    assert tokens / rounds == pytest.approx(trained.report["tau"], abs=0.02)
    assert trained.report["tau"] > 1.3
    assert trained.report["gain"] > 0


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


KILLED_AFTER: dict[str, Callable[[Path], bool]] = {
    "answers": lambda out: any(len(x.read_bytes()) > 2000 for x in out.glob("drawn-*.jsonl")),
    "features": lambda out: (out / "held-out.json").exists(),
    "updates": lambda out: (out / "state.pt").exists(),
}


def test_a_killed_training_ends_the_same(trained: Trained, tmp_path: Path) -> None:
    """The training is killed in each of its stages, and started again with the same command."""
    code = (
        "import sys; from dflash_gguf.train import command, fit; fit.SAVE_SECONDS = 0.0; "
        "sys.exit(command.main(sys.argv[1:]))"
    )
    steps = "--layers 1 --taps 1 --block 6 --sequences 4 --steps 30 --falling 2 -t 1"

    def start(out: Path) -> subprocess.Popen[bytes]:
        words = arguments(trained.pair.target, out, trained.prompts, steps)
        return subprocess.Popen([sys.executable, "-c", code, *words])

    whole, parts = tmp_path / "whole" / "out", tmp_path / "parts" / "out"  # names the drafter
    at_once = start(whole)
    n_killed = 0
    for has_begun in KILLED_AFTER.values():
        process = start(parts)
        while process.poll() is None and not has_begun(parts):
            time.sleep(0.005)
        process.kill()
        n_killed += process.wait() == -signal.SIGKILL
    assert n_killed == len(KILLED_AFTER)
    assert start(parts).wait() == at_once.wait() == 0
    for name in ("answers.json", "held-out.json", "answers.features", "drafter.gguf"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts {tmp}/none.txt", "--prompts {tmp}/none.txt: no such file"),
        ("--prompts {prompts} --mask-token <nothing>", "has no token '<nothing>'"),
        ("--prompts {prompts} --taps 9", "9 taps do not fit into a target of 4 layers"),
        ("--prompts {prompts} --sampled 1.5", "--sampled 1.5: a share lies between 0 and 1"),
        ("--prompts {prompts} --held-out 40000", "held out, of 1 to 256 tokens: at least"),
        ("--prompts {prompts} --distil -0.1", "--distil -0.1: a share lies between 0 and 1"),
        ("--prompts {prompts} --block 1", "--block 1: a block has 2 to 256 tokens"),
        ("--prompts {prompts} --steps 0", "--steps 0: at least 1 is needed"),
        ("--prompts {prompts} --blocks 0", "--blocks 0: at least 1 is needed"),
        ("--prompts {prompts} --words -1", "--words -1: at least 0 is needed"),
        ("--prompts {prompts} --draft-vocab -1", "--draft-vocab -1: at least 0 is needed"),
        ("--prompts {prompts} --draft-vocab 31", "give 0 for all tokens, or at least 32"),
        ("--prompts {prompts} --kv-heads 2", "--kv-heads 2: the drafter has 1 heads"),
        ("--prompts {prompts} --decay 0", "--decay 0.0: must be above 0"),
        ("--prompts {prompts} --ffn 100000", "--ffn 100000: at most 65536 is possible"),
        ("--prompts {prompts} --temperature nan", "temperature is nan, must be finite"),
        ("--prompts {prompts} --new-tokens 15", "answers of at least 16 tokens"),
        ("--prompts {prompts} --sampled 0.5", "--sampled 0.5: give a --temperature to sample at"),
        ("--prompts {prompts} --begin {pair} --draft-vocab 64", "--draft-vocab 64: the drafter of"),
        ("--prompts {prompts} --begin {tmp}/none", "--begin {tmp}/none: no folder of a drafter"),
        ("--prompts {prompts} --device cuda", "--device cuda: torch finds no GPU"),
        ("--prompts {target}", "{target}: is not UTF-8 at byte"),
        ("--pieces {prompts}", "{prompts}: is not a file of answers, or damaged"),
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
    if "--device cuda" in flags and torch.cuda.is_available():
        pytest.skip("has a GPU")
    given = {"tmp": tmp_path, "prompts": trained.prompts, "target": trained.pair.target}
    given["pair"] = trained.pair.drafter_dir
    words = [str(trained.pair.target), str(tmp_path / "out"), "--taps", "1", "-t", "1"]
    assert command.main([*words, *flags.format(**given).split()]) == 1
    sentences = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(sentences) == 1
    assert message.format(**given) in sentences[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{tmp}/none.gguf", "{tmp}/none.gguf: No such file or directory"),
        ("{tmp}", "{tmp}: not a model folder"),
        ("tiny", "'tiny' is neither a file nor a known model"),
        ("{prompts}", "{prompts}: is not a GGUF file"),
        ("{drafter}", "{drafter}: has no tensor token_embd.weight"),
    ],
)
def test_targets_that_cannot_be_loaded(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    message: str,
) -> None:
    given = {"tmp": tmp_path, "prompts": trained.prompts, "drafter": trained.pair.drafter}
    words = arguments(Path(target.format(**given)), tmp_path / "out", trained.prompts)
    assert command.main(words) == 1
    sentences = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(sentences) == 1
    assert message.format(**given) in sentences[0]
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked_before_torch_is_loaded(trained: Trained, tmp_path: Path) -> None:
    code = (
        "import sys; from dflash_gguf.train import command; status = command.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    flags = ["--chat", "--mask-token", "<nothing>"]
    command = [sys.executable, "-c", code, str(trained.pair.target), str(tmp_path / "out")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: --mask-token: the target's vocabulary has no token")


def test_a_missing_package_is_named_with_its_extra(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "dflash_gguf.train.training")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main(arguments(trained.pair.target, tmp_path / "out", trained.prompts)) == 1
    sentence = "the package torch is not installed: pip install 'dflash-gguf[train]'"
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_belongs_to_one_training(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(trained.pair.target, trained.pair.drafter_dir, trained.prompts)
    assert command.main([*words, "--seed", "2"]) == 1
    assert "was begun with seed = 1, now it is 2" in capsys.readouterr().err


def test_a_drafter_of_another_origin_stays(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert command.main(arguments(trained.pair.target, tmp_path, trained.prompts)) == 1
    assert "has a config.json of another origin" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_has_one_process(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with command.sole_user(tmp_path):
        assert command.main(arguments(trained.pair.target, tmp_path, trained.prompts)) == 1
    assert f"{tmp_path}: another process trains in this folder" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["arguments.json", "answers.json", "answers.features", "state.pt"])
def test_a_damaged_file_is_named(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.pair.drafter_dir, out)
    (out / name).write_bytes((out / name).read_bytes()[:-9])
    assert command.main(arguments(trained.pair.target, out, trained.prompts)) == 1
    assert f"{out / name}: is" in capsys.readouterr().err
