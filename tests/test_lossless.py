"""The law: whatever is drafted, the tokens are those of plain decoding; and what a round costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chains import chain, plain, run_round, spoiled
from checkpoints import KINDS
from overfit import overfit
from pairs import N_UBATCH, Pair, load_target, make_pair, open_pair, random_tokens

from dflash_gguf.core import Error, Session
from dflash_gguf.decoder import Decoder

N_TOKENS = 200
LENGTHS = (1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 3 * N_UBATCH + 7)
SLIDING = {
    "block_size": 16,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
HYBRIDS = ("qwen35", "qwen35moe")


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def of_kind(kind: str) -> Pair:
        if kind not in made:
            made[kind] = make_pair(tmp_path_factory.mktemp(kind), kind, **SLIDING)
        return made[kind]

    return of_kind


@pytest.mark.parametrize("kind", KINDS)
def test_chains_give_the_tokens_of_plain_decoding(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    """Every draft length and micro-batch edge; contexts longer and shorter than the window."""
    pair = pair_of(kind)
    alone = Session(load_target(pair.target))
    sessions = [open_pair(pair, draft_window=window) for window in (30, 4096)]
    random = np.random.default_rng(3).integers
    expected = {}
    for n in LENGTHS:
        expected[n] = plain(alone, random_tokens(n), N_TOKENS)
        assert plain(sessions[0], random_tokens(n), N_TOKENS) == expected[n]
    seen = set()
    for n_draft in range(1, 16):
        n = LENGTHS[n_draft % len(LENGTHS)]
        session = sessions[n_draft % 2]
        tokens, _ = chain(session, random_tokens(n), N_TOKENS // 4, n_draft)
        assert tokens == expected[n][: len(tokens)]
        propose = spoiled(expected[n], n_draft, random, session.model.n_vocab)
        tokens, accepted = chain(session, random_tokens(n), N_TOKENS, n_draft, propose)
        assert tokens[:N_TOKENS] == expected[n]
        assert session.position == n + len(tokens) - 1
        seen |= {(n_draft, x) for x in accepted}
    assert {(15, x) for x in (0, 15)} <= seen
    assert {accepted for _, accepted in seen} == set(range(16))


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_drafter_that_knows_the_answer(tmp_path: Path, kind: str) -> None:
    """Most drafts are accepted, at every length and micro-batch edge, in chains and in trees."""
    pair = make_pair(tmp_path, kind, block_size=16)
    text = random_tokens(1)
    text += plain(Session(load_target(pair.target)), text, LENGTHS[-1] + N_TOKENS + 16)
    trained = overfit(pair, kind, tmp_path / "trained.gguf", text[:1], text[1:])
    sessions = [open_pair(trained, draft_window=window) for window in (100, 4096)]
    for n_draft in range(1, 16):
        n = LENGTHS[n_draft % len(LENGTHS)]
        tokens, accepted = chain(sessions[n_draft % 2], text[:n], N_TOKENS, n_draft)
        assert tokens[:N_TOKENS] == text[n : n + N_TOKENS]
        tau = 1 + sum(accepted) / len(accepted)
        print(f"{kind}: {n_draft} drafted, tau {tau:.2f}")
        assert tau >= 4 or n_draft < 7
    with Decoder(sessions[1].model, sessions[1], None) as decoder:
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
    """Accepted paths of every length, between plain steps and prefills, as one prefill has them."""
    pair = pair_of(kind)
    session, fresh = open_pair(pair), Session(load_target(pair.target))
    tokens = random_tokens(330)
    session.reserve_verify(64)
    session.prefill(tokens[:19])

    def follow(n_accepted: int, n_rows: int) -> None:
        at = session.position
        session.verify([*tokens[at : at + n_accepted], *[3] * (n_rows - n_accepted)])
        session.commit(n_accepted)

    for n_accepted in [*range(17), 2, 1, 1]:
        follow(n_accepted, 16 if n_accepted < 16 else 64)
    session.decode(tokens[session.position])
    follow(1, 1)
    session.prefill(tokens[session.position : session.position + 21])
    follow(64, 64)
    at = session.position
    found = session.logits(tokens[at : at + 6])
    fresh.prefill(tokens[:at])
    expected = fresh.logits(tokens[at : at + 6])
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"{kind}: {error:.1e} of the range after {at} tokens")
    assert error <= 1e-4


@pytest.mark.parametrize("kind", HYBRIDS)
def test_paths_longer_than_a_promotion(pair_of: Callable[[str], Pair], kind: str) -> None:
    """States move by sixteen nodes at a time; the next row shows whether all of them did."""
    pair = pair_of(kind)
    session, alone = open_pair(pair), Session(load_target(pair.target))
    tokens = random_tokens(330)
    session.reserve_verify(64)
    for each in (session, alone):
        each.prefill(tokens[:19])
    for n in (15, 16, 17, 18, 19, 20, 31, 32, 33, 34, 48, 1):
        at = session.position
        session.verify([*tokens[at : at + n], *[3] * (64 - n)])
        session.commit(n)
        alone.prefill(tokens[at : at + n])
        found, expected = (x.decode(tokens[at + n]).logits() for x in (session, alone))
        error = np.abs(found - expected).max() / np.ptp(expected)
        assert error <= 1e-4, n


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_a_round_costs_one_forward_and_copies_nothing(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    session = open_pair(pair_of(kind))
    arena = session.info().arena_bytes
    prompt = random_tokens(20)
    known = plain(session, prompt, 80)

    def all_lengths() -> None:
        session.reset()
        tokens = [session.prefill(prompt).argmax()]
        for n_accepted in range(8):
            before = session.info()
            at = len(tokens)
            session.draft(tokens[-1], 7)
            right = known[at : at + n_accepted]
            wrong = [(x + 1) % 400 for x in known[at + n_accepted : at + 7]]
            tokens += run_round(session, tokens[-1], right + wrong)
            after = session.info()
            assert len(tokens) == at + n_accepted + 1
            assert after.n_passes - before.n_passes == 1
            assert after.bytes_read == before.bytes_read

    all_lengths()
    n_graphs = session.info().n_graphs_built
    all_lengths()
    assert session.info().n_graphs_built == n_graphs
    assert session.info().arena_bytes == arena


def test_bytes_read_counts_what_is_copied(pair_of: Callable[[str], Pair]) -> None:
    session = open_pair(pair_of("qwen35"))
    rows = session.prefill([1, 2, 3])
    before = session.info().bytes_read
    rows.logits()
    assert session.info().bytes_read - before == 4 * session.model.n_vocab
    before = session.info().bytes_read
    session.take()
    assert session.info().bytes_read - before == session.info().recurrent_bytes


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_an_abandoned_round_leaves_no_trace(pair_of: Callable[[str], Pair], kind: str) -> None:
    """Cancelled between any two phases, by any way out of it."""
    session = open_pair(pair_of(kind))
    prompt = random_tokens(23)
    known = plain(session, prompt, 30)

    def to_the_end(root: int) -> list[int]:
        """The rest of the answer, drafting; the session stands just after `root`'s left side."""
        tokens = [root]
        while len(tokens) < 12:
            drafts = session.draft(tokens[-1], 5)[0][:, 0].tolist()
            tokens += run_round(session, tokens[-1], drafts)
        return tokens[:12]

    session.reset()
    session.prefill(prompt)
    session.draft(known[0], 4)  # drafted, never verified
    assert to_the_end(known[0]) == known[:12]

    session.reset()
    session.prefill(prompt)
    checkpoint = session.take()
    first = session.draft(known[0], 6)

    def abandoned() -> None:
        session.draft(known[0], 4)
        session.verify([known[0], 1, 2, 3])

    for way_out in (
        lambda: session.commit(0),
        lambda: session.restore(checkpoint),
        lambda: session.truncate(session.position),
        lambda: (session.reset(), session.prefill(prompt)),
    ):
        abandoned()
        assert session.position == len(prompt)
        way_out()
        assert session.position == len(prompt)
        session.commit(0)  # nothing is open any more
        again = session.draft(known[0], 6)
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_allclose(again[1], first[1], atol=1e-5)
        assert to_the_end(known[0]) == known[:12]
        session.commit(0)
        session.restore(checkpoint)
        assert to_the_end(known[0]) == known[:12]
        session.restore(checkpoint)


