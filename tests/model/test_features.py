"""Hidden states that passes return, compared with those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import PRE_OF_KIND, make_target
from device import DEVICE
from gguf_files import convert
from model_cache import cached
from pairs import Pair, load_target, make_pair, random_tokens
from transformers import AutoModelForCausalLM

from dflash_gguf.native import BatchEntry, Drafter, Engine, Error, Sequence

# Largest error relative to the range of a tap's states. Observed: up to 6e-6.
LIMIT = 1e-4 if DEVICE is None else 5e-3
KINDS = ("llama", "qwen3", "qwen35")


@cached
def _make(folder: Path, kind: str) -> None:
    directory = make_target(folder / "target", kind, seed=7)
    convert(directory, folder / "target.gguf", "f32", PRE_OF_KIND[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_hidden_states_of_transformers(tmp_path: Path, kind: str) -> None:
    """The prompt takes several micro-batches, the last of which is partly padding."""
    _make(tmp_path, kind)
    tokens = random_tokens(41, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    with torch.no_grad():
        found = reference.eval()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    model = load_target(tmp_path / "target.gguf")
    n_layer = model.n_layer
    taps = [n_layer + 1, 0, n_layer - 1, n_layer]
    engine = Engine(model, taps=taps)
    features = Sequence(engine).features(tokens)
    assert features.shape == (len(tokens), len(taps), model.n_embd)
    with torch.no_grad():
        last = torch.from_numpy(features[:, 3])
        norm = reference.get_decoder().norm(last)
    expected = [found[n_layer], found[0], found[n_layer - 1]]
    for tap, states in enumerate(expected):
        error = np.abs(features[:, tap] - states[0].numpy()).max() / np.ptp(states[0].numpy())
        print(f"{kind}, tap {taps[tap]}: {error:.1e}")
        assert error < LIMIT
    assert np.abs(norm.numpy() - features[:, 0]).max() < LIMIT * np.ptp(features[:, 0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen35")


def test_features_leave_texts_and_drafts_as_they_are(pair: Pair) -> None:
    """Sequences share a pass with a drafter's features, and each other's rows change no bit."""
    model = load_target(pair.target)
    drafter = Drafter(pair.drafter, model)
    texts = [random_tokens(n, seed=n) for n in (7, 5)]
    config = replace(model.config, n_parallel=2)
    both = Engine(model, drafter=drafter, config=config, taps=[1, 2])
    sequences = [Sequence(both), Sequence(both)]
    outs = [np.empty((len(text), 2, model.n_embd), np.float32) for text in texts]
    rows = both.run(
        [
            BatchEntry(sequence, text, all_features=out)
            for sequence, text, out in zip(sequences, texts, outs, strict=True)
        ]
    )
    logits = [row.logits() for row in rows]
    drafts = [sequence.draft(3, 4, k=2) for sequence in sequences]
    for text, out, row, draft in zip(texts, outs, logits, drafts, strict=True):
        alone = Sequence(Engine(model, drafter=drafter))
        assert np.array_equal(alone.prefill(text).logits(), row)
        expected = alone.draft(3, 4, k=2)
        assert np.array_equal(expected.logits, draft.logits)
        assert np.array_equal(Sequence(Engine(model, taps=[1, 2])).features(text), out)


def test_features_that_cannot_be_had(pair: Pair) -> None:
    model = load_target(pair.target)
    with pytest.raises(Error, match=f"tap 99 is out of range, .* 0 to {model.n_layer + 1}"):
        Engine(model, taps=[0, 99])
    sequence = Sequence(Engine(model))
    with pytest.raises(Error, match="created without taps"):
        sequence.engine.run([BatchEntry(sequence, [1], all_features=np.zeros(9, np.float32))])
    with pytest.raises(Error, match="created without taps"):
        sequence.features([1])
