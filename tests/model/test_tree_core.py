"""Every tree node's row equals that of a serial run of its path, and of no other path."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from chains import run_round
from checkpoints import CLASSES, HYBRIDS, VOCAB_SIZE
from gguf_files import make_gguf
from pairs import Pair, load_target, make_pair, open_pair, random_tokens
from trees import bushy, comb, cousins, deep, path_to, scattered, serial_logits, star, tokens_for

from dflash_gguf.native import Engine, Error, Sequence

# Limits relative to the range of the logits. Observed: 4e-6 for equal paths, over 4e-3 for cousins.
LIMIT, APART = 4e-5, 1e-3


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda kind: make_pair(tmp_path_factory.mktemp(kind), kind, block_size=16))


def shapes(random: np.random.Generator) -> list[list[int]]:
    return [
        star(1),
        star(9),
        deep(7),
        comb(16),
        bushy(15),
        scattered(31, random),
        star(2),
        scattered(64, random),
        comb(33),
    ]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_node_sees_its_path_and_nothing_else(pair_of: Callable[[str], Pair], kind: str) -> None:
    random = np.random.default_rng(3)
    sequence = open_pair(pair_of(kind))
    serial = Sequence(Engine(load_target(pair_of(kind).target)))
    sequence.engine.reserve_verify(64)
    prompt = random_tokens(23)
    sequence.prefill(prompt)
    serial.prefill(prompt)
    closest, worst = np.inf, 0.0
    for parents in shapes(random):
        tokens = tokens_for(parents, random, VOCAB_SIZE)
        start = serial.snapshot()
        expected = serial_logits(serial, start, tokens, parents)
        rows = sequence.verify_tree(tokens, parents)
        found = np.stack([rows.logits(i) for i in range(len(tokens))])
        scale = np.ptp(expected)
        worst = max(worst, float(np.abs(found - expected).max() / scale))
        np.testing.assert_allclose(found, expected, atol=LIMIT * scale, rtol=0)
        for a, b in cousins(tokens, parents):
            closest = min(closest, float(np.abs(found[a] - expected[b]).max() / scale))
        assert sequence.position == start.n_tokens
        path = path_to(parents, int(random.integers(len(parents))))
        sequence.commit_path(path)
        serial.attach(start, start.n_tokens)
        serial.prefill([tokens[x] for x in path])
        assert sequence.position == serial.position
    print(f"{kind}: off by {worst:.1e} of the range, cousins differ by {closest:.1e}")
    assert closest > APART
    tail = random_tokens(6, seed=4)
    found, expected = sequence.logits(tail), serial.logits(tail)
    np.testing.assert_allclose(found, expected, atol=LIMIT * np.ptp(expected), rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", *HYBRIDS])
def test_the_drafter_sees_the_accepted_rows(pair_of: Callable[[str], Pair], kind: str) -> None:
    sequence, chained = open_pair(pair_of(kind)), open_pair(pair_of(kind))
    random = np.random.default_rng(8)
    for each in (sequence, chained):
        each.prefill(random_tokens(20))
    for _ in range(4):
        parents = scattered(16, random)
        tokens = tokens_for(parents, random, VOCAB_SIZE)
        path = path_to(parents, 15)
        sequence.verify_tree(tokens, parents)
        sequence.commit_path(path)
        run = [tokens[x] for x in path]
        chained.verify(run)
        chained.commit(len(run))
        found, expected = sequence.draft(9, 15, 4), chained.draft(9, 15, 4)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


def test_what_is_no_tree_and_no_path_is_refused_by_name(pair_of: Callable[[str], Pair]) -> None:
    sequence = open_pair(pair_of("llama"), n_ctx=40)
    prompt = random_tokens(20)
    sequence.prefill(prompt)
    for parents, message in (
        ([0, 0, 0], "the parent of the root is 0, expected -1"),
        ([-1, 1, 0], "the parent of node 1 is 1, expected 0 to 0"),
        ([-1, 0, -1], "the parent of node 2 is -1, expected 0 to 1"),
        ([-1, 0, 2**40], "the parent of node 2 is 2147483647, expected 0 to 1"),
    ):
        with pytest.raises(Error, match=message):
            sequence.verify_tree([1, 2, 3], parents)
    with pytest.raises(ValueError, match="parents has 2 nodes, must have 3"):
        sequence.verify_tree([1, 2, 3], [-1, 0])
    with pytest.raises(ValueError, match="parents: need a list of integers, got float64"):
        sequence.verify_tree([1, 2], [-1, 0.0])  # type: ignore[list-item]
    with pytest.raises(Error, match="17 rows are to be verified, memory is reserved for 16"):
        sequence.verify_tree([1] * 17, star(17))
    sequence.engine.reserve_verify(24)
    with pytest.raises(Error, match="21 tokens after 20 do not fit into a context of 40"):
        sequence.verify_tree([1] * 21, star(21))
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        sequence.verify_tree([1, 421], [-1, 0])
    with pytest.raises(Error, match="the path has 1 nodes, the pending verify has 0"):
        sequence.commit_path([0])

    sequence.verify_tree([1, 2, 3, 4], [-1, 0, 0, 2])
    for path, message in (
        ([1, 3], "the path begins with node 1, expected the root"),
        ([0, 1, 3], "the path goes from node 1 to node 3, whose parent is 2"),
        ([0, 0], "the path goes from node 0 to node 0, whose parent is -1"),
        ([0, 4], "the path has node 4, the pending verify has nodes 0 to 3"),
        ([0, -1], "the path has node -1"),
        ([0, 2, 3, 3, 3], "the path has 5 nodes, the pending verify has 4"),
    ):
        with pytest.raises(Error, match=message):
            sequence.commit_path(path)
    with pytest.raises(Error, match="the path goes from node 1 to node 2, whose parent is 0"):
        sequence.commit(3)
    with pytest.raises(Error, match="the sequence has a verify of 4 rows, commit it first"):
        sequence.engine.reserve_verify(30)
    sequence.commit_path([0, 2])
    with pytest.raises(Error, match="the path has 1 nodes, the pending verify has 0"):
        sequence.commit_path([0])
    assert sequence.position == 22

    fresh = open_pair(pair_of("llama"))
    fresh.prefill([*prompt, 1, 3])
    expected = fresh.decode(5).logits()
    np.testing.assert_allclose(sequence.decode(5).logits(), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_room_for_a_verify_costs_trace_and_features_only(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    sequence = open_pair(pair_of(kind))
    prompt = random_tokens(20)
    sequence.prefill(prompt[:-1])
    sequence.decode(prompt[-1])
    engine = sequence.engine
    before = {name: engine.bytes_of(name) for name in ("kv", "recurrent", "draft", "trace")}
    assert engine.max_verify == 16
    for n in (0, -1, 257):
        with pytest.raises(Error, match=f"rows to reserve for verifies are {n}, expected 1 to 256"):
            engine.reserve_verify(n)
    engine.reserve_verify(5)
    assert engine.max_verify == 16
    engine.reserve_verify(192)
    after = {name: engine.bytes_of(name) for name in before}
    arena = engine.bytes_of("arena")
    assert engine.max_verify == 192
    assert after["kv"] == before["kv"]
    assert after["recurrent"] == before["recurrent"]
    grown = 4 * engine.drafters[0].n_taps * engine.model.n_embd * 176
    assert after["draft"] - before["draft"] == grown
    # Memory of node updates, and of the committed inputs of the convolutions.
    per_node, rest = divmod(after["trace"] - before["trace"], 176)
    assert rest == 0
    assert 0 <= before["trace"] - 16 * per_node <= 3 * per_node
    assert (per_node > 0) == (engine.model.n_recurrent > 0)

    fresh = open_pair(pair_of(kind))
    fresh.prefill(prompt)
    assert sequence.draft(5, 7).tokens.tolist() == fresh.draft(5, 7).tokens.tolist()
    parents = star(192)
    sequence.verify_tree([3] * 192, parents)
    sequence.commit_path([0, 150])
    fresh.prefill([3, 3])
    expected = fresh.decode(5).logits()
    np.testing.assert_allclose(sequence.decode(5).logits(), expected, atol=1e-4)
    assert engine.bytes_of("arena") == arena


def test_the_largest_tree_of_a_deep_hybrid(tmp_path: Path) -> None:
    """Runs the largest graph: a tree of 256 nodes in a hybrid of 32 layers."""
    sequence = Sequence(Engine(load_target(make_gguf(tmp_path, "qwen35", num_hidden_layers=32))))
    serial = Sequence(Engine(sequence.engine.model))
    sequence.engine.reserve_verify(256)
    random = np.random.default_rng(2)
    for each in (sequence, serial):
        each.prefill(random_tokens(20))
    parents = scattered(256, random)
    tokens = tokens_for(parents, random, VOCAB_SIZE)
    rows = sequence.verify_tree(tokens, parents)
    path = path_to(parents, 255)
    expected = serial.logits([tokens[x] for x in path])
    found = np.stack([rows.logits(x) for x in path])
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.ptp(expected), rtol=0)
    sequence.commit_path(path)
    expected = serial.decode(3).logits()
    np.testing.assert_allclose(
        sequence.decode(3).logits(), expected, atol=1e-3 * np.ptp(expected), rtol=0
    )


def test_a_sequence_without_a_drafter_verifies_once_there_is_room(
    pair_of: Callable[[str], Pair],
) -> None:
    sequence = Sequence(Engine(load_target(pair_of("qwen35").target)))
    fresh = Sequence(Engine(load_target(pair_of("qwen35").target)))
    assert sequence.engine.max_verify == 0
    sequence.engine.reserve_verify(8)
    for each in (sequence, fresh):
        each.prefill([1, 2, 3])
    known = [4]
    for _ in range(5):
        known.append(fresh.decode(known[-1]).argmax())
    assert run_round(sequence, 4, known[1:4]) == known[1:5]
