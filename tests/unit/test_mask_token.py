"""The token that stands for masked positions, chosen by its name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from dflash_gguf.train.mask_token import mask_token_of


def write(path: Path, tokens: list[str]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (["<|im_end|>", "<|fim_pad|>", "<|mask|>"], "<|mask|>"),
        (
            ["<|eot_id|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"],
            "<|reserved_special_token_0|>",
        ),
        (["<unused7>", "<unused0>"], "<unused7>"),
        (["<|im_start|>", "<|fim_pad|>"], "<|fim_pad|>"),
    ],
)
def test_an_unused_token_is_found(added: list[str], expected: str, tmp_path: Path) -> None:
    tokens = ["a", "b", *added]
    path = write(tmp_path / "a.gguf", tokens)
    assert mask_token_of(path, None) == tokens.index(expected)
    assert mask_token_of(path, added[0]) == 2


def test_a_vocabulary_without_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", ["a", "<think>"])
    with pytest.raises(ValueError, match="maybe one of <think>"):
        mask_token_of(path, None)
    with pytest.raises(ValueError, match="has no token 'c'"):
        mask_token_of(path, "c")
