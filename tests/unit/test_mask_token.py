"""The token that stands for masked positions, chosen by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.mask_token import mask_token_of


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
    entries = [{"content": name, "id": 100 + i} for i, name in enumerate(added)]
    data = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": entries}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert mask_token_of(tmp_path, None) == expected
    assert mask_token_of(tmp_path, added[0]) == added[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model": {"vocab": {"a": 0, "<think>": 1}}}, "maybe one of <think>"),
        ({"model": {}}, "not a tokenizer.json with a vocabulary"),
        ([], "not a tokenizer.json with a vocabulary"),
    ],
)
def test_a_vocabulary_without_one_is_refused(data: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        mask_token_of(tmp_path, None)
