"""A made-up kind of proposer needs one file and one table row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_drafter
from pairs import make_pair

from dflash_gguf.config import DecodeConfig, LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Drafter, Engine, Model, Sequence
from dflash_gguf.speculative.proposers import registry
from dflash_gguf.speculative.runtime import SpeculativeRuntime

CONFIG = LoadConfig(n_ctx=256, n_threads=1, n_gpu_layers=0)
PROMPT = [5, 9, 200, 17, 8]


@pytest.fixture
def with_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PROPOSERS", registry.PROPOSERS | {"echo": toy_drafter.make})


@pytest.mark.usefixtures("with_echo")
def test_a_row_is_all_that_a_kind_of_drafter_needs(tiny_gguf: Callable[[str], Path]) -> None:
    model = Model(str(tiny_gguf("llama")), CONFIG)
    with Decoder(Sequence(Engine(model)), None) as decoder:
        plain = decoder.generate(PROMPT, draft="none", max_tokens=120)
        for draft in ("chain", "tree", "auto"):
            found = decoder.generate(PROMPT, draft=draft, max_tokens=120)
            assert found.tokens == plain.tokens
        echo = next(x for x in decoder._speculative.proposers if x.name == "echo")
        assert isinstance(echo, toy_drafter.Echo)
        assert echo.n_proposed > 0 and echo.n_observed > 0
        found = decoder.generate(PROMPT, draft="chain", max_tokens=120)
        assert found.n_accepted > 0


@pytest.mark.usefixtures("with_echo")
def test_names_choose_among_kinds(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    model = Model(str(pair.target), CONFIG)
    drafting = SpeculativeRuntime(
        Sequence(Engine(model, drafter=Drafter(str(pair.drafter), model)))
    )

    def names(**settings: Any) -> list[str]:
        return [proposer.name for proposer in drafting.controller(DecodeConfig(**settings))[0]]

    assert {"dflash", "echo"} <= set(names())
    assert names(draft="chain") == ["dflash"]
    assert names(draft="none") == []
    for draft in ("chain", "auto"):
        assert names(draft=draft, draft_type="echo") == ["echo"]
        assert names(draft=draft, draft_type="echo,dflash") == ["dflash", "echo"]
    with pytest.raises(ValueError, match=r"draft_type 'eagle' is not available; .* has: dflash, "):
        drafting.controller(DecodeConfig(draft_type="eagle"))
