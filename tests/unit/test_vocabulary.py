"""Damaged vocabularies raise errors that name the damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocabularies import byte_level, gemma, sentence_piece, write

from dflash_gguf.text.gguf_metadata import GgufMetadata
from dflash_gguf.text.vocabulary import Vocabulary, read_vocabulary

T = "tokenizer.ggml."
TOKENS: list[str] = byte_level()[T + "tokens"]


def read(path: Path, values: dict[str, Any]) -> Vocabulary | None:
    with GgufMetadata(write(path, values)) as file:
        return read_vocabulary(file)


@pytest.mark.parametrize("make", [byte_level, sentence_piece, gemma])
def test_whole_vocabularies_pass(tmp_path: Path, make: Callable[..., dict[str, Any]]) -> None:
    values = make()
    vocabulary = read(tmp_path / "a.gguf", values)
    assert vocabulary is not None
    assert [text.decode() for text in vocabulary.tokens] == values[T + "tokens"]
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(vocabulary.to_gguf())
    with GgufMetadata(copy) as file:
        again = read_vocabulary(file)
        assert file.text("general.architecture") == "llama"
    assert again is not None
    assert (again.tokens, again.ids, again.flags) == (
        vocabulary.tokens,
        vocabulary.ids,
        vocabulary.flags,
    )


def test_a_file_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "a.gguf", {}) is None
    assert read(tmp_path / "b.gguf", {T + "model": "no_vocab"}) is None


BYTE_LEVEL_DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"model": "t5"}, "model is 't5', supported are gpt2, llama, gemma4"),
    ({"model": 5}, "model is uint32, expected string"),
    ({"pre": "made-up"}, "pre names the unknown pre-tokenizer 'made-up'"),
    ({"tokens": None}, "tokens is missing or empty"),
    ({"tokens": [1, 2]}, "tokens is array of int32, expected array of string"),
    ({"tokens": [*TOKENS[:-1], "he"]}, "tokens holds 'he' twice, as ids 256 and 262"),
    ({"tokens": ["", "[EMPTY_0]", *TOKENS[2:]]}, "tokens holds '[EMPTY_0]' twice"),
    ({"tokens": ["a\0b", "a\0c", *TOKENS[2:]]}, "tokens holds 'a' twice"),
    ({"tokens": TOKENS[:-1]}, "token_type has 263 entries, the vocabulary has 262 tokens"),
    ({"token_type": [1] * 263 + [3]}, "token_type has 264 entries"),
    ({"token_type": [1] * 262 + [7]}, "token_type gives token 262 the unknown type 7"),
    ({"token_type": [-1] + [1] * 262}, "token_type gives token 0 the unknown type -1"),
    ({"token_type": [1.0] * 263}, "token_type is array of float32, expected array of int32"),
    ({"token_type": [6] + [1] * 262}, "token_type marks token 0 as a byte, its text is"),
    ({"scores": [0.0] * 3}, "scores has 3 entries"),
    ({"scores": [float("nan")] * 263}, "scores gives token 0 the score nan"),
    ({"merges": None}, "merges is missing"),
    ({"merges": ["he"]}, "merges entry 0 is 'he', expected two parts"),
    ({"merges": ["h e", "h "]}, "merges entry 1 is 'h ', expected two parts"),
    ({"merges": ["h x"]}, "merges entry 0 needs 'hx', which is not in the vocabulary"),
    ({"merges": ["zz e"]}, "merges entry 0 needs 'zz', which is not in the vocabulary"),
    ({"bos_token_id": 263}, "bos_token_id is 263, the vocabulary has 263 tokens"),
    ({"eos_token_id": -1}, "eos_token_id is -1, the vocabulary has 263 tokens"),
    ({"eot_token_id": "x"}, "eot_token_id is string, expected an integer"),
    ({"add_bos_token": 1}, "add_bos_token is uint32, expected bool"),
    ({"bos_token_id": None}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"),
    ({"eos_token_id": None, "add_eos_token": True}, "add_eos_token is true, but"),
    ({"suppress_tokens": [0.5]}, "suppress_tokens is array of float32, expected array of int32"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), BYTE_LEVEL_DAMAGE, ids=[s for _, s in BYTE_LEVEL_DAMAGE]
)
def test_damage_is_named(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "bad.gguf"
    with pytest.raises(ValueError) as caught:
        read(path, byte_level(**changes))
    assert str(caught.value).startswith(f"{path}: {T}{sentence}")


def test_damage_of_other_models_is_named(tmp_path: Path) -> None:
    tokens = sentence_piece()[T + "tokens"]
    for values, sentence in (
        (sentence_piece(scores=None), "scores is missing, the tokenizer model 'llama' needs it"),
        (
            sentence_piece(
                tokens=["<no>" if t == "<0x0A>" else t for t in tokens], token_type=None
            ),
            "tokens has no token for the byte 0x0A",
        ),
        (gemma(bos_token_id=None), "bos_token_id is missing, the model 'gemma4' needs it"),
        (gemma(merges=["a a"]), "merges entry 0 needs 'aa'"),
    ):
        with pytest.raises(ValueError) as caught:
            read(tmp_path / "bad.gguf", values)
        assert str(caught.value).startswith(f"{tmp_path / 'bad.gguf'}: {T}{sentence}")


def test_broken_characters_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.gguf", byte_level())
    data = path.read_bytes()
    at = data.index(b"<|im_end|>")
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with (
        GgufMetadata(path) as file,
        pytest.raises(ValueError, match=r"tokens entry 260 is .*not valid"),
    ):
        read_vocabulary(file)


def test_ids_that_text_does_not_need_are_left_out(tmp_path: Path) -> None:
    vocabulary = read(tmp_path / "a.gguf", byte_level(padding_token_id=2**32 - 1))
    assert vocabulary is not None
    assert T + "padding_token_id" not in vocabulary.ids
