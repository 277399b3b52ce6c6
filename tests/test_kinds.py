"""The table of proposers; a made-up kind of drafter is one file and one row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import toy_drafter
from fakes import FakeModel, FakeSequence
from pairs import make_pair

from dflash_gguf.config import LoadConfig
from dflash_gguf.core import Drafter, Engine, Model, Sequence
from dflash_gguf.decoder import Decoder
from dflash_gguf.draft import kinds
from dflash_gguf.draft.calibration import Calibrations
from dflash_gguf.draft.proposer import DFlash
from dflash_gguf.policy.drafting import Drafting

CONFIG = LoadConfig(n_ctx=256, n_threads=1, n_gpu_layers=0)
PROMPT = [5, 9, 200, 17, 8]


@pytest.fixture
def with_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PROPOSERS", kinds.PROPOSERS | {"echo": toy_drafter.make})


@pytest.mark.usefixtures("with_echo")
def test_a_row_is_all_that_a_kind_of_drafter_needs(tiny_gguf: Callable[[str], Path]) -> None:
    model = Model(str(tiny_gguf("llama")), CONFIG)
    with Decoder(Sequence(Engine(model)), None) as decoder:
        plain = decoder.generate(PROMPT, draft="none", max_tokens=120)
        for draft in ("chain", "tree", "auto"):
            found = decoder.generate(PROMPT, draft=draft, max_tokens=120)
            assert found.tokens == plain.tokens
        echo = decoder._drafting.proposer
        assert isinstance(echo, toy_drafter.Echo)
        assert echo.n_proposed > 0 and echo.n_observed > 0
        found = decoder.generate(PROMPT, draft="chain", max_tokens=120)
        assert found.n_accepted > 0


@pytest.mark.usefixtures("with_echo")
def test_a_name_chooses_among_kinds(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    model = Model(str(pair.target), CONFIG)
    sequence = Sequence(Engine(model, drafter=Drafter(str(pair.drafter), model)))
    assert isinstance(Drafting(sequence).proposer, DFlash)
    assert isinstance(Drafting(sequence, proposer="dflash").proposer, DFlash)
    assert isinstance(Drafting(sequence, proposer="echo").proposer, toy_drafter.Echo)


def test_names_that_cannot_be() -> None:
    sequence = FakeSequence(FakeModel(), b"yes", ord(":"), block_size=1)
    for name, sentence in (
        ("echo", "proposer 'echo' is not known; there are: dflash"),
        ("dflash", "proposer 'dflash' lacks its drafter in this sequence"),
    ):
        with pytest.raises(ValueError, match=sentence):
            kinds.proposer_of(sequence, Calibrations(), name)
    assert kinds.proposer_of(sequence, Calibrations()) is None
