"""Tests run by test_devices.py in a process with the device of fake_device.cpp.

The device computes with ggml's CPU kernels; host access to its memory ends the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import PRE_OF_KIND
from gguf_files import convert, edited, spoil
from half_right import HalfRight
from pairs import Pair, make_pair, random_tokens
from schedules import built_anew, play
from small_models import write_small, write_small_drafter
from synthetic_gguf import write_model
from synthetic_shapes import PRESETS

import dflash_gguf
from dflash_gguf.cli.command import main
from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.memory.plan import Planner, free_bytes, plan_of
from dflash_gguf.native import (
    BatchEntry,
    Drafter,
    DraftRequest,
    Engine,
    Error,
    Model,
    Rows,
    Sequence,
)

KINDS = ("llama", "qwen3moe", "qwen35")
N_TOKENS = 30
PROMPT = random_tokens(37)
CLOSE = 1e-5 * 6
"""Tolerance for logits from -3 to 3; a wrong layer changes them by more than 0.1."""
CPU: dict[str, Any] = {"n_gpu_layers": 0}
LACKING = {
    "llama": ("GLU,RMS_NORM", ["RMS_NORM", "SWIGLU"]),
    "qwen3moe": ("MUL_MAT_ID,TOP_K,ARGMAX", ["ARGMAX"]),
    "qwen35": ("GATED_DELTA_NET,SOLVE_TRI,SSM_CONV", ["SOLVE_TRI", "SSM_CONV"]),
}
"""Operations that the device lacks, and the ones that then run on the CPU, by kind.

Other operations have an alternative form; experts would be refused a place on the device."""


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda kind: make_pair(tmp_path_factory.mktemp(kind), kind, block_size=8))


def places(n_layer: int, experts: bool) -> list[dict[str, Any]]:
    layers = [{"n_gpu_layers": n} for n in range(1, n_layer + 2)]
    stay = [{"n_cpu_moe": n} for n in range(1, n_layer + 1)] if experts else []
    return [*layers, *stay, *([{"n_gpu_layers": 2, "n_cpu_moe": n_layer}] if experts else [])]


def config_of(place: dict[str, Any]) -> LoadConfig:
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    sizes = {"n_ctx": 256, "n_ubatch": 16, "draft_window": 30}
    return LoadConfig(n_threads=1, **sizes, **exact, **place)


def open_decoder(pair: Pair, place: dict[str, Any]) -> Decoder:
    config = config_of(place)
    model = Model(str(pair.target), config)
    sequence = Sequence(Engine(model, None, Drafter(str(pair.drafter), model), config.draft_window))
    return Decoder(sequence, None)


def plain(decoder: Decoder) -> list[int]:
    return list(decoder.generate(PROMPT, draft="none", max_tokens=N_TOKENS).tokens)


def check_law(decoder: Decoder, expected: list[int], patch: pytest.MonkeyPatch) -> None:
    """Compares plain, chain and tree answers of two proposers with `expected`."""
    assert plain(decoder) == expected
    known = HalfRight(
        expected,
        len(PROMPT),
        lambda r: 1 + 3 * r % 7,
        width=2,
        rank=lambda i: i // 3 % 2,
        n_vocab=decoder.model.n_vocab,
    )
    for draft, proposer in (("chain", None), ("tree", None), ("chain", known), ("tree", known)):
        with patch.context() as patched:
            if proposer is not None:
                patched.setattr(decoder._speculative, "proposers", [proposer])
            found = decoder.generate(PROMPT, draft=draft, max_tokens=N_TOKENS)
        assert list(found.tokens) == expected
        assert proposer is None or found.rounds < N_TOKENS - 5


@pytest.mark.parametrize("kind", [*KINDS, "qwen3next", "gemma4moe", "gemma4e"])
def test_every_split(
    pair_of: Callable[[str], Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_decoder(pair_of(kind), CPU) as decoder:
        expected, logits = plain(decoder), decoder.logits(PROMPT)
        n_layer = decoder.model.n_layer
    on_device = []
    # ggml computes GELU by a table of F16 values.
    close = 1e-2 * np.ptp(logits) if kind.startswith("gemma4") else CLOSE
    for place in places(n_layer, kind.endswith("moe")):
        with open_decoder(pair_of(kind), place) as decoder:
            assert decoder.model.backend == "Fake0"
            # Own CPU code for recurrent layers differs by 3e-6; other layers are equal.
            np.testing.assert_allclose(decoder.logits(PROMPT), logits, rtol=0, atol=close)
            check_law(decoder, expected, monkeypatch)
            assert decoder.engine.cpu_operations == []
            on_device.append(decoder.model.device_bytes)
    by_layers, by_experts = on_device[: n_layer + 1], on_device[n_layer + 1 :]
    assert sorted(set(by_layers)) == by_layers
    assert all(x < by_layers[-1] for x in by_experts)


def rows_read(n: int, place: dict[str, Any]) -> int:
    """Returns the bucketed rows of an n-row verify; split graphs have no buckets."""
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24) if place["n_gpu_layers"] is None else range(1, 25)
    return next(size for size in sizes if size >= n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [{"n_gpu_layers": None}, {"n_gpu_layers": 2}])
def test_draws_copy_the_best_of_a_row_and_no_more(
    pair_of: Callable[[str], Pair],
    kind: str,
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads back 64 candidates and four numbers per row, and 12 bytes per drafted candidate.

    The first answer also copies two recurrent states, at the end of the prompt and of the answer.
    Results of a pass or a draft, at most 12, are padded to whole lines of 64 bytes.
    """
    way: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": N_TOKENS}
    with open_decoder(pair_of(kind), CPU) as decoder:
        expected = decoder.generate(PROMPT, draft="none", **way).tokens
        all_of_it = decoder.generate(PROMPT, draft="none", top_k=0, **way).tokens
    with open_decoder(pair_of(kind), place) as decoder:
        n_drafted_best = 0
        draft_of = decoder.engine.draft

        def counted(requests: list[Any], k: int = 1, drafter: int = 0) -> Any:
            nonlocal n_drafted_best
            n_drafted_best += k * sum(request.n_draft for request in requests)
            return draft_of(requests, k, drafter)

        monkeypatch.setattr(decoder.engine, "draft", counted)
        for draft, n_states in (("none", 2), ("chain", 0), ("tree", 0)):
            before, n_drafted_best = decoder.engine.info().bytes_read, 0
            steps = list(decoder.stream(PROMPT, draft=draft, **way))
            assert tuple(token for step in steps for token in step.tokens) == tuple(expected)
            n_rows = sum(rows_read(1 + step.n_drafted, place) for step in steps)
            picked = (8 * 64 + 16) * n_rows + 12 * n_drafted_best
            kept = n_states * decoder.engine.bytes_of("recurrent")
            n_read = decoder.engine.info().bytes_read - before
            assert 0 <= n_read - picked - kept <= 12 * 64 * (len(steps) + 1)
            assert (n_drafted_best > 0) == (draft != "none")
        assert decoder.generate(PROMPT, draft="tree", top_k=0, **way).tokens == all_of_it
        with pytest.raises(Error, match="k is 65, expected 0 to 64"):
            decoder.engine.set_top_k(65)


