"""Simulated drafts of bench_gpu.py yield the published number of tokens per round."""

from __future__ import annotations

import numpy as np
import pytest
from gpu import acceptance


def test_acceptance_is_the_published_one() -> None:
    for name, tokens in acceptance.PUBLISHED.items():
        kind, size = name.split()
        assert acceptance.tokens_a_round(kind, int(size)) == pytest.approx(tokens, abs=0.06)


def test_paths_are_as_long_as_promised() -> None:
    random = np.random.default_rng(3)
    lengths = []
    for _ in range(1500):
        draft = acceptance.draw(random, 5000)
        tree = acceptance.shape(draft, "tree", 22)
        path = tree.accepted(acceptance.chosen(draft, random))
        assert [tree.parents[x] for x in path] == [-1, *path[:-1]]
        lengths.append(len(path))
    # The mean over 1500 rounds of up to 16 tokens has a standard error of about 0.13.
    assert np.mean(lengths) == pytest.approx(acceptance.tokens_a_round("tree", 22), abs=0.5)