@pytest.mark.parametrize("kind", ["qwen3", "qwen35"])
def test_a_checkpoint_among_rounds(pair_of: Callable[[str], Pair], kind: str) -> None:
    """With features still pending, gone back to twice: equal drafts, equal tokens."""
    session = open_pair(pair_of(kind))
    prompt = random_tokens(40)
    known = plain(session, prompt, 90)
    random = np.random.default_rng(5).integers
    session.reset()
    session.prefill(prompt)
    assert run_round(session, known[0], known[1:6]) == known[1:7]
    checkpoint = session.take()

    def onward() -> tuple[list[int], list[list[int]]]:
        tokens, drafted = known[:7], []
        while len(tokens) < 60:
            drafted.append(session.draft(tokens[-1], 9)[0][:, 0].tolist())
            right = known[len(tokens) :][: int(random(9))]
            tokens += run_round(session, tokens[-1], [*right, 7])
        return tokens, drafted[:2]

    first = onward()
    assert first[0] == known[: len(first[0])]
    session.restore(checkpoint)
    assert session.position == checkpoint.position
    second = onward()
    assert second[0] == known[: len(second[0])]
    assert second[1][0] == first[1][0]


def test_the_end_of_the_context_inside_a_block(pair_of: Callable[[str], Pair]) -> None:
    session = open_pair(pair_of("qwen35"), n_ctx=32)
    known = plain(open_pair(pair_of("qwen35")), random_tokens(25), 10)
    session.prefill(random_tokens(25))
    assert run_round(session, known[0], known[1:3]) == known[1:4]
    with pytest.raises(Error, match=r"4 drafted tokens .* after 28 .* a context of 32"):
        session.draft(known[3], 4)
    session.draft(known[3], 3)
    with pytest.raises(Error, match="5 tokens after 28 do not fit into a context of 32"):
        session.verify(known[3:8])
    assert run_round(session, known[3], known[4:7]) == known[4:8]
    assert session.position == 32
    with pytest.raises(Error, match="do not fit into a context of 32"):
        session.verify([known[7]])
    with pytest.raises(Error, match="do not fit into a context of 32"):
        session.draft(known[7], 1)
    session.commit(0)
    assert session.position == 32