@pytest.mark.parametrize("draft", ["none", "chain", "tree"])
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"presence_penalty": 1.5, "repeat_penalty": 1.1, "ignore_eos": True}, "no row"),
        ({"temperature": 0.0, "repeat_penalty": 1.1, "logit_bias": {5: -1.0}}, "no row"),
        ({"n_probs": 3}, "a row a token"),
        ({"top_k": 0}, "all rows"),
        ({"repeat_penalty": 0.9}, "all rows"),
    ],
)
def test_whole_rows_are_read_only_if_needed_and_once_a_round(
    pair_of: Callable[[str], Pair],
    settings: dict[str, Any],
    wanted: str,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": N_TOKENS, "top_k": 20}
    way |= settings
    with open_decoder(pair_of("llama"), CPU) as decoder:
        expected = decoder.generate(PROMPT, draft="none", **way)
    with open_decoder(pair_of("llama"), {"n_gpu_layers": None}) as decoder:
        engine = decoder.engine
        reads: list[int] = []

        def read_in(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def run(those: Any) -> Any:
                before = engine.info().bytes_read
                result = call(those)
                reads.extend(filter(None, [engine.info().bytes_read - before]))
                return result

            return run

        monkeypatch.setattr(engine, "sample", read_in(engine.sample))
        gather = Rows.gather
        monkeypatch.setattr(Rows, "gather", lambda rows, at: read_in(partial(gather, rows))(at))
        steps = list(decoder.stream(PROMPT, draft=draft, **way))
        assert [token for step in steps for token in step.tokens] == list(expected.tokens)
        row = 4 * decoder.model.n_vocab
        # The lists of best logits are copied with the results of each pass.
        whole = {
            "no row": [],
            "a row a token": [row * len(step.tokens) for step in steps],
            "all rows": [row * (1 + step.n_drafted) for step in steps],
        }
        assert reads == whole[wanted]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_rounds_on_it_need_few_graphs(pair_of: Callable[[str], Pair], kind: str) -> None:
    with open_decoder(pair_of(kind), {"n_gpu_layers": None}) as decoder:
        sequence = decoder.sequence
        sequence.engine.reserve_verify(16)
        arena = sequence.engine.bytes_of("arena")

        def rounds() -> None:
            for length in range(8):
                sequence.draft(1, 7)
                sequence.verify_tree([1] * 8, list(range(-1, 7)))
                sequence.commit_path(list(range(length)))
                sequence.verify_tree([1] * (9 + length), [-1, *[0] * (8 + length)])
                sequence.commit_path([0, 1 + length])

        sequence.prefill(PROMPT)
        rounds()
        n_built = sequence.engine.info().n_graphs_built
        assert n_built < 24
        rounds()
        assert sequence.engine.info().n_graphs_built == n_built
        assert sequence.engine.bytes_of("arena") == arena


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_joins_and_leaves_need_few_graphs(pair_of: Callable[[str], Pair], kind: str) -> None:
    """Slots, lengths, cells and node updates of sequences must be graph inputs, not constants."""
    pair = pair_of(kind)
    config = replace(config_of({}), n_ctx=2048, n_ubatch=64, n_parallel=6)
    model = Model(str(pair.target), config)
    engine = Engine(model, None, Drafter(str(pair.drafter), model))
    with Decoder(Sequence(engine), None) as many, open_decoder(pair, CPU) as alone:
        counts = play(many, alone, seed=2, n_passes=800, most_prompt=100, draft="none")
        assert built_anew(counts, 300) <= 0.05
        n_nodes = engine.info().n_graph_nodes
        for draft in ("chain", "tree"):
            counts = play(many, alone, seed=3, n_passes=1600, most_prompt=100, draft=draft)
            assert built_anew(counts, 600) <= 0.05
        assert engine.info().n_graph_nodes <= max(n_nodes, engine.model.n_layer * 250)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_rounds_of_a_split_keep_their_graphs(pair_of: Callable[[str], Pair], kind: str) -> None:
    with open_decoder(pair_of(kind), {"n_gpu_layers": 2}) as decoder:
        sequence = decoder.sequence
        arena = sequence.engine.bytes_of("arena")
        sequence.prefill(PROMPT)

        def rounds(n: int) -> None:
            for _ in range(n):
                sequence.draft(1, 7)
                sequence.verify_tree([1] * 8, list(range(-1, 7)))
                sequence.commit_path([0, 1, 2])

        rounds(2)
        n_built = sequence.engine.info().n_graphs_built
        rounds(8)
        assert sequence.engine.info().n_graphs_built == n_built
        assert sequence.engine.bytes_of("arena") == arena


def test_a_verify_copies_no_states_of_layers_on_the_cpu(pair_of: Callable[[str], Pair]) -> None:
    """As ggml counts rows times heads as rows, it would compute these layers on the device."""
    copied = {}
    with open_decoder(pair_of("qwen35"), {"n_gpu_layers": 2}) as decoder:
        decoder.engine.reserve_verify(16)
        decoder.sequence.prefill(PROMPT)
        for n_rows in (1, 16):
            before = device_count("fake_in_bytes")
            decoder.sequence.verify_tree([1] * n_rows, list(range(-1, n_rows - 1)))
            decoder.sequence.commit_path([0])
            copied[n_rows] = device_count("fake_in_bytes") - before
    assert copied[16] < 2 * 16 * copied[1]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_quantised_layers_beside_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's layers are repacked, so that the split graph has nodes with our own kernels."""
    whole = make_pair(tmp_path, kind, {"hidden_size": 128, "intermediate_size": 256}, block_size=8)
    target = convert(whole.target_dir, tmp_path / "q8_0.gguf", "q8_0", PRE_OF_KIND[kind])
    with open_decoder(replace(whole, target=target), {"n_gpu_layers": 2}) as decoder:
        assert {"Fake0"} < set(decoder.model.kernels)
        check_law(decoder, plain(decoder), monkeypatch)


@pytest.mark.parametrize("kind", [*KINDS, "gemma4e"])
@pytest.mark.parametrize("place", [{"n_gpu_layers": None}, {"n_gpu_layers": 2}])
def test_a_drafter_on_the_cpu(
    pair_of: Callable[[str], Pair],
    kind: str,
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts on the CPU are those on the device, also after a cached prefix."""
    way: dict[str, Any] = {"draft": "chain", "max_tokens": N_TOKENS}
    with open_decoder(pair_of(kind), place) as decoder:
        expected, drafted = plain(decoder), decoder.generate(PROMPT, **way)
        assert decoder.engine.drafters[0].cpu_split_bytes == 0
    with open_decoder(pair_of(kind), {**place, "draft_gpu_layers": 0}) as decoder:
        (drafter,) = decoder.engine.drafters
        assert drafter.copied_bytes == drafter.cpu_split_bytes
        assert drafter.cpu_split_bytes + drafter.mapped_bytes > 0
        assert ("draft", "CPU") in [(x.name, x.place) for x in decoder.engine.memory()]
        for _ in range(2):
            found = decoder.generate(PROMPT, **way)
            assert found.tokens == drafted.tokens
            assert found.n_accepted == drafted.n_accepted
        check_law(decoder, expected, monkeypatch)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a 27B hybrid, 15.1 GB, and a drafter, 1.0 GB, without weights."""
    target, drafter = (tmp_path_factory.mktemp("27b") / x for x in ("x.gguf", "d.gguf"))
    write_model(target, PRESETS["qwen35-27b"], "x", "q4_k_m", 1, header_only=True)
    write_model(drafter, PRESETS["qwen35-27b-dflash"], "d", "q4_k_m", 1, target, header_only=True)
    return target, drafter


@pytest.mark.parametrize(
    ("gib", "options", "wanted"),
    [
        (24, {}, (None, None)),  # room for both
        (16.3, {}, (None, 0)),  # room for the target alone
        (16.3, {"draft_gpu_layers": 99}, (..., 99)),
        (16.3, {"n_gpu_layers": 40}, (40, None)),
    ],
)
def test_the_drafter_goes_where_it_is_predicted_to_be_faster(
    headers: tuple[Path, Path],
    gib: float,
    options: dict[str, Any],
    wanted: tuple[Any, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_DEVICE_MIB", str(int(gib * 1024)))
    monkeypatch.setattr(
        "dflash_gguf.memory.plan.free_bytes",
        lambda device: 64 << 30 if device == "CPU" else free_bytes(device),
    )
    target, drafter = headers
    best = dflash_gguf.fit(target, drafter=drafter, n_ctx=8192, **options)
    layers, draft_layers = best.config.n_gpu_layers, best.config.draft_gpu_layers
    assert draft_layers == wanted[1]
    assert layers == wanted[0] or (wanted[0] is ... and 0 < layers < 65)
    assert best.uses_drafter and not best.plan.missing_bytes
    on_gpu, on_cpu = (f"the drafter on the {x}: about" for x in ("GPU", "CPU"))
    if wanted == (None, 0):
        speeds = best.reason
        assert 0 <= speeds.index(on_cpu) < speeds.index(on_gpu)
        assert "no drafter: about" in speeds


def test_a_drafter_that_only_takes_room_is_left_out(
    headers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICE_MIB", str(8 << 10))
    monkeypatch.setattr(
        "dflash_gguf.memory.plan.free_bytes",
        lambda device: 64 << 30 if device == "CPU" else free_bytes(device),
    )
    target, drafter = headers
    with_it = dflash_gguf.fit(target, drafter=drafter, n_ctx=8192)
    monkeypatch.setattr("dflash_gguf.memory.speed.ACCEPTANCE", 0.0)
    without = dflash_gguf.fit(target, drafter=drafter, n_ctx=8192, draft_gpu_layers=99)
    assert with_it.uses_drafter and not without.uses_drafter
    assert without.config.n_gpu_layers > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_what_a_split_allocates(pair_of: Callable[[str], Pair], kind: str) -> None:
    pair = pair_of(kind)
    for place in ({}, {"n_gpu_layers": 2}, {"n_cpu_moe": 1}, {"draft_gpu_layers": 0}):
        config = config_of(place)
        planned = Planner(pair.target, pair.drafter, config).plan(verify_rows=40)
        with open_decoder(pair, place) as decoder:
            decoder.engine.reserve_verify(40)
            real = plan_of(decoder.engine, config, planned.free_bytes)
            rounds = decoder.generate(PROMPT, draft="tree", tree_budget=39, max_tokens=N_TOKENS)
            after = plan_of(decoder.engine, config, planned.free_bytes)
        assert planned.items == real.items
        assert after == real, "decoding took more"
        assert rounds.n_drafted
        assert planned.total("host") > 0 or "n_gpu_layers" not in place


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_lacks_the_cpu_computes(
    pair_of: Callable[[str], Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks, by_cpu = LACKING[kind]
    place = {"n_cpu_moe": 9}
    with open_decoder(pair_of(kind), CPU) as decoder:
        expected = plain(decoder)
    monkeypatch.setenv("FAKE_DEVICE_LACKS", lacks)
    with open_decoder(pair_of(kind), place) as decoder:
        check_law(decoder, expected, monkeypatch)
        assert decoder.engine.cpu_operations == by_cpu


def test_draws_among_what_is_no_number_are_refused(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = pair_of("llama")
    target = edited(pair.target, tmp_path / "nan.gguf", spoil("output_norm.weight", np.nan, 3))
    with open_decoder(replace(pair, target=target), {}) as decoder:
        for draft in ("none", "tree"):
            with pytest.raises(Error, match="the logits of row 0 are not finite numbers"):
                decoder.generate(PROMPT, draft=draft, temperature=0.9, max_tokens=4)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
@pytest.mark.parametrize("place", [{"n_gpu_layers": None}, {"n_gpu_layers": 2}])
def test_what_is_not_finite_leaves_nothing_behind(
    pair_of: Callable[[str], Pair], kind: str, place: dict[str, Any], tmp_path: Path
) -> None:
    bad = next(token for token in range(300) if token not in PROMPT)
    edit = spoil("token_embd.weight", np.nan, bad)
    pair = pair_of(kind)
    pair = replace(pair, target=edited(pair.target, tmp_path / "nan.gguf", edit))
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"repeat_penalty": 1.2}]
    with open_decoder(pair, place) as decoder:
        for draft in ("none", "chain"):
            for way in ways:
                settings = {"draft": draft, "seed": 2, "max_tokens": 9, **way}
                decoder.reset()
                expected = decoder.generate(PROMPT, **settings).tokens
                with pytest.raises(Error, match="the logits of row 0 are not finite numbers"):
                    decoder.generate([*PROMPT, bad, *PROMPT * 2], **settings)
                assert decoder.sequence.position == 0
                assert decoder.generate(PROMPT, **settings).tokens == expected
        sequence = decoder.sequence
        sequence.reset()
        sequence.prefill(PROMPT).argmax()
        for _ in range(2):
            rows = sequence.verify([7, 8, bad, 9])
            assert np.isfinite(rows.logits(0)).all()
            sequence.commit(2)
        sequence.reset()
        assert np.isfinite(sequence.prefill(PROMPT * 2).logits()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [{"n_gpu_layers": None}, {"n_gpu_layers": 2}])
def test_prefixes_are_copied(
    pair_of: Callable[[str], Pair], kind: str, place: dict[str, Any]
) -> None:
    model = Model(str(pair_of(kind).target), config_of(place))
    device = Sequence(Engine(model, None, Drafter(str(pair_of(kind).drafter), model)))
    tokens = PROMPT * 5
    device.prefill(tokens[:-9]).argmax()
    prefix = device.snapshot()
    rows = [device.decode(token).logits() for token in tokens[-9:]]
    draft = device.draft(5, 3, 4)
    for n in (len(tokens) - 9, len(tokens) - 30):
        if n < prefix.n_tokens and not device.engine.partial_prefix_ok:
            continue
        device.reset()
        device.attach(prefix, n)
        assert (device.tokens == tokens[:n]).all()
        if n < prefix.n_tokens:
            device.prefill(tokens[n:-9]).argmax()
        found = [device.decode(token).logits() for token in tokens[-9:]]
        np.testing.assert_allclose(found, rows, atol=CLOSE)
        np.testing.assert_allclose(device.draft(5, 3, 4).logits, draft.logits, atol=CLOSE)
    prefix.close()
    assert device.engine.prefix_bytes == 0


def device_count(name: str) -> int:
    count = getattr(ctypes.CDLL(os.environ["GGML_BACKEND_PATH"]), name)
    count.restype = ctypes.c_uint64
    return int(count())


def kv_bytes() -> int:
    """Returns the bytes of K and V, with the drafter's, copied to or from the host so far."""
    return device_count("fake_kv_bytes")


@pytest.mark.parametrize("kind", [*KINDS, "gemma4"])
def test_a_conversation_goes_on_where_its_rows_lie(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    """Cells are copied to the host only when others need them, and restored without loss."""
    config = replace(config_of({}), n_ctx=512, n_parallel=2, draft_window=512)
    pair = pair_of(kind)
    model = Model(str(pair.target), config)
    decoder, alone = (
        Decoder(Sequence(Engine(model, None, Drafter(str(pair.drafter), model))), None)
        for _ in range(2)
    )
    way: dict[str, Any] = {"max_tokens": 25, "temperature": 0.8, "ignore_eos": True}

    def check(prompt: list[int], n_cached: int, draft: str) -> tuple[list[int], int]:
        """Compares an answer with plain decoding; returns its text and the copied K/V bytes."""
        alone.reset()
        expected = alone.generate(prompt, draft="none", seed=len(prompt), **way)
        before = kv_bytes()
        found = decoder.generate(prompt, draft=draft, seed=len(prompt), **way)
        assert found.tokens == expected.tokens
        assert found.n_cached == n_cached
        return [*prompt, *found.tokens], kv_bytes() - before

    with decoder, alone:
        text, copied = check(random_tokens(90, seed=1), 0, "tree")
        row = sum(decoder.engine.bytes_of(name) for name in ("kv", "draft")) / config.n_ctx
        for turn in range(3):
            assert not copied
            more = random_tokens(10 + turn, seed=2 + turn)
            text, copied = check([*text, *more], len(text) - 1, ("chain", "tree", "none")[turn])
        assert not copied
        again = text[:-25]
        text, copied = check(again, len(again) - 1, "tree")
        assert 0 < copied < 130 * row
        other, copied = check(random_tokens(60, seed=9), 0, "tree")
        assert not copied
        big, copied = check(random_tokens(380, seed=7), 0, "chain")
        assert copied > len(text) * decoder.engine.cell_bytes
        for known in (text, other, big):
            check([*known, *random_tokens(4, seed=len(known))], len(known) - 1, "tree")
        decoder.reset()
        assert (decoder.engine.prefix_bytes, decoder.engine.n_free_cells) == (0, 512)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_what_is_not_finite_stays_with_its_sequence(
    pair_of: Callable[[str], Pair], kind: str, tmp_path: Path
) -> None:
    bad = 299
    edit = spoil("token_embd.weight", np.nan, bad)
    target = edited(pair_of(kind).target, tmp_path / "nan.gguf", edit)
    engine = Engine(Model(str(target), replace(config_of({}), n_parallel=4)))
    cpu = Engine(Model(str(target), replace(config_of(CPU), n_parallel=4)))
    tokens = [[token % bad for token in random_tokens(9 + i, seed=i)] for i in range(4)]
    there, here = ([Sequence(x) for _ in tokens] for x in (engine, cpu))
    for side in (there, here):
        for sequence, prompt in zip(side, tokens, strict=True):
            sequence.prefill(prompt)

    def go_on(others: list[int], spoiled: list[int]) -> None:
        items = [BatchEntry(there[i], [i]) for i in others]
        rows = engine.run([*items, BatchEntry(there[1], spoiled)] if spoiled else items)
        for i, row in zip(others, rows, strict=False):
            expected = here[i].decode(i).logits()
            np.testing.assert_allclose(row.logits(), expected, rtol=0, atol=CLOSE)
        if spoiled:
            with pytest.raises(Error, match="the logits of row 0 are not finite numbers"):
                rows[-1].argmax()

    go_on([3], [bad])
    go_on([0, 2], [])
    go_on([0, 3], [3, bad, 4])
    go_on([2], [])
    go_on([0, 2, 3], [])


EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 48, 49, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_at_their_edges(pair_of: Callable[[str], Pair], kind: str) -> None:
    random = np.random.default_rng(6)
    close = 3 * CLOSE
    config = replace(config_of({}), n_ctx=1200, n_ubatch=64)
    pair = pair_of(kind)
    model = Model(str(pair.target), config)
    device = Sequence(Engine(model, None, Drafter(str(pair.drafter), model), 30))
    cpu = Sequence(Engine(Model(str(pair.target), replace(config, n_gpu_layers=0))))
    tokens = random.integers(0, 300, 500).tolist()
    device.prefill(tokens)
    cpu.prefill(tokens)
    device.engine.reserve_verify(64)

    def follow(n_rows: int, n_path: int) -> None:
        nodes = random.integers(0, 300, n_rows).tolist()
        device.draft(nodes[0], min(n_path, device.max_draft), 3)  # injects pending features
        rows = device.verify(nodes)
        for node in range(n_path):
            expected = cpu.decode(nodes[node]).logits()
            np.testing.assert_allclose(rows.logits(node), expected, rtol=0, atol=close)
        device.commit(n_path)

    for n in EDGES:
        follow(n, min(n, 17))
    for n in range(1, 18):
        follow(17, n)
    assert cpu.position < 1010
    rest = random.integers(0, 300, 1020 - cpu.position).tolist()
    device.prefill(rest)
    cpu.prefill(rest)
    for n in (1, 2, 3, 4, 8):
        follow(n, n)
    a, b = (x.decode(5).logits() for x in (device, cpu))
    np.testing.assert_allclose(a, b, rtol=0, atol=close)


def test_it_does_not_select_among_what_is_no_number(
    pair_of: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama")
    drafter = edited(pair.drafter, tmp_path / "nan.gguf", spoil("enc.output_norm.weight", np.nan))
    monkeypatch.setenv("FAKE_DEVICE_MISLEADS", "1")
    with open_decoder(replace(pair, drafter=drafter), {}) as decoder:
        decoder.sequence.prefill(PROMPT)
        assert not np.isfinite(decoder.sequence.draft(9, 4, 5).log_sum_exp).any()


def test_products_that_share_a_matrix_are_done_without(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vulkan lacks such products: key heads are copied then, and no layer moves to the CPU."""
    pair = pair_of("qwen35")
    with open_decoder(pair, CPU) as decoder:
        expected, logits = plain(decoder), decoder.logits(PROMPT)
    monkeypatch.setenv("FAKE_DEVICE_LACKS", "SHARED_MATRIX")
    with open_decoder(pair, {}) as decoder:
        np.testing.assert_allclose(decoder.logits(PROMPT), logits, rtol=0, atol=CLOSE)
        check_law(decoder, expected, monkeypatch)
        assert decoder.engine.cpu_operations == []


def test_it_is_said_once(
    pair_of: Callable[[str], Pair],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["-m", str(pair_of("llama").target), "--tokens", "1,2,3", "-n", "2", "--no-perf"]
    assert main(command) == 0
    assert "lacks" not in capsys.readouterr().err
    monkeypatch.setenv("FAKE_DEVICE_LACKS", "GLU")
    assert main(command) == 0
    assert capsys.readouterr().err.count("Fake0 lacks SWIGLU: the CPU computes that\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("FAKE_DEVICE_LACKS", "SET_ROWS", "do not work on Fake0 .*; no others do"),
        ("FAKE_DEVICE_LACKS", "MUL_MAT", "device Fake0 cannot multiply with tensor"),
        ("FAKE_DEVICE_MIB", "0", "Fake0 has 0 MiB free"),
    ],
)
def test_what_it_cannot_do_without_is_said(
    pair_of: Callable[[str], Pair],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Error, match=sentence):
        open_decoder(pair_of("llama"), {})


def test_a_hypothetical_gpu_takes_about_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans for a hypothetical and a present GPU agree: a 27B hybrid, half of it on the CPU."""
    monkeypatch.setenv("FAKE_DEVICE_MIB", str(64 << 10))
    path = tmp_path / "x.gguf"
    write_model(path, PRESETS["qwen35-27b"], "x", "q4_k_m", 1, header_only=True)
    config = LoadConfig(n_ctx=32768, n_gpu_layers=33)
    here = Planner(path, None, config).plan()
    monkeypatch.setenv("FAKE_DEVICE_MIB", "0")
    config = LoadConfig(n_ctx=32768, n_gpu_layers=33, device="CPU")
    there = Planner(path, None, config, vram=64 << 30).plan()
    assert (here.device, there.device) == ("Fake0", "a hypothetical CUDA GPU")
    estimates = sum(x.bytes for x in there.items if x.name.endswith(", about"))
    assert there.needed_bytes - estimates == pytest.approx(here.needed_bytes, rel=0.03)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4", "gemma4e"])
@pytest.mark.parametrize("place", [{}, {"n_gpu_layers": 2}])
def test_windows_leave_what_is_behind_them(
    pair_of: Callable[[str], Pair], kind: str, place: dict[str, Any]
) -> None:
    """Accepted rows of trees stay in place while windows slide over them, forwards and back."""
    random = np.random.default_rng(8)
    config = replace(config_of(place), n_ctx=1200, n_ubatch=64)
    pair = pair_of(kind)
    model = Model(str(pair.target), config)
    device = Sequence(Engine(model, None, Drafter(str(pair.drafter), model), 30))
    cpu = Sequence(Engine(Model(str(pair.target), replace(config, **CPU))))
    assert not device.engine.partial_prefix_ok and not cpu.engine.partial_prefix_ok
    device.engine.reserve_verify(24)
    tokens: list[int] = []
    close = 0.0

    def check(row: Any, expected: list[int]) -> None:
        nonlocal close
        cpu.reset()
        found = cpu.prefill(expected).logits()
        # ggml computes GELU by a table of F16 values.
        close = close or (1e-2 * np.ptp(found) if kind.startswith("gemma4") else 5 * CLOSE)
        np.testing.assert_allclose(row, found, rtol=0, atol=close)

    def go_on(until: int) -> None:
        while len(tokens) < until:
            nodes = random.integers(0, 300, int(random.integers(2, 25))).tolist()
            parents = [-1, *(int(random.integers(i)) for i in range(1, len(nodes)))]
            rows = device.verify_tree(nodes, parents)
            path = [int(random.integers(len(nodes)))]
            while path[0]:
                path = [parents[path[0]], *path]
            check(rows.logits(path[-1]), [*tokens, *(nodes[i] for i in path)])
            device.commit_path(path)
            tokens.extend(nodes[i] for i in path)

    prompt = random.integers(0, 300, 333).tolist()
    device.prefill(prompt[:-1]).argmax()
    kept = device.snapshot()
    check(device.prefill(prompt[-1:]).logits(), prompt)
    tokens = list(prompt)
    go_on(600)
    other, at = device.snapshot(), list(tokens)
    go_on(900)
    device.attach(other, other.n_tokens)
    tokens = at
    go_on(800)
    device.attach(kept, 332)
    check(device.prefill(prompt[332:]).logits(), prompt)
    tokens = list(prompt)
    go_on(500)
    device.reset()
    check(device.prefill(prompt[:200]).logits(), prompt[:200])


def test_a_prompt_beside_verifies_has_masks_for_all_rows(pair_of: Callable[[str], Pair]) -> None:
    """One pass may hold a full micro-batch of prompt tokens and verifies."""
    config = replace(config_of({}), n_parallel=2)
    engine = Engine(Model(str(pair_of("llama").target), config))
    cpu = Sequence(Engine(Model(str(pair_of("llama").target), replace(config, **CPU))))
    engine.reserve_verify(20)
    a, b = Sequence(engine), Sequence(engine)
    a.prefill(PROMPT)
    b.prefill(PROMPT)
    for _ in range(10):
        rows = engine.run([BatchEntry(a, [1] * 6), BatchEntry(b, [2] * 20, is_verify=True)])
        engine.commit([(b, 2)])
    expected = cpu.prefill([*PROMPT, *[1] * 60]).logits()
    np.testing.assert_allclose(rows[0].logits(), expected, rtol=0, atol=CLOSE)
    c = engine.run([BatchEntry(a, [1] * 16), BatchEntry(b, [2] * 20, is_verify=True)])
    expected = cpu.prefill([1] * 16).logits()
    np.testing.assert_allclose(c[0].logits(), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("place", [{}, CPU])
def test_a_drafter_sees_all_of_a_prompt_that_came_in_beside_verifies(
    pair_of: Callable[[str], Pair], place: dict[str, Any]
) -> None:
    """Padding rows of a pass must not overwrite features."""
    pair = pair_of("llama")
    config = replace(config_of(place), n_parallel=2)
    model = Model(str(pair.target), config)
    engine = Engine(model, None, Drafter(str(pair.drafter), model), config.draft_window)
    a, b = Sequence(engine), Sequence(engine)
    for n_prompt in (5, 9, 14):
        a.prefill(PROMPT[:n_prompt])
        (expected,) = engine.draft([DraftRequest(a, 7, 6)], k=8)
        a.reset()
        b.prefill(PROMPT)
        for n_verified in (3, 6):
            items = [
                BatchEntry(a, PROMPT[:n_prompt]),
                BatchEntry(b, [2] * n_verified, is_verify=True),
            ]
            engine.run(items)
            engine.commit([(b, 1)])
            (found,) = engine.draft([DraftRequest(a, 7, 6)], k=8)
            np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=CLOSE)
            a.reset()
        b.reset()


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_constrained_answers_are_the_same_with_and_without_drafts(
    tmp_path: Path, kind: str
) -> None:
    """Samples from the best logits of a row, and from whole rows where these are all forbidden."""
    target = write_small(tmp_path / "target.gguf", kind, "f32")
    drafter = write_small_drafter(tmp_path / "drafter.gguf", kind, "f32", target, "f32")
    schema = {"type": "array", "items": {"enum": ["ab", 17, None]}, "minItems": 3, "maxItems": 5}
    with dflash_gguf.load(target, drafter=drafter, n_ctx=512) as decoder:
        assert decoder.model.backend == "Fake0"
        for number, constraint in enumerate(
            ({"json_schema": schema}, {"regex": "(word[0-9]|[a-f]{2}){6,12}"})
        ):
            settings: dict[str, Any] = {"max_tokens": 60, "seed": number, **constraint}
            for sampling in ({}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 5}):
                texts = [
                    decoder.generate(list(range(9)), draft=draft, **settings, **sampling)
                    for draft in ("none", "chain", "tree", "auto")
                ]
                assert len({found.tokens for found in texts}) == 1
                assert texts[0].stop_reason == "token"
