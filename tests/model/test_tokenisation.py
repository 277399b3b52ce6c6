"""The tokenizer of the converted file gives the ids of the Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import GEMMA4, SPLIT_PATTERNS, write_tokenizer
from dflash_gguf.convert.plan import Metadata, TensorPlan
from dflash_gguf.convert.schema import Arch, Key
from dflash_gguf.convert.tokenizer import add_tokenizer
from dflash_gguf.convert.write import write_gguf
from llama import llama_model, llama_tokenize
from smollm2 import make_smollm2_without_weights
from tokenizers import Tokenizer

TEXTS = [
    "Hello, world!",
    "It's what they'LL say, we'd've, don'T they'RE I'M 'tis",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ✋🏿x🇩🇪🇫🇷",
    "你好,世界。東京タワー 안녕하세요 ひらがなカタカナ",
    "1 12 123 1234 12345 3.14159 1e-10 0x7f ١٢٣ ४५६ ½ ² Ⅷ 十二",
    "def f(x: int) -> str:\n    return f\"{x!r:>{10}}\"  # ok\n\n\n\tif x:\r\n\t\tpass\r\n",
    "#include <vector>\nstd::vector<int> v{1,2,3}; a->b = c && d || !e; /* ... */ x<<=2;",
    " ", "  ", "   a", "a   ", "a  b   c    d",
    "\n", "\n\n\n", " \n \n ", "\t\t\n  \t x", "\r\n\r\n",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f",
    "é é ñ̃ ṩ ŏ̀ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "हिन्दी में नमस्ते ภาษาไทย தமிழ் አማርኛ",
    "שלום עולם مرحبا بالعالم ‏abc‎ مَرْحَبًا",
    "Привет, Ωμέγα İstanbul ǅ ß ŒUVRE naïve",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|>x<|im_start|> <|im_end|> ",
    "<tool_call>{\"name\": 1}</tool_call> <|not_special|> <|im_start",
    "http://example.com/a_b-c?d=e&f=%20#g user@example.org ~/.config $HOME",
    "!!! ??? ... ,,, --- ___ *** === ((())) [[]] {{}} \"\"\" ''' ```",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f \ufeff \ufffd \U0010fffd",
]  # fmt: skip


def compare(folder: Path, n_tokens: int, pre: str | None, gguf: Path) -> list[str]:
    """Converts the tokenizer in `folder`; returns the texts whose ids differ, with both ids."""
    metadata = Metadata(Arch.LLAMA)
    metadata.string(Key.GENERAL_ARCHITECTURE, Arch.LLAMA)
    add_tokenizer(metadata, folder, n_tokens, pre)
    no_tensors: list[TensorPlan] = []
    write_gguf(gguf, metadata, no_tensors, {})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    different = []
    with llama_model(gguf, vocab_only=True) as model:
        for text in [*TEXTS, "\n".join(TEXTS)]:
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            found = llama_tokenize(model, text, special=True)
            if found != expected:
                different.append(f"{text[:60]!r}: {found} instead of {expected}")
    return different


@pytest.mark.parametrize("pre", SPLIT_PATTERNS)
def test_a_made_up_vocabulary(tmp_path: Path, pre: str) -> None:
    write_tokenizer(tmp_path / "m", pre)
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert compare(tmp_path / "m", 421, pre, tmp_path / "x.gguf") == []


def test_smollm2(tmp_path: Path) -> None:
    make_smollm2_without_weights(tmp_path / "m")
    assert compare(tmp_path / "m", 49152, None, tmp_path / "x.gguf") == []


def test_a_made_up_vocabulary_of_gemma4(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m", GEMMA4)
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["Gemma4ForCausalLM"]}')
    assert compare(tmp_path / "m", 421, None, tmp_path / "x.gguf") == []
