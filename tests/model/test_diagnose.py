"""A drafter file with one wrong choice: --diagnose names the right one, and flags set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from device import DEVICE
from gguf_files import Parts, edited
from pairs import make_pair, random_tokens

import dflash_gguf
from dflash_gguf import bundled
from dflash_gguf.bench.command import main
from dflash_gguf.speculative.proposers.embedding_scale import N_DRAFTS

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the choices are the same on a GPU")

PAIR = bundled.find("python-tiny")
PROMPT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def __init__(self):\n"
MORE = "import json\n\n\ndef load(path):\n    with open(path) as"


def shifted(parts: Parts, n: int) -> None:
    kind, taps, element = parts.metadata["dflash.target_layers"]
    parts.metadata["dflash.target_layers"] = kind, [tap + n for tap in taps], element


def with_key(parts: Parts, key: str, kind: gguf.GGUFValueType, value: Any) -> None:
    parts.metadata[f"dflash.{key}"] = kind, value, None


def windowed(parts: Parts) -> None:
    with_key(parts, "attention.sliding_window", gguf.GGUFValueType.UINT32, 1)
    kind = gguf.GGUFValueType
    parts.metadata["dflash.attention.sliding_window_pattern"] = kind.ARRAY, [True] * 2, kind.BOOL


WRONG = {
    "taps one too low": (lambda parts: shifted(parts, -1), {"draft_tap_shift": 1}),
    "scaled": (
        lambda parts: with_key(parts, "embedding_scale", gguf.GGUFValueType.FLOAT32, 13.856407),
        {"draft_embedding_scale": "raw"},
    ),
    "causal": (
        lambda parts: with_key(parts, "attention.causal", gguf.GGUFValueType.BOOL, True),
        {"draft_attention": "bidirectional"},
    ),
    # Without a key, layers with a window are causal.
    "window": (windowed, {"draft_unwindowed": True, "draft_attention": "bidirectional"}),
    "nothing": (lambda _: None, {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_choice_is_named_and_can_be_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    edit, right = WRONG[case]
    drafter = edited(PAIR.drafter, tmp_path / "drafter.gguf", edit)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in (PROMPT, MORE)))
    pair = ["-m", str(PAIR.target), "-md", str(drafter)]
    assert main([*pair, "--diagnose", "-f", str(prompts), "-n", "128", "-t", "1"]) == 0
    said = capsys.readouterr()
    best = json.loads(said.out.splitlines()[-1])["best"]
    assert best["changes"] == right
    assert best["flags"] in said.err
    loads = ((drafter, {}), (drafter, right), (PAIR.drafter, {}))
    answers = []
    for path, choices in loads:
        with dflash_gguf.load(PAIR.target, drafter=path, n_threads=1, **choices) as decoder:
            answers.append(decoder.generate(PROMPT, draft="chain", max_tokens=64))
    assert len({answer.tokens for answer in answers}) == 1
    assert answers[1].accept_histogram == answers[2].accept_histogram


def test_an_open_scale_is_decided_and_remembered(tmp_path: Path) -> None:
    """Gemma scales its embeddings, and published drafters do not say whether they do."""
    pair = make_pair(tmp_path, "gemma4e")
    prompt = random_tokens(20)
    settings: dict[str, Any] = {"max_tokens": 3 * N_DRAFTS, "ignore_eos": True}
    with dflash_gguf.load(pair.target, drafter=pair.drafter, n_ctx=256, n_threads=1) as decoder:
        plain = decoder.generate(prompt, draft="none", **settings)
        assert decoder.generate(prompt, draft="chain", **settings).tokens == plain.tokens
        (dflash,) = [x for x in decoder._speculative.proposers if x.name == "dflash"]
        scale = dflash.to_dict()["scale"]
        decoder._speculative.save(1)
    with dflash_gguf.load(pair.target, drafter=pair.drafter, n_ctx=256, n_threads=1) as decoder:
        (dflash,) = [x for x in decoder._speculative.proposers if x.name == "dflash"]
        assert dflash.to_dict()["scale"] == scale
    for word in ("raw", "sqrt"):
        options: dict[str, Any] = {"n_ctx": 256, "draft_embedding_scale": word}
        with dflash_gguf.load(pair.target, drafter=pair.drafter, **options) as decoder:
            (dflash,) = [x for x in decoder._speculative.proposers if x.name == "dflash"]
            assert decoder.generate(prompt, draft="chain", **settings).tokens == plain.tokens
            assert "scale" not in dflash.to_dict()
