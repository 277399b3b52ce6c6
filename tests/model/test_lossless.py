"""Chains do not change the tokens of plain decoding, and leave the state of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from chains import chain, plain, run_round, spoiled
from checkpoints import HYBRIDS, KINDS
from pairs import N_UBATCH, Pair, load_target, make_pair, open_pair, overfit, random_tokens

from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Engine, Error, Sequence

N_TOKENS = 200
LENGTHS = (1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 3 * N_UBATCH + 7)
SLIDING = {
    "block_size": 16,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda kind: make_pair(tmp_path_factory.mktemp(kind), kind, **SLIDING))


@pytest.mark.parametrize("kind", KINDS)
def test_chains_give_the_tokens_of_plain_decoding(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    pair = pair_of(kind)
    alone = Sequence(Engine(load_target(pair.target)))
    sequences = [open_pair(pair, draft_window=window) for window in (30, 4096)]
    random = np.random.default_rng(3).integers
    expected = {}
    for n in LENGTHS:
        expected[n] = plain(alone, random_tokens(n), N_TOKENS)
        assert plain(sequences[0], random_tokens(n), N_TOKENS) == expected[n]
    seen = set()
    for n_draft in range(1, 16):
        n = LENGTHS[n_draft % len(LENGTHS)]
        sequence = sequences[n_draft % 2]
        tokens, _ = chain(sequence, random_tokens(n), N_TOKENS // 4, n_draft)
        assert tokens == expected[n][: len(tokens)]
        propose = spoiled(expected[n], n_draft, random, sequence.engine.model.n_vocab)
        tokens, accepted = chain(sequence, random_tokens(n), N_TOKENS, n_draft, propose)
        assert tokens[:N_TOKENS] == expected[n]
        assert sequence.position == n + len(tokens) - 1
        seen |= {(n_draft, x) for x in accepted}
    assert {(15, x) for x in (0, 15)} <= seen
    assert {accepted for _, accepted in seen} == set(range(16))


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_drafter_that_knows_the_answer(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, kind, block_size=16)
    text = random_tokens(1)
    text += plain(Sequence(Engine(load_target(pair.target))), text, LENGTHS[-1] + N_TOKENS + 16)
    trained = overfit(pair, kind, tmp_path / "trained.gguf", text[:1], text[1:])
    sequences = [open_pair(trained, draft_window=window) for window in (100, 4096)]
    for n_draft in range(1, 16):
        n = LENGTHS[n_draft % len(LENGTHS)]
        tokens, accepted = chain(sequences[n_draft % 2], text[:n], N_TOKENS, n_draft)
        assert tokens[:N_TOKENS] == text[n : n + N_TOKENS]
        tau = 1 + sum(accepted) / len(accepted)
        print(f"{kind}: {n_draft} drafted, tau {tau:.2f}")
        assert tau >= 4 or n_draft < 7
    with Decoder(sequences[1], None) as decoder:
        decoder.reset()
        for budget in (7, 16, 64):
            result = decoder.generate(
                text[: LENGTHS[-1]], draft="tree", tree_budget=budget, max_tokens=N_TOKENS
            )
            assert list(result.tokens) == text[LENGTHS[-1] : LENGTHS[-1] + N_TOKENS]
            print(f"{kind}: a tree of {budget}, tau {result.tau:.2f}")
            assert result.tau is not None
            assert result.tau >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_state_after_rounds_equals_that_of_a_prefill(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    pair = pair_of(kind)
    sequence, fresh = open_pair(pair), Sequence(Engine(load_target(pair.target)))
    tokens = random_tokens(330)
    sequence.engine.reserve_verify(64)
    sequence.prefill(tokens[:19])

    def follow(n_accepted: int, n_rows: int) -> None:
        at = sequence.position
        sequence.verify([*tokens[at : at + n_accepted], *[3] * (n_rows - n_accepted)])
        sequence.commit(n_accepted)

    for n_accepted in [*range(17), 2, 1, 1]:
        follow(n_accepted, 16 if n_accepted < 16 else 64)
    sequence.decode(tokens[sequence.position])
    follow(1, 1)
    sequence.prefill(tokens[sequence.position : sequence.position + 21])
    follow(64, 64)
    at = sequence.position
    found = sequence.logits(tokens[at : at + 6])
    fresh.prefill(tokens[:at])
    expected = fresh.logits(tokens[at : at + 6])
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"{kind}: {error:.1e} of the range after {at} tokens")
    assert error <= 1e-4


@pytest.mark.parametrize("kind", HYBRIDS)
def test_paths_longer_than_a_promotion(pair_of: Callable[[str], Pair], kind: str) -> None:
    """Recurrent states advance by 16 nodes at a time; the next row shows if all were applied."""
    pair = pair_of(kind)
    sequence, alone = open_pair(pair), Sequence(Engine(load_target(pair.target)))
    tokens = random_tokens(330)
    sequence.engine.reserve_verify(64)
    for each in (sequence, alone):
        each.prefill(tokens[:19])
    for n in (15, 16, 17, 18, 19, 20, 31, 32, 33, 34, 48, 1):
        at = sequence.position
        sequence.verify([*tokens[at : at + n], *[3] * (64 - n)])
        sequence.commit(n)
        alone.prefill(tokens[at : at + n])
        found, expected = (x.decode(tokens[at + n]).logits() for x in (sequence, alone))
        error = np.abs(found - expected).max() / np.ptp(expected)
        assert error <= 1e-4, n


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_a_round_costs_one_forward_and_copies_nothing(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    sequence = open_pair(pair_of(kind))
    arena = sequence.engine.bytes_of("arena")
    prompt = random_tokens(20)
    known = plain(sequence, prompt, 80)

    def all_lengths() -> None:
        sequence.reset()
        tokens = [sequence.prefill(prompt).argmax()]
        for n_accepted in range(8):
            before = sequence.engine.info()
            at = len(tokens)
            sequence.draft(tokens[-1], 7)
            right = known[at : at + n_accepted]
            wrong = [(x + 1) % 400 for x in known[at + n_accepted : at + 7]]
            tokens += run_round(sequence, tokens[-1], right + wrong)
            after = sequence.engine.info()
            assert len(tokens) == at + n_accepted + 1
            assert after.n_passes - before.n_passes == 1
            assert after.bytes_read == before.bytes_read

    all_lengths()
    n_graphs = sequence.engine.info().n_graphs_built
    all_lengths()
    assert sequence.engine.info().n_graphs_built == n_graphs
    assert sequence.engine.bytes_of("arena") == arena


def test_bytes_read_counts_what_is_copied(pair_of: Callable[[str], Pair]) -> None:
    sequence = open_pair(pair_of("qwen35"))
    rows = sequence.prefill([1, 2, 3])
    before = sequence.engine.info().bytes_read
    rows.logits()
    assert sequence.engine.info().bytes_read - before == 4 * sequence.engine.model.n_vocab
    before = sequence.engine.info().bytes_read
    sequence.snapshot()
    assert sequence.engine.info().bytes_read - before == sequence.engine.bytes_of("recurrent")


@pytest.mark.parametrize("kind", ["qwen3", "qwen35"])
def test_a_snapshot_among_rounds(pair_of: Callable[[str], Pair], kind: str) -> None:
    sequence = open_pair(pair_of(kind))
    prompt = random_tokens(40)
    known = plain(sequence, prompt, 90)
    random = np.random.default_rng(5).integers
    sequence.reset()
    sequence.prefill(prompt)
    assert run_round(sequence, known[0], known[1:6]) == known[1:7]
    kept = sequence.snapshot()

    def onward() -> tuple[list[int], list[list[int]]]:
        tokens, drafted = known[:7], []
        while len(tokens) < 60:
            drafted.append(sequence.draft(tokens[-1], 9)[0][:, 0].tolist())
            right = known[len(tokens) :][: int(random(9))]
            tokens += run_round(sequence, tokens[-1], [*right, 7])
        return tokens, drafted[:2]

    first = onward()
    assert first[0] == known[: len(first[0])]
    sequence.attach(kept, kept.n_tokens)
    assert sequence.position == kept.n_tokens
    second = onward()
    assert second[0] == known[: len(second[0])]
    assert second[1][0] == first[1][0]


def test_the_end_of_the_context_inside_a_block(pair_of: Callable[[str], Pair]) -> None:
    sequence = open_pair(pair_of("qwen35"), n_ctx=32)
    known = plain(open_pair(pair_of("qwen35")), random_tokens(25), 10)
    sequence.prefill(random_tokens(25))
    assert run_round(sequence, known[0], known[1:3]) == known[1:4]
    with pytest.raises(Error, match=r"4 drafted tokens .* after 28 .* a context of 32"):
        sequence.draft(known[3], 4)
    sequence.draft(known[3], 3)
    with pytest.raises(Error, match="5 tokens after 28 do not fit into a context of 32"):
        sequence.verify(known[3:8])
    assert run_round(sequence, known[3], known[4:7]) == known[4:8]
    assert sequence.position == 32
    with pytest.raises(Error, match="do not fit into a context of 32"):
        sequence.verify([known[7]])
    with pytest.raises(Error, match="do not fit into a context of 32"):
        sequence.draft(known[7], 1)
    sequence.commit(0)
    assert sequence.position == 32


def test_rounds_out_of_order_are_refused_by_name(pair_of: Callable[[str], Pair]) -> None:
    sequence = open_pair(pair_of("qwen35"))
    sequence.prefill(random_tokens(5))
    with pytest.raises(Error, match="1 rows are to be committed, the pending verify has 0"):
        sequence.commit(1)
    kept = sequence.snapshot()
    rows = sequence.verify([1, 2, 3])
    calls: list[Callable[[], object]] = [
        lambda: sequence.verify([1]),
        lambda: sequence.draft(1, 1),
        lambda: sequence.prefill([1]),
        sequence.snapshot,
        lambda: sequence.attach(kept, 5),
    ]
    for call in calls:
        with pytest.raises(Error, match="the sequence has a verify of 3 rows, commit it first"):
            call()
    with pytest.raises(Error, match="4 rows are to be committed, the pending verify has 3"):
        sequence.commit(4)
    with pytest.raises(Error, match="-1 rows are to be committed"):
        sequence.commit(-1)
    rows.argmax(0)
    sequence.commit(2)
    with pytest.raises(Error, match="these logits are gone"):
        rows.argmax(0)
    assert sequence.position == 7
    for n_draft in (0, 16, -1):
        with pytest.raises(Error, match=f"n_draft is {n_draft}, this drafter drafts 1 to 15"):
            sequence.draft(1, n_draft)
    for k in (0, 422, -1):
        with pytest.raises(Error, match=f"k is {k} candidates, expected 1 to 421"):
            sequence.draft(1, 2, k)
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        sequence.draft(421, 1)
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        sequence.verify([1, 421])
    with pytest.raises(Error, match="the list of tokens is empty"):
        sequence.verify([])
    with pytest.raises(ValueError, match="need a list of integers"):
        sequence.verify([1.5])  # type: ignore[list-item]
    with pytest.raises(Error, match="17 rows are to be verified, memory is reserved for 16"):
        sequence.verify([1] * 17)
    assert sequence.position == 7


def test_a_sequence_without_a_drafter_refuses_rounds(pair_of: Callable[[str], Pair]) -> None:
    sequence = Sequence(Engine(load_target(pair_of("llama").target)))
    sequence.prefill([1])
    with pytest.raises(Error, match="has no drafter"):
        sequence.draft(1, 1)
    with pytest.raises(Error, match="1 rows are to be verified, memory is reserved for 0"):
        sequence.verify([1])
    sequence.commit(0)
    assert sequence.position == 1
