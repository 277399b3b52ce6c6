"""Draft logits compared with the reference package, and drafters that do not fit their target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from followed import Followed, assert_close
from gguf_files import Parts, edited
from numpy.typing import NDArray
from pairs import N_UBATCH, Pair, draft_logits, load_target, make_pair, open_pair, random_tokens
from reference import Reference

import dflash_gguf
from dflash_gguf.native import Drafter, Engine, Error, Sequence

N_TOKENS = 240
LENGTHS = (1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 3 * N_UBATCH + 7)

SEVEN = {"num_hidden_layers": 7}
SLIDING, FULL = "sliding_attention", "full_attention"


def sliding(window: int, *layer_types: str, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(layer_types),
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": list(layer_types),
        **more,
    }


def taps(*ids: int) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": list(ids)}}


# Cases: kind, settings of the target, settings of the drafter.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, one layer, one tap": ("llama", {}, {"num_hidden_layers": 1, **taps(0)}),
    "qwen3, five layers, five taps": (
        "qwen3",
        SEVEN,
        {"num_hidden_layers": 5, "block_size": 16, **taps(0, 1, 3, 4, 5)},
    ),
    "qwen3moe, three layers, taps out of order": (
        "qwen3moe",
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 3, "block_size": 2, **taps(3, 0, 2)},
    ),
    "llama tied, sliding": (
        "llama",
        {"tie_word_embeddings": True},
        sliding(8, SLIDING, SLIDING, block_size=12),
    ),
    "qwen3, mixed, window longer than most contexts": (
        "qwen3",
        SEVEN,
        sliding(40, SLIDING, FULL, SLIDING, FULL, **taps(1, 2, 3, 4)),
    ),
    "llama, mixed, causal": ("llama", {}, sliding(6, FULL, SLIDING, is_causal=True)),
    "llama, mixed, not causal": (
        "llama",
        {},
        sliding(6, FULL, SLIDING, is_causal=False, block_size=16),
    ),
    "qwen3, full, causal": ("qwen3", {}, {"is_causal": True}),
    "qwen35, multimodal rope": ("qwen35", {}, {"num_hidden_layers": 3}),
    "qwen35moe, mixed": ("qwen35moe", {}, sliding(9, SLIDING, FULL)),
    "llama, attention biases as in gpt-oss's": ("llama", {}, {"attention_bias": True}),
    "llama, attention biases, sliding": (
        "llama",
        {},
        sliding(8, SLIDING, FULL, attention_bias=True),
    ),
    "llama, other heads and rope": (
        "llama",
        {},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "qwen3, yarn, gelu": (
        "qwen3",
        {},
        {
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gpt-oss, biases and yarn": (
        "gpt-oss",
        {},
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "gemma4, four sliding layers and a full one, softcap": (
        "gemma4",
        SEVEN | {"layer_types": [SLIDING] * 5 + [FULL] * 2},
        sliding(11, *[SLIDING] * 4, FULL, final_logit_softcapping=30.0, **taps(0, 2, 4, 5)),
    ),
    "llama, scales and softcap": (
        "llama",
        {},
        {
            "dflash_config": {
                "input_embedding_scale": 3.0,
                "output_multiplier": 0.7,
                "final_logit_softcapping": 2.5,
            }
        },
    ),
}  # fmt: skip


class Comparison(Followed):
    """A sequence that follows the reference's tokens and compares drafts at any position."""

    def __init__(self, pair: Pair, window: int | None = None, **settings: Any) -> None:
        self.tokens = random_tokens(N_TOKENS)
        self.reference = Reference(pair, self.tokens)
        self.window = window
        self.sequence = open_pair(pair, **settings, **({"draft_window": window} if window else {}))
        self.sequence.engine.reserve_verify(64)
        self.block_size = self.sequence.engine.drafters[0].block_size

    def decode(self, n: int) -> None:
        for _ in range(n):
            self.sequence.decode(self.tokens[self.position])

    def check(self, n_draft: int | None = None) -> None:
        n = n_draft or self.block_size - 1
        at = self.position
        found = draft_logits(self.sequence, self.tokens[at], n)
        expected = self.reference.draft_logits(at, n, self.window)
        assert_close(found, expected, f"draft of {n} after {at} tokens")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_reference(tmp_path: Path, case: str) -> None:
    kind, target, drafter = CASES[case]
    at = Comparison(make_pair(tmp_path, kind, target, **drafter))
    for n in LENGTHS:
        at.sequence.reset()
        at.prefill(n)
        at.check()
        at.check(1)
    at.check(at.block_size // 2 or 1)
    for n_accepted in (1, 3, 0, 8, 2):
        at.round(n_accepted, 8)
        at.check()
    at.round(5, 5)
    at.prefill(N_UBATCH + 3)
    at.decode(2)
    at.check()


def test_many_plain_rounds_before_a_draft(tmp_path: Path) -> None:
    at = Comparison(make_pair(tmp_path, "llama", {}, **sliding(32, FULL, SLIDING)))
    at.prefill(5)
    at.decode(150)
    at.check()
    at.round(4, 64)
    at.decode(63)
    at.round(3, 60)
    at.check()


def test_a_window_is_whole_where_it_fills_all_pages(tmp_path: Path) -> None:
    """Also the last page, which has the cell that the padding of devices writes to."""
    at = Comparison(make_pair(tmp_path, "llama"), 175, n_ubatch=16)
    at.prefill(170)
    for _ in range(4):
        at.decode(11)
        at.check()


@pytest.mark.parametrize("window", [1, 7, 48, 130])
def test_a_draft_sees_the_last_positions_only(tmp_path: Path, window: int) -> None:
    pair = make_pair(tmp_path, "qwen3", {}, **sliding(32, FULL, SLIDING))
    at = Comparison(pair, window)
    for n in (window, 100):
        at.sequence.reset()
        at.prefill(n)
        at.check()
    at.round(6, 8)
    at.check()
    at.decode(90)
    at.check()
    at.prefill(30)
    at.check()
    at.decode(1)
    at.check()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of eight layers, and a drafter with the reference's default taps."""
    target = {"num_hidden_layers": 8}
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", target, **taps(1, 5))


def rewritten(pair: Pair, path: Path, edit: Callable[[Parts], object]) -> Pair:
    return replace(pair, drafter=edited(pair.drafter, path, edit))


def drafts_after(pair: Pair) -> NDArray[np.float32]:
    sequence = open_pair(pair)
    sequence.prefill(random_tokens(40))
    return draft_logits(sequence, 9, 7)


def to_old(parts: Parts, arch: str, flat: bool, ids: str) -> None:
    """Renames keys and tensors to those of files older than architecture dflash."""
    old = {"block_size": "dflash.block_size", "target_layers": "dflash.target_layer_ids"}
    u32 = gguf.GGUFValueType.UINT32
    metadata = {}
    for key, value in parts.metadata.items():
        name = key.removeprefix("dflash.")
        if not key.startswith(("tokenizer.", "dflash.attention.layer_norm_rms")):
            metadata[f"{arch}.{old.get(name, name)}" if name != key else key] = value
    mask = parts.metadata["tokenizer.ggml.mask_token_id"][1]
    metadata[f"{arch}.dflash.mask_token_id"] = (u32, mask, None)
    kind, layers, element = metadata.pop(f"{arch}.dflash.target_layer_ids")
    if ids == "listed":
        listed = [int(x) - 1 for x in layers]
        metadata[f"{arch}.dflash.target_layer_ids"] = (kind, listed, element)
    elif ids == "counted":
        metadata[f"{arch}.dflash.n_target_layers"] = (u32, len(layers), None)
    else:
        metadata[f"{arch}.dflash.n_target_features"] = (u32, 96 * len(layers), None)
    join = "_" if flat else "."
    names = {"fc.weight": f"dflash{join}fc.weight"}
    names["enc.output_norm.weight"] = f"dflash{join}hidden_norm.weight"
    if not flat:
        blocks = [name for name in parts.tensors if name.endswith(".ffn_norm.weight")]
        names |= {name: name.replace("ffn_norm", "post_attention_norm") for name in blocks}
    parts.tensors = {names.get(name, name): value for name, value in parts.tensors.items()}
    parts.metadata, parts.architecture = metadata, arch


@pytest.mark.parametrize(
    ("arch", "flat", "ids"),
    [
        ("qwen35-dflash-draft", False, "listed"),
        ("dflash-draft", True, "counted"),
        ("gemma4-dflash-draft", False, "as features"),
    ],
)
def test_older_files_draft_the_same(
    pair: Pair, tmp_path: Path, arch: str, flat: bool, ids: str
) -> None:
    old = rewritten(pair, tmp_path / "old.gguf", lambda parts: to_old(parts, arch, flat, ids))
    np.testing.assert_array_equal(drafts_after(old), drafts_after(pair))

    def without_base(parts: Parts) -> None:
        to_old(parts, arch, flat, ids)
        del parts.metadata[f"{arch}.rope.freq_base"]

    with pytest.raises(Error, match=f"{arch}.rope.freq_base is missing"):
        drafts_after(rewritten(pair, tmp_path / "base.gguf", without_base))


@pytest.mark.parametrize("arch", ["dflash-draft", "gemma4-dflash-draft"])
def test_a_published_older_file_loads_without_a_warning(tmp_path: Path, arch: str) -> None:
    """Six taps of 60 layers, windows in all layers but the last, and another end token."""
    settings = sliding(2048, *[SLIDING] * 4, FULL) | taps(1, 12, 23, 35, 46, 57)
    target = {"num_hidden_layers": 60, "layer_types": [*[SLIDING] * 5, FULL] * 10}
    pair = make_pair(tmp_path, "gemma4", target, **settings)

    def edit(parts: Parts) -> None:
        vocabulary = {k: v for k, v in parts.metadata.items() if k.startswith("tokenizer.")}
        to_old(parts, arch, False, "listed")
        parts.metadata |= vocabulary
        parts.set("tokenizer.ggml.eos_token_id", 1)

    old = rewritten(pair, tmp_path / "old.gguf", edit)
    np.testing.assert_array_equal(drafts_after(old), drafts_after(pair))
    with dflash_gguf.load(old.target, drafter=old.drafter, n_ctx=256, n_threads=1) as decoder:
        drafted, plain = (
            decoder.generate(random_tokens(40), draft=draft, max_tokens=24, ignore_eos=True)
            for draft in ("chain", "none")
        )
    assert drafted.n_drafted > 0
    assert drafted.tokens == plain.tokens


def test_own_embeddings_and_head(pair: Pair, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    embeddings = random.normal(size=(421, 96)).astype(np.float32)
    head = random.normal(size=(130, 96)).astype(np.float32) / 10
    tokens = random.permutation(421)[:130]

    def add(parts: Parts) -> None:
        parts.f32("token_embd.weight", embeddings)

    def add_both(parts: Parts) -> None:
        add(parts)
        parts.f32("output.weight", head)
        parts.tensors["d2t"] = (tokens.astype(np.int64), gguf.GGMLQuantizationType.I64)

    context = random_tokens(40)
    reference = Reference(pair, [*context, 9])
    reference.embeddings = reference.head = torch.from_numpy(embeddings)
    found = drafts_after(rewritten(pair, tmp_path / "tied.gguf", add))
    assert_close(found, reference.draft_logits(40, 7), "own embeddings are the head as well")

    reference.head = torch.from_numpy(head)
    sequence = open_pair(rewritten(pair, tmp_path / "both.gguf", add_both))
    sequence.prefill(context)
    ids, values, _ = sequence.draft(9, 7, 130)
    expected = reference.draft_logits(40, 7)
    order = np.argsort(tokens)
    by_token = np.argsort(ids, axis=1)
    assert (np.sort(ids, axis=1) == tokens[order]).all()
    np.testing.assert_allclose(
        np.take_along_axis(values, by_token, 1), expected[:, order], atol=1e-4
    )
    with pytest.raises(Error, match="k is 131 candidates, expected 1 to 130"):
        sequence.draft(9, 7, 131)


def test_rope_factors_and_attention_scales(pair: Pair, tmp_path: Path) -> None:
    plain = drafts_after(pair)

    def scaled(parts: Parts) -> None:
        f32 = gguf.GGUFValueType.FLOAT32
        parts.metadata["dflash.attention.value_scale"] = (f32, 0.5, None)
        parts.metadata["dflash.attention.scale"] = (f32, 4 * 32**-0.5, None)
        parts.metadata["dflash.rope.freq_base"] = (f32, 1.0, None)
        for i in (0, 1):
            output = f"blk.{i}.attn_output.weight"
            parts.f32(output, parts.tensors[output][0] * 2)
            norm = f"blk.{i}.attn_q_norm.weight"
            parts.f32(norm, parts.tensors[norm][0] / 4)
        base = 10000.0 ** (np.arange(16) / 16)
        parts.f32("rope_freqs.weight", base.astype(np.float32))

    found = drafts_after(rewritten(pair, tmp_path / "scaled.gguf", scaled))
    np.testing.assert_allclose(found, plain, atol=1e-4 * np.ptp(plain))


def keep_special_ids_apart(parts: Parts) -> None:
    parts.set("tokenizer.ggml.eos_token_id", 3)


def test_special_tokens_may_differ(pair: Pair, tmp_path: Path) -> None:
    found = drafts_after(rewritten(pair, tmp_path / "eos.gguf", keep_special_ids_apart))
    np.testing.assert_array_equal(found, drafts_after(pair))


def change_entry(key: str, entry: int) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        values = list(parts.metadata[key][1])
        values[entry] += "x"
        parts.set(key, values)

    return edit


def shorten_tokens(parts: Parts) -> None:
    for key in ("tokens", "token_type"):
        parts.set(f"tokenizer.ggml.{key}", parts.metadata[f"tokenizer.ggml.{key}"][1][:-1])


def setting(key: str, value: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.set(key, value)


def without(key: str) -> Callable[[Parts], object]:
    return lambda parts: parts.metadata.pop(key)


def tensor(name: str, *shape: int, value: float = 0.0) -> Callable[[Parts], None]:
    return lambda parts: parts.f32(name, np.full(shape, value, dtype=np.float32))


def unknown_activation(parts: Parts) -> None:
    text = gguf.GGUFValueType.STRING
    parts.metadata["dflash.hidden_activation"] = (text, "relu", None)


def map_outside(parts: Parts) -> None:
    parts.f32("output.weight", np.zeros((2, 96), dtype=np.float32))
    parts.tensors["d2t"] = (np.array([5, 421]), gguf.GGMLQuantizationType.I64)


def map_without_head(parts: Parts) -> None:
    parts.tensors["d2t"] = (np.arange(32), gguf.GGMLQuantizationType.I64)


def few_embeddings(parts: Parts) -> None:
    parts.f32("token_embd.weight", np.zeros((400, 96), dtype=np.float32))
    parts.f32("output.weight", np.zeros((421, 96), dtype=np.float32))


def short_pattern(parts: Parts) -> None:
    integer, array, boolean = (
        gguf.GGUFValueType[x] for x in ("UINT32", "ARRAY", "BOOL")
    )  # fmt: skip
    parts.metadata["dflash.attention.sliding_window"] = (integer, 8, None)
    parts.metadata["dflash.attention.sliding_window_pattern"] = (array, [True], boolean)


BAD_DRAFTERS: dict[str, tuple[Callable[[Parts], object], str]] = {
    "taps": (
        setting("dflash.target_layers", [2, 8]),
        "reads the input of target layer 8, the target has layers 0 to 7",
    ),
    "taps and fusion": (
        setting("dflash.target_layers", [2, 3, 4]),
        r"tensor fc.weight has shape \[192, 96\], expected \[288, 96\]",
    ),
    "no taps": (without("dflash.target_layers"), "dflash.target_layers is missing"),
    "mask token": (
        setting("tokenizer.ggml.mask_token_id", 421),
        "its mask token 421 is outside the target's vocabulary of 421",
    ),
    "no mask token": (
        without("tokenizer.ggml.mask_token_id"),
        "tokenizer.ggml.mask_token_id is missing",
    ),
    "block size": (setting("dflash.block_size", 1), "block_size is 1, expected 2 to 1024"),
    "a token": (
        change_entry("tokenizer.ggml.tokens", 17),
        "its tokenizer.ggml.tokens differs from that of the target .* at entry 17",
    ),
    "fewer tokens": (shorten_tokens, "its tokenizer.ggml.tokens differs .* at entry 420"),
    "a merge": (
        change_entry("tokenizer.ggml.merges", 4),
        "its tokenizer.ggml.merges differs from that of the target .* at entry 4",
    ),
    "DSpark": (tensor("markov_w1.weight", 4, 4), "markov_w1.weight makes it a DSpark drafter"),
    "DFlash2": (
        tensor("selector_hidden.weight", 4, 4),
        "selector_hidden.weight makes it a DFlash2 drafter",
    ),
    "a tensor nobody knows": (tensor("blk.0.extra.weight", 4), "blk.0.extra.weight is not part"),
    "activation": (unknown_activation, 'activation "relu" is not known'),
    "head map outside": (map_outside, "d2t names token 421, the target has 421 tokens"),
    "head map alone": (map_without_head, "d2t maps the rows of an output head, which"),
    "few embeddings": (few_embeddings, r"token_embd.weight has shape \[96, 400\]"),
    "short pattern": (short_pattern, "must say for each of 2 layers whether it has a window"),
}


@pytest.mark.parametrize("case", BAD_DRAFTERS)
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    pair: Pair, tmp_path: Path, case: str
) -> None:
    edit, message = BAD_DRAFTERS[case]
    path = edited(pair.drafter, tmp_path / "bad.gguf", edit)
    with pytest.raises(Error, match=message) as caught:
        Drafter(str(path), load_target(pair.target))
    assert str(path) in str(caught.value)


def test_foreign_files_are_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    target = load_target(pair.target)
    with pytest.raises(Error, match='architecture "llama" is not'):
        Drafter(str(pair.target), target)
    with pytest.raises(Error, match='"dflash"'):
        load_target(pair.drafter)
    wider = make_pair(tmp_path, "llama", {"hidden_size": 64, "num_hidden_layers": 8})
    with pytest.raises(Error, match=r"its hidden size is 96, that of the target .* is 64"):
        Drafter(str(pair.drafter), load_target(wider.target))
    with pytest.raises(Error, match="was loaded for another model than"):
        Sequence(Engine(load_target(wider.target), drafter=Drafter(str(pair.drafter), target)))
    for window in (0, -5, 1 << 25):
        with pytest.raises(Error, match=f"draft_window is {window}, expected 1 to"):
            open_pair(pair, draft_window=window)


def test_scores_that_are_no_numbers_clear_the_drafter(pair: Pair, tmp_path: Path) -> None:
    """The target goes on as if nothing had been drafted; only the drafter's K/V is dropped."""
    edit = tensor("enc.output_norm.weight", 96, value=np.nan)
    sequence = open_pair(rewritten(pair, tmp_path / "nan.gguf", edit))
    expected = [open_pair(pair).prefill(random_tokens(n)).argmax() for n in (20, 21)]
    assert sequence.prefill(random_tokens(20)).argmax() == expected[0]
    for k in (1, 5):
        draft = sequence.draft(9, 4, k)
        assert not np.isfinite(draft.log_sum_exp).any()
        assert draft.tokens.min() >= 0
        assert draft.tokens.max() < sequence.engine.model.n_vocab
        draft = sequence.draft(9, 4, k)
        assert np.isfinite(draft.logits).all()
        sequence.reset()
        sequence.prefill(random_tokens(20))
    assert sequence.decode(random_tokens(21)[20]).argmax() == expected[1]
