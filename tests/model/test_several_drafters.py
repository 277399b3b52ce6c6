"""Several drafters at once: a DFlash drafter and an MTP layer beside the suffix index."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_drafter
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from mtp_pairs import make_mtp, trained
from pairs import Pair, convert_drafter, load_target, make_pair, overfit, random_tokens

import dflash_gguf
from dflash_gguf.config import DecodeConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Drafter, DraftRequest, Engine, Sequence

N_TOKENS = 120
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 5},
    "penalised": {"temperature": 0.3, "seed": 6, "repeat_penalty": 1.1, "logit_bias": {7: -2.0}},
}
TYPES = ("dflash", "mtp", "suffix")


def with_drafter(folder: Path, pair: Pair, name: str = "dflash") -> Pair:
    """Adds a random DFlash drafter to a target with an MTP layer."""
    directory = make_drafter(folder / name, pair.target_dir, block_size=8)
    file = convert_drafter(directory, pair.target_dir, folder / f"{name}.gguf", "qwen35")
    return Pair(pair.target_dir, directory, pair.target, file)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[int]]:
    """A target whose MTP layer and whose DFlash drafter both know its greedy answer."""
    folder = tmp_path_factory.mktemp("several")
    pair, text = trained(folder)
    pair = with_drafter(folder, pair)
    return overfit(pair, "qwen35", folder / "learned.gguf", text[:1], text[1:]), text


def opened(pair: Pair, **options: Any) -> Decoder:
    files = [pair.drafter, pair.target]
    return dflash_gguf.load(pair.target, drafter=files, **{**OPTIONS, **options})


@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_text_is_that_of_plain_decoding(known: tuple[Pair, list[int]], name: str) -> None:
    pair, text = known
    settings = {"max_tokens": N_TOKENS, "ignore_eos": True, **SETTINGS[name]}
    chosen = [x for n in (1, 2, 3) for x in itertools.combinations(TYPES, n)]
    with opened(pair) as decoder:
        plain = decoder.generate(text[:1], draft="none", **settings)
        for draft, types in itertools.product(("chain", "tree", "auto"), chosen):
            found = decoder.generate(text[:1], draft=draft, draft_type=types, **settings)
            assert found.tokens == plain.tokens
            assert found.candidates_by_proposer.keys() <= set(types)
        assert found.drafter == f"{pair.drafter.name} + {pair.target.name}"
        assert {x for x, n in (found.drafter_kernels or {}).items() if n}


def test_answers_of_several_requests_and_found_prefixes(known: tuple[Pair, list[int]]) -> None:
    pair, text = known
    prompts = [text[:1], text[:40], random_tokens(9), text[:40] + random_tokens(5)]
    config = DecodeConfig(max_tokens=60, ignore_eos=True)
    with opened(pair, n_parallel=4) as decoder:
        plain = [decoder.generate(prompt, config, draft="none").tokens for prompt in prompts]
        for draft, types in itertools.product(("chain", "tree", "auto"), (None, ("dflash", "mtp"))):
            found = decoder.generate_batch(prompts, replace(config, draft=draft, draft_type=types))
            assert [x.tokens for x in found] == plain
        assert any(x.n_cached for x in found)


def test_drafts_of_each_equal_those_of_a_drafter_alone(known: tuple[Pair, list[int]]) -> None:
    """Each drafter keeps its own K/V, also while the other drafts and where a prefix is found."""
    pair, text = known
    model = load_target(pair.target)
    config = replace(model.config, n_parallel=2)
    drafters = [Drafter(str(x), model) for x in (pair.drafter, pair.target)]
    engines = [Engine(model, drafter=x, config=config) for x in (drafters, *drafters)]
    both, *alone = [[Sequence(engine) for _ in range(2)] for engine in engines]
    for n, number in zip((3, 40), range(2), strict=True):
        for sequences in (both, *alone):
            sequences[number].prefill(text[:n])
    for number in range(12):
        for index in (number % 2, 1 - number % 2) if number % 3 else (number % 2,):
            for sequences, of in ((both, index), (alone[index], 0)):
                requests = [DraftRequest(x, text[x.position], 3) for x in sequences]
                drafts = sequences[0].engine.draft(requests, 8, of)
                if sequences is both:
                    expected = drafts
            for one, other in zip(drafts, expected, strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_array_equal(one.logits, other.logits)
        for sequences in (both, *alone):
            for sequence in sequences:
                sequence.verify(text[sequence.position : sequence.position + 4])
                sequence.commit(1 + number % 4)


def test_auto_drafts_with_the_one_that_knows_the_text(
    known: tuple[Pair, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target passes are slowed down to the duration of a large model's."""
    pair, text = known
    dull = with_drafter(pair.drafter.parent, pair, "dull")
    run = Engine.run

    def slow_run(*args: Any) -> Any:
        time.sleep(0.02)
        return run(*args)

    monkeypatch.setattr(Engine, "run", slow_run)
    with opened(dull) as decoder:
        settings = {"draft_type": ("dflash", "mtp"), "max_tokens": 250, "ignore_eos": True}
        counts: Counter[str] = Counter()
        for _ in range(2):
            found = decoder.generate(text[:1], **settings)
            assert found.tokens == tuple(text[1:251])
            counts.update({name: n for name, (_, n) in found.candidates_by_proposer.items()})
        print(counts)
        assert counts["mtp"] > 9 * counts["dflash"]


