"""MTP layers of hybrid targets: drafts compared with NumPy, and files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import HYBRIDS, PRE_OF_KIND, VOCAB_SIZE, make_target
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from followed import Followed, assert_close
from gguf_files import Parts, convert, edited
from mtp import MtpLayer, MtpReference
from mtp_pairs import make_mtp, trained
from numpy.typing import NDArray
from pairs import N_UBATCH, Pair, draft_logits, load_target, open_pair, random_tokens

import dflash_gguf
from dflash_gguf.config import DecodeConfig
from dflash_gguf.native import BatchEntry, Drafter, DraftRequest, Engine, Error, Model, Sequence
from dflash_gguf.sampling.sampler import Sampler
from dflash_gguf.text.gguf_metadata import GgufMetadata

N_TOKENS = 200


class Compared(Followed):
    """A sequence that follows known tokens, and drafts at any position as NumPy does."""

    def __init__(self, reference: MtpReference, sequence: Sequence) -> None:
        self.reference, self.sequence = reference, sequence
        self.tokens = reference.tokens
        self.unknown: set[int] = set()

    def check(self, n_draft: int = 4, window: int | None = None) -> None:
        at, last = self.position, self.tokens[self.position]
        found = draft_logits(self.sequence, last, n_draft)
        rows = {"window": window, "unknown": self.unknown}
        expected = self.reference.logits(at, n_draft, last, **rows)
        assert_close(found, expected, f"draft of {n_draft} after {at} tokens")


def compared(folder: Path, kind: str, window: int = 4096, **settings: Any) -> Compared:
    pair = make_mtp(folder, kind, **settings)
    reference = MtpReference(pair.target_dir, random_tokens(N_TOKENS))
    sequence = open_pair(pair, draft_window=window)
    sequence.engine.reserve_verify(32)
    return Compared(reference, sequence)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_drafts_equal_those_of_numpy(tmp_path: Path, kind: str) -> None:
    at = compared(tmp_path, kind)
    for n in (1, N_UBATCH - 1, N_UBATCH, 2 * N_UBATCH + 7):
        at.sequence.reset()
        at.prefill(n)
        at.check()
        at.check(1)
    at.check(7)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_drafts_of_fifty_rounds_with_rejections_of_every_length(tmp_path: Path, kind: str) -> None:
    at = compared(tmp_path, kind)
    at.prefill(20)
    random = np.random.default_rng(5)
    for number in range(50):
        n_rows = 1 + number % 8
        at.round(int(random.integers(0, min(n_rows, 5) + 1)), n_rows)
        if number % 7 == 3:
            at.prefill(2)
        at.check(1 + number % 3)
    assert at.position > 100


def test_numpy_equals_the_layer_of_transformers(tmp_path: Path) -> None:
    from mtp_train import mtp_of

    from dflash_gguf.train.mtp import forward

    pair = make_mtp(tmp_path, "qwen35")
    _, model = mtp_of(pair.target_dir)
    random = np.random.default_rng(4)
    embeddings, hidden = random.standard_normal((2, 50, 96)).astype(np.float32)
    expected = forward(model, torch.from_numpy(embeddings)[None], torch.from_numpy(hidden)[None])
    rows = np.tri(50, dtype=bool)
    found = MtpLayer(pair.target_dir)(embeddings.astype(float), hidden.astype(float), rows)
    assert_close(expected[0].detach().numpy(), found)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[int]]:
    return trained(tmp_path_factory.mktemp("known"))


def test_a_draft_follows_the_tokens_that_it_would_sample(tmp_path: Path) -> None:
    at = compared(tmp_path, "qwen35")
    at.prefill(30)
    config = DecodeConfig(temperature=2.0, top_k=8, seed=3)
    sampler, n_draft = Sampler(config), 6
    request = DraftRequest(at.sequence, at.tokens[30], n_draft, sampler.core)
    (draft,) = at.sequence.engine.draft([request], 16)
    followed = draft.tokens[:, 0].tolist()
    rows = at.reference.logits_of_path(30, [at.tokens[30], *followed[:-1]])
    found = np.take_along_axis(rows, draft.tokens.astype(np.int64), 1)
    assert_close(draft.logits, found)
    history = at.tokens[:31]
    for i, row in enumerate(rows.astype(np.float32)):
        assert sampler.sample(row, history, 31 + i).token == followed[i]
    assert followed != rows.argmax(1).tolist()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_file_of_its_own_drafts_the_same(tmp_path: Path, kind: str) -> None:
    pair = make_mtp(tmp_path, kind)
    file = tmp_path / "mtp-target.gguf"
    plan = prepare(pair.target_dir, "f32", Options(only_mtp=True), PRE_OF_KIND[kind])
    write_gguf(file, plan.metadata, plan.plans, plan.types)
    assert file.stat().st_size < pair.target.stat().st_size / 2
    drafts = []
    for drafter in (pair.target, file):
        sequence = open_pair(replace(pair, drafter=drafter))
        sequence.prefill(random_tokens(40))
        drafts.append(draft_logits(sequence, 9, 5))
    np.testing.assert_array_equal(*drafts)


def test_own_embeddings_norm_and_head(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    at = Compared(MtpReference(pair.target_dir, random_tokens(60)), open_pair(pair))
    random = np.random.default_rng(2)
    embeddings, head = random.standard_normal((2, VOCAB_SIZE, 96)).astype(np.float32)

    def add(parts: Parts) -> None:
        parts.f32("blk.4.nextn.embed_tokens.weight", embeddings)
        parts.f32("blk.4.nextn.shared_head_head.weight", head)
        del parts.tensors["blk.4.nextn.shared_head_norm.weight"]

    file = edited(pair.target, tmp_path / "own.gguf", add)
    at.sequence = open_pair(replace(pair, drafter=file))
    at.reference.embeddings, at.reference.head = embeddings.astype(float), head.astype(float)
    # Without a norm of its own, the layer ends with the target's.
    at.reference.layer.w["norm"] = at.reference.output_norm
    at.prefill(30)
    at.check()


def test_drafts_beside_other_sequences(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    tokens = [random_tokens(N_TOKENS, seed=seed) for seed in (11, 12, 13)]
    references = [MtpReference(pair.target_dir, x) for x in tokens]
    model = load_target(pair.target)
    config = replace(model.config, n_parallel=3, n_ctx=1024)
    engine = Engine(model, drafter=Drafter(str(pair.drafter), model), config=config)
    engine.reserve_verify(64)
    sequences = [Sequence(engine) for _ in references]
    for sequence, text, n in zip(sequences, tokens, (3, 40, 17), strict=True):
        sequence.prefill(text[:n])
    for number in range(12):
        lengths = [1 + (number + i) % 4 for i in range(3)]
        requests = [
            DraftRequest(sequence, text[sequence.position], n)
            for sequence, text, n in zip(sequences, tokens, lengths, strict=True)
        ]
        drafts = engine.draft(requests, VOCAB_SIZE)
        for sequence, reference, draft, n in zip(
            sequences, references, drafts, lengths, strict=True
        ):
            at, last = sequence.position, reference.tokens[sequence.position]
            found = np.empty(draft.logits.shape, dtype=np.float32)
            np.put_along_axis(found, draft.tokens.astype(np.int64), draft.logits, axis=1)
            assert_close(found, reference.logits(at, n, last))
            np.testing.assert_allclose(
                draft.log_sum_exp, np.logaddexp.reduce(draft.logits, axis=1), rtol=1e-5
            )
        items = [
            BatchEntry(sequence, [*text[sequence.position :][:n], 5], is_verify=True)
            for sequence, text, n in zip(sequences, tokens, lengths, strict=True)
        ]
        engine.run(items)
        counts = [number % (n + 1) for n in lengths]
        engine.commit(list(zip(sequences, counts, strict=True)))


def test_drafts_after_a_found_prefix(tmp_path: Path) -> None:
    """The row behind the prefix has zeros in place of the hidden state before it."""
    at = compared(tmp_path, "qwen35")
    at.prefill(37)
    prefix = at.sequence.snapshot()
    at.check()
    at.prefill(20)
    at.check()
    at.sequence.attach(prefix, 37)
    at.unknown = {37}
    at.prefill(9)
    at.check()
    at.round(3, 5)
    at.check()
    longer = at.sequence.snapshot()
    at.sequence.reset()
    at.sequence.attach(longer, longer.n_tokens)
    at.unknown |= {longer.n_tokens}
    at.check()
    at.prefill(1)
    at.check()


@pytest.mark.parametrize("window", [6, 20, 70])
def test_a_draft_sees_the_last_positions_only(tmp_path: Path, window: int) -> None:
    """After a longer prompt, the first of them has zeros in place of the state before it."""
    at = compared(tmp_path, "qwen35", window)
    for n in (window, 150):
        at.sequence.reset()
        at.prefill(n)
        at.unknown = {n - window} if n > window else set()
        at.check(window=window)
    for n in (4, 0, 2, 3, 1):
        at.round(n, 5)
        at.check(3, window=window)


def test_the_last_256_tokens_of_a_prompt_have_keys_and_values(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    at = Compared(MtpReference(pair.target_dir, random_tokens(420)), open_pair(pair))
    at.prefill(400)
    at.unknown = {144}
    at.check(window=256)
    at.round(5, 6)
    at.check(window=261)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 5},
    "penalised": {"temperature": 0.3, "seed": 6, "repeat_penalty": 1.1, "logit_bias": {7: -2.0}},
    "banned": {"logit_bias": {9: float("-inf")}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_text_is_that_of_plain_decoding(known: tuple[Pair, list[int]], name: str) -> None:
    pair, text = known
    settings = {"max_tokens": 120, "ignore_eos": True, **SETTINGS[name]}
    with dflash_gguf.load(pair.target, n_ctx=512, n_threads=1) as decoder:
        plain = decoder.generate(text[:1], draft="none", **settings)
        for draft in ("chain", "tree", "auto"):
            for n in (1, 3, 7):
                found = decoder.generate(text[:1], draft=draft, draft_max=n, **settings)
                assert found.tokens == plain.tokens
                assert draft == "auto" or found.candidates_by_proposer["mtp"][0] > 0
        assert name != "greedy" or found.drafter == pair.target.name
    if name == "greedy":
        assert plain.tokens == tuple(text[1:121])


def test_a_layer_that_knows_the_text_is_accepted(known: tuple[Pair, list[int]]) -> None:
    pair, text = known
    with dflash_gguf.load(pair.target, n_ctx=512, n_threads=1) as decoder:
        for draft in ("chain", "tree"):
            settings = {"draft": draft, "draft_max": 3, "max_tokens": 280, "ignore_eos": True}
            found = decoder.generate(text[:1], **settings)
            print(f"{draft}: {found.tau:.2f} tokens a round")
            assert found.tokens == tuple(text[1:281])
            assert found.tau is not None
            assert found.tau > 3


def test_answers_of_several_requests(known: tuple[Pair, list[int]]) -> None:
    pair, text = known
    prompts = [text[:1], text[:40], random_tokens(9), text[:3]]
    config = DecodeConfig(max_tokens=60, ignore_eos=True)
    with dflash_gguf.load(pair.target, n_ctx=512, n_threads=1, n_parallel=4) as decoder:
        plain = [decoder.generate(prompt, config, draft="none").tokens for prompt in prompts]
        for draft in ("chain", "tree"):
            found = decoder.generate_batch(prompts, replace(config, draft=draft))
            assert [x.tokens for x in found] == plain


def test_a_decoder_without_the_layer_takes_no_memory_for_it(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    without = tmp_path / "without.gguf"
    plan = prepare(pair.target_dir, "f32", Options(mtp=False), "qwen35")
    write_gguf(without, plan.metadata, plan.plans, plan.types)
    uses = []
    for path, mtp in ((pair.target, False), (without, True)):
        with dflash_gguf.load(path, n_ctx=256, n_threads=1, mtp=mtp) as decoder:
            assert not decoder.engine.drafters
            with pytest.raises(ValueError, match="draft_type 'mtp' is not available"):
                decoder.generate([1], draft_type="mtp")
            memory = decoder.engine.memory()
            uses.append((decoder.model.mapped_bytes + decoder.model.copied_bytes, memory))
    assert uses[0] == uses[1]


def test_a_plan_counts_the_layer(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    for path, mtp in ((pair.target, True), (pair.target, False)):
        plan = dflash_gguf.plan(path, n_ctx=256, n_threads=1, mtp=mtp)
        drafter = [item for item in plan.items if item.name.startswith("drafter")]
        assert bool(drafter) is mtp
        assert (plan.verify_rows > 0) is mtp


def end_tokens(path: Path) -> list[int]:
    """Returns the ids of the tokens that end an answer."""
    with GgufMetadata(path) as file:
        ids = (file.integer(f"tokenizer.ggml.{x}_token_id") for x in ("eos", "eot", "eom"))
        return sorted({token for token in ids if token is not None})


@pytest.mark.parametrize("ftype", ["f32", "q8_0"])
@pytest.mark.parametrize("repack", [True, False])
def test_a_shortlist_has_the_logits_of_the_whole_head(
    tmp_path: Path, ftype: str, repack: bool
) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    files = {}
    for alone in (False, True):
        for n in (None, 256):
            file = files[alone, n] = tmp_path / f"{alone}-{n}.gguf"
            options = Options(only_mtp=alone, draft_vocab=n)
            plan = prepare(pair.target_dir, ftype, options, PRE_OF_KIND["qwen35"])
            write_gguf(file, plan.metadata, plan.plans, plan.types)
    assert files[True, 256].stat().st_size < files[True, None].stat().st_size
    file = files[False, None]
    ends = [token for token in end_tokens(file) if token >= 256]
    assert ends
    config = replace(load_target(file).config, repack=repack)
    rows: dict[str, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
    for name, path, n in (
        ("all", file, None),
        ("in file", file, 256),
        ("alone", files[True, None], 256),
        ("converted", files[False, 256], None),
        ("converted alone", files[True, 256], None),
    ):
        model = Model(str(file), replace(config, draft_vocab=n))
        drafter = Drafter(str(path), model)
        sequence = Sequence(Engine(model, drafter=drafter))
        sequence.prefill(random_tokens(40))
        n_best = VOCAB_SIZE if name == "all" else len(ends) + 256
        tokens, logits, _ = sequence.draft(9, 1, n_best)
        order = tokens[0].argsort()
        rows[name] = tokens[0][order], logits[0][order]
    expected = [*range(256), *ends]
    for name in [name for name in rows if name != "all"]:
        assert rows[name][0].tolist() == expected
        np.testing.assert_array_equal(rows[name][1], rows["all"][1][expected])
    model = Model(str(file), replace(config, draft_vocab=300))
    with pytest.raises(Error, match=r"tokens of its d2t only, draft_vocab .* is 300: leave it"):
        Drafter(str(files[True, 256]), model)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_shortlist_changes_no_text(known: tuple[Pair, list[int]], name: str) -> None:
    pair, text = known
    settings = {"max_tokens": 120, "ignore_eos": True, **SETTINGS[name]}
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1}
    accepted = []
    for n in (None, 256):
        with dflash_gguf.load(pair.target, draft_vocab=n, **options) as decoder:
            plain = decoder.generate(text[:1], draft="none", **settings)
            for draft in ("chain", "tree", "auto"):
                found = decoder.generate(text[:1], draft=draft, draft_max=3, **settings)
                assert found.tokens == plain.tokens
                if draft == "chain":
                    accepted.append(found.n_accepted)
    assert accepted[1] > 0
    if name == "greedy":  # 165 of the 421 tokens of this text are never drafted
        assert accepted[1] < accepted[0]


def listing(tokens: list[int]) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        parts.tensors["d2t"] = (np.array(tokens), gguf.GGMLQuantizationType.I64)

    return edit


def test_a_file_may_list_the_tokens_that_it_drafts(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    ends = end_tokens(pair.target)
    some = [token for token in random_tokens(60) if token not in ends]
    tokens = [*dict.fromkeys(some), *ends]
    sequences = [
        open_pair(replace(pair, drafter=edited(pair.target, tmp_path / "d2t.gguf", listing(x))))
        if x
        else open_pair(pair)
        for x in (tokens, [])
    ]
    found = []
    for sequence in sequences:
        sequence.prefill(random_tokens(40))
        found.append(sequence.draft(9, 1, len(tokens) if not found else VOCAB_SIZE))
    assert set(found[0].tokens[0].tolist()) == set(tokens)
    whole = dict(zip(found[1].tokens[0].tolist(), found[1].logits[0].tolist(), strict=True))
    assert [whole[x] for x in found[0].tokens[0].tolist()] == found[0].logits[0].tolist()


BAD: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "no layer": (
        lambda parts: parts.set("qwen35.nextn_predict_layers", 0),
        r'"qwen35" is not that of a drafter \(dflash or ngram\), and the file does not have',
    ),
    "no tensors": (
        lambda parts: parts.tensors.pop("blk.4.nextn.eh_proj.weight"),
        "the file does not have one MTP layer",
    ),
    "a tensor is missing": (
        lambda parts: parts.tensors.pop("blk.4.attn_k.weight"),
        "tensor blk.4.attn_k.weight is missing",
    ),
    "a list without the end": (listing([*range(2, 34)]), "tensor d2t lacks the end token"),
    "a short list": (listing([*range(31)]), "d2t lists 31 tokens, at least 32 are needed"),
    "a list beyond the vocabulary": (listing([421]), "d2t names token 421, the target has 421"),
    "a list without a head": (
        lambda parts: (
            listing([*range(421)])(parts),
            parts.tensors.pop("token_embd.weight"),
            parts.tensors.pop("output.weight"),
        ),
        "a part of the vocabulary needs the tensor token_embd.weight or output.weight",
    ),
    "hidden size": (
        lambda parts: parts.set("qwen35.embedding_length", 64),
        "its hidden size is 64, that of the target .* is 96",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    pair, (edit, sentence) = make_mtp(tmp_path, "qwen35"), BAD[name]
    file = edited(pair.target, tmp_path / "bad.gguf", edit)
    with pytest.raises(Error, match=sentence):
        Drafter(str(file), load_target(pair.target))


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path / "a", "qwen35")
    longer = make_mtp(tmp_path / "b", "qwen35", num_hidden_layers=8)
    other = make_mtp(tmp_path / "c", "qwen35moe")
    model = load_target(pair.target)
    with pytest.raises(Error, match=r"its MTP layer follows 8 layers, the target .* has 4"):
        Drafter(str(longer.target), model)
    with pytest.raises(Error, match=r'is of architecture "qwen35moe", the target .* of "qwen35"'):
        Drafter(str(other.target), model)
    llama = make_target(tmp_path / "d", "llama")
    convert(llama, tmp_path / "llama.gguf", "f32", PRE_OF_KIND["llama"])
    with pytest.raises(Error, match=r'is of architecture "qwen35", the target .* of "llama"'):
        Drafter(str(pair.target), load_target(tmp_path / "llama.gguf"))