def test_rounds_out_of_order_are_refused_by_name(pair_of: Callable[[str], Pair]) -> None:
    session = open_pair(pair_of("qwen35"))
    session.prefill(random_tokens(5))
    with pytest.raises(Error, match="1 rows to commit, the open verify has 0"):
        session.commit(1)
    rows = session.verify([1, 2, 3])
    waiting = "a verify of 3 rows waits for its commit"
    with pytest.raises(Error, match=waiting):
        session.verify([1])
    with pytest.raises(Error, match=waiting):
        session.draft(1, 1)
    with pytest.raises(Error, match=waiting):
        session.prefill([1])
    with pytest.raises(Error, match=waiting):
        session.decode(1)
    with pytest.raises(Error, match="4 rows to commit, the open verify has 3"):
        session.commit(4)
    with pytest.raises(Error, match="-1 rows to commit"):
        session.commit(-1)
    with pytest.raises(Error, match="these rows are gone"):
        rows.argmax(0)
    session.commit(2)
    assert session.position == 7
    for n_draft in (0, 16, -1):
        with pytest.raises(Error, match=f"{n_draft} drafted tokens: the drafter gives 1 to 15"):
            session.draft(1, n_draft)
    for k in (0, 422, -1):
        with pytest.raises(Error, match=f"{k} candidates: the drafter chooses among 421"):
            session.draft(1, 2, k)
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        session.draft(421, 1)
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        session.verify([1, 421])
    with pytest.raises(Error, match="there are no tokens"):
        session.verify([])
    with pytest.raises(ValueError, match="need a list of integers"):
        session.verify([1.5])  # type: ignore[list-item]
    with pytest.raises(Error, match="17 rows to verify, there is room for 16"):
        session.verify([1] * 17)
    assert session.position == 7


def test_a_session_without_a_drafter_refuses_rounds(pair_of: Callable[[str], Pair]) -> None:
    session = Session(load_target(pair_of("llama").target))
    session.prefill([1])
    with pytest.raises(Error, match="has no drafter"):
        session.draft(1, 1)
    with pytest.raises(Error, match="1 rows to verify, there is room for 0"):
        session.verify([1])
    session.commit(0)
    assert session.position == 1