def test_a_plan_shows_each(known: tuple[Pair, list[int]]) -> None:
    pair, _ = known
    plan = dflash_gguf.plan(pair.target, drafter=[pair.drafter, pair.target], **OPTIONS)
    names = [item.name for item in plan.items]
    assert {"dflash drafter weights", "mtp drafter weights"} <= set(names)
    one = dflash_gguf.plan(pair.target, drafter=pair.drafter, **OPTIONS)
    assert "drafter weights" in {item.name for item in one.items}
    assert one.total("host") < plan.total("host")


def test_files_that_do_not_go_together_are_refused(
    known: tuple[Pair, list[int]], tmp_path: Path
) -> None:
    pair, _ = known
    side = tmp_path / "mtp-target.gguf"
    plan = prepare(pair.target_dir, "f32", Options(only_mtp=True), "qwen35")
    write_gguf(side, plan.metadata, plan.plans, plan.types)
    both = rf"{side} and {pair.target} are both drafters of the kind mtp: give one file of each"
    with pytest.raises(ValueError, match=both):
        dflash_gguf.load(pair.target, drafter=[side, pair.target], **OPTIONS)
    with pytest.raises(ValueError, match="are both drafters of the kind dflash"):
        dflash_gguf.load(pair.target, drafter=[pair.drafter, pair.drafter], **OPTIONS)
    other = make_mtp(tmp_path / "moe", "qwen35moe")
    with pytest.raises(dflash_gguf.Error, match='is of architecture "qwen35moe", the target'):
        dflash_gguf.load(pair.target, drafter=[pair.drafter, other.target], **OPTIONS)
    wide = make_pair(tmp_path / "wide", "llama")
    with pytest.raises(dflash_gguf.Error, match=r"its tokenizer\.ggml\.tokens differs"):
        dflash_gguf.load(pair.target, drafter=[wide.drafter, pair.target], **OPTIONS)
    with (
        opened(pair) as decoder,
        pytest.raises(ValueError, match=r"'eagle3' is not available; .* has: dflash, mtp, suffix"),
    ):
        decoder.generate([1], draft_type="eagle3")


@pytest.mark.parametrize("types", [("mtp",), TYPES])
@pytest.mark.parametrize("draft", ["chain", "tree", "auto"])
def test_preempted_cancelled_and_cut_answers(
    known: tuple[Pair, list[int]], monkeypatch: pytest.MonkeyPatch, draft: str, types: Any
) -> None:
    """Answers that outgrow a context of 256 cells together, and each alone."""
    pair, text = known
    prompts = [text[:1], text[:30], random_tokens(10), [*text[:30], *random_tokens(7)]]
    settings: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    with opened(pair, n_ctx=256) as one:
        plain = [one.generate(prompt, draft="none", **settings) for prompt in prompts]
    settings |= {"draft": draft, "draft_type": types}
    with opened(pair, n_ctx=256, n_parallel=3) as many:
        scheduler, preempted = many._scheduler, []
        preempt = scheduler._preempt
        monkeypatch.setattr(
            scheduler, "_preempt", lambda state: (preempted.append(state), preempt(state))
        )
        found = many.generate_batch(prompts, **settings)
        assert [x.tokens for x in found] == [x.tokens for x in plain]
        assert [x.stop_reason for x in found] == [x.stop_reason for x in plain]
        assert preempted
        for n in (1, 20, 75):  # answers that are cancelled leave prefixes, which the next ones find
            for prompt, expected in zip(prompts, plain, strict=True):
                tokens: list[int] = []
                stream = many.stream(
                    prompt,
                    cancelled=lambda tokens=tokens, n=n: len(tokens) >= n,
                    **settings,
                )
                for step in stream:
                    tokens += step.tokens
                assert n <= len(tokens)
                assert tuple(tokens) == expected.tokens[: len(tokens)]
        found = many.generate_batch(prompts, **settings)
        assert [x.tokens for x in found] == [x.tokens for x in plain]
