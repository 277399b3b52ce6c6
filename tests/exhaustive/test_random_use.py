"""Drafted answers equal plain ones in a small part of random_use.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from device import DEVICE
from random_use import LEAVES, Files, use

from dflash_gguf.config import DRAFT_KINDS

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the CPU's kernels are meant")
N_DECODERS = 24


def test_whatever_many_ask_at_once_each_has_the_plain_answer(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    differing = list(use(7, range(2), Files(tmp_path), counts, many=True))
    assert not differing, "\n".join(differing)
    assert counts["answers"] > 2 * 40
    assert counts["tokens found in the caches"] > counts["answers"]


def test_whatever_is_asked_the_answer_is_the_plain_one(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    differing = list(use(1, range(N_DECODERS), Files(tmp_path), counts))
    assert not differing, "\n".join(differing)
    assert counts["answers"] > 9 * N_DECODERS
    ways = [*DRAFT_KINDS, *(f"left: {way}" for way in LEAVES)]
    ends = ["token", "text", "length", "context", "greedy", "sampled"]
    assert all(counts[name] > 3 for name in [*ways, *ends]), counts
    assert counts["accepted of suffix"] > counts["answers"] / 2, counts
    assert counts["accepted tokens"] > 5 * counts["answers"]
    assert counts["tokens found in the caches"] > 10 * counts["answers"]
