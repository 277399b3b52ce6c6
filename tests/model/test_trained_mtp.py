"""The MTP layer trained for python-tiny: its file drafts with -m alone, and `auto` gains by it.

tests/support/python_tiny_mtp.gguf has the layer and its 512 tokens to draft; the target's file
without the layer has all else. dflash-train --kind mtp made it, see docs/develop/figures.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepen import deepened

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import BatchEntry, DraftRequest, Engine

PROMPTS = (
    "def merge(a, b):\n",
    "    def __init__(self, name, value=None):\n",
    "    def read(self, size=-1):\n",
    "class Error(Exception):\n",
    "    for key, value in items:\n        if",
    "def parse(text):\n",
)
N_TOKENS = 128
SETTINGS: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """python-tiny with the layer behind its last."""
    return deepened(tmp_path_factory.mktemp("mtp") / "python-tiny-mtp.gguf", layers=1, width=1)


def answers(decoder: Decoder, **settings: Any) -> tuple[list[tuple[int, ...]], float]:
    """Returns the answers to all prompts, and their tokens a round."""
    found = [decoder.generate(x, **SETTINGS, **settings) for x in PROMPTS]
    return [x.tokens for x in found], sum(x.n_decoded for x in found) / sum(x.rounds for x in found)


def test_a_trained_layer_is_accepted_and_changes_no_text(model: Path) -> None:
    with dflash_gguf.load(model, n_ctx=512, n_threads=1) as decoder:
        plain, _ = answers(decoder, draft="none")
        for draft, least in (("chain", 2.9), ("tree", 2.9)):
            texts, tau = answers(decoder, draft=draft, draft_type="mtp", draft_max=3)
            print(f"{draft}: {tau:.2f} tokens a round")
            assert texts == plain
            assert tau > least


def test_layers_and_widths_that_add_nothing_change_no_text_and_no_draft(
    model: Path, tmp_path: Path
) -> None:
    deep = deepened(tmp_path / "deep.gguf", layers=2, width=3)
    drafter = bundled.DRAFTER
    found = []
    for path in (model, deep):
        with dflash_gguf.load(path, drafter=[drafter, path], n_ctx=512, n_threads=1) as decoder:
            found.append([answers(decoder, draft="chain", draft_type=x) for x in ("mtp", "dflash")])
    assert found[0] == found[1]


# Microseconds on a Zen 5 core, 1 thread: passes by rows, the step of a draft, the rest of a
# draft, Python's part of a plain round and of a round with a draft.
PASS_US = (104, 128, 153, 164, 188, 211, 238, 265)
STEP_US, DRAFT_US, PLAIN_US, ROUND_US = 12, 20, 25, 90


@pytest.mark.parametrize("kinds", [("mtp",), ("mtp", "suffix")])
def test_auto_gains_by_its_own_choice(
    model: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes take their durations from a table, so that the choice depends on no machine."""
    clock = itertools.count(1)
    now = [0.0]
    run, draft = Engine.run, Engine.draft

    def timed_run(engine: Engine, items: Sequence[BatchEntry], *more: Any) -> Any:
        n = sum(len(x.tokens) for x in items)
        now[0] += 1e-6 * (PASS_US[n - 1] if n <= len(PASS_US) else 33 * n) + 1e-6 * PLAIN_US
        return run(engine, items, *more)

    def timed_draft(engine: Engine, requests: Sequence[DraftRequest], k: int, *more: Any) -> Any:
        now[0] += 1e-6 * (DRAFT_US + STEP_US * sum(x.n_draft for x in requests) + ROUND_US)
        return draft(engine, requests, k, *more)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0] + 1e-12 * next(clock))
    monkeypatch.setattr(Engine, "run", timed_run)
    monkeypatch.setattr(Engine, "draft", timed_draft)
    seconds: dict[str, float] = {}
    texts = {}
    with dflash_gguf.load(model, n_ctx=512, n_threads=1) as decoder:
        for draft_mode in ("auto", "none"):
            began = now[0]
            drafted = {"draft_type": kinds} if draft_mode == "auto" else {}
            texts[draft_mode], tau = answers(decoder, draft=draft_mode, **drafted)
            seconds[draft_mode] = now[0] - began
            print(f"{draft_mode}: {tau:.2f} tokens a round, {1e3 * seconds[draft_mode]:.1f} ms")
    assert texts["auto"] == texts["none"]
    assert seconds["auto"] < 0.9 * seconds["none"]
