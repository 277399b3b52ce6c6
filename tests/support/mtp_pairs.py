"""Small random targets with an MTP layer, and ones whose layer knows an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import PRE_OF_KIND, make_target
from gguf_files import convert
from model_cache import cached
from pairs import Pair, random_tokens

import dflash_gguf


@cached
def _make_target(folder: Path, kind: str, **settings: Any) -> None:
    directory = make_target(folder / "target", kind, seed=7, mtp=True, **settings)
    convert(directory, folder / "target.gguf", "f32", PRE_OF_KIND[kind])


def make_mtp(folder: Path, kind: str, **settings: Any) -> Pair:
    """Makes a random target with an MTP layer, which is the drafter as well."""
    _make_target(folder, kind, **settings)
    target, file = folder / "target", folder / "target.gguf"
    return Pair(target, target, file, file)


@cached
def _train(folder: Path, target: Path, tokens: list[int]) -> None:
    from mtp_train import train

    train(folder / "trained", target, tokens, 0.93)
    convert(folder / "trained", folder / "trained.gguf", "f32", PRE_OF_KIND["qwen35"])


def trained(folder: Path) -> tuple[Pair, list[int]]:
    """Makes a target whose MTP layer knows its greedy answer; returns prompt and answer too."""
    pair, prompt = make_mtp(folder, "qwen35"), random_tokens(1)
    with dflash_gguf.load(pair.target, n_ctx=512, n_threads=1, mtp=False) as decoder:
        answer = decoder.generate(prompt, max_tokens=300, ignore_eos=True)
    text = [*prompt, *answer.tokens]
    _train(folder, pair.target_dir, text)
    file = folder / "trained.gguf"
    return Pair(folder / "trained", folder / "trained", file, file), text
