"""The tokenizer of a real model equals llama.cpp's."""

from __future__ import annotations

import pytest
from vocabularies import HARD_TEXTS, HELLO, smollm2_file

from dflash_gguf.text.tokenizer import Tokenizer


@pytest.mark.model
def test_a_real_model_tokenizes_like_llama_cpp_on_the_file_itself() -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = smollm2_file()
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer is not None
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in [*HARD_TEXTS, "def f(x):\n    return x**2  # <|im_end|>"]:
        expected = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert tokenizer.tokenize(text) == expected
    assert {tokenizer.piece(t, special=True) for t in tokenizer.stop_tokens} >= {b"<|im_end|>"}
    assert tokenizer.chat_text(HELLO).endswith("<|im_start|>assistant\n")
    theirs.close()
