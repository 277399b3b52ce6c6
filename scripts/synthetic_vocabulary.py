"""A vocabulary for models of random weights: an invented one, or a target's for its drafter."""

from __future__ import annotations

from pathlib import Path

import gguf
from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.schema import Key

NORMAL, CONTROL = 1, 3  # llama.h, enum llama_token_type
ELEMENT_KINDS = {
    gguf.GGUFValueType.UINT32: Metadata.uint32,
    gguf.GGUFValueType.FLOAT32: Metadata.float32,
    gguf.GGUFValueType.BOOL: Metadata.boolean,
    gguf.GGUFValueType.STRING: Metadata.string,
}


def invented_vocabulary(meta: Metadata, n_vocab: int) -> None:
    """The 256 bytes as GPT-2 spells them, one merge, numbered words; the last two are special."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(byte) for byte in printable]
    tokens += [chr(256 + i) for i in range(len(others))]
    tokens += ["ab", *(f"word{i}" for i in range(n_vocab - 259)), "<|mask|>", "<|end|>"]
    meta.string(Key.TOKENIZER_MODEL, "gpt2")
    meta.string(Key.TOKENIZER_PRE, "qwen2")
    meta.array(Key.TOKENIZER_TOKENS, tokens)
    meta.array(Key.TOKENIZER_TOKEN_TYPE, [NORMAL] * (n_vocab - 2) + [CONTROL] * 2)
    meta.array(Key.TOKENIZER_MERGES, ["a b"])
    meta.uint32(Key.TOKENIZER_EOS_ID, n_vocab - 1)
    meta.uint32(Key.TOKENIZER_MASK_ID, n_vocab - 2)


def copied_vocabulary(meta: Metadata, target: Path) -> None:
    """The target's; where it has no mask token, its last token becomes that."""
    reader = gguf.GGUFReader(target)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") and name != Key.TOKENIZER_CHAT_TEMPLATE:
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                meta.array(name, field.contents())
            else:
                ELEMENT_KINDS[field.types[0]](meta, name, field.contents())
    if Key.TOKENIZER_MASK_ID not in meta.values:
        n_tokens = len(reader.fields[Key.TOKENIZER_TOKENS].contents())
        meta.uint32(Key.TOKENIZER_MASK_ID, n_tokens - 1)
