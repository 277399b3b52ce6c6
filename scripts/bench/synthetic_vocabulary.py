"""Adds a vocabulary to a model of random weights: invented, or a copy of its target's."""

from __future__ import annotations

from pathlib import Path

from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.schema import Key

from dflash_gguf.text.gguf_metadata import GgufMetadata

NORMAL, CONTROL = 1, 3  # values of llama_token_type (llama.h)


def invented_vocabulary(meta: Metadata, n_vocab: int) -> None:
    """Adds the tokens of 256 bytes, one merge, numbered words, a mask token and an end token."""
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
    """Copies the target's vocabulary; the last token becomes the mask token if there is none."""
    with GgufMetadata(target) as file:
        for name, entry in file.entries.items():
            if not name.startswith("tokenizer.") or name == Key.TOKENIZER_CHAT_TEMPLATE:
                continue
            if entry.type_name == "array of string":
                meta.array(name, [text.decode() for text in file.texts(name) or []])
            elif entry.type_name == "array of int32":
                meta.array(name, file.array(name, "int32").tolist())
            elif entry.type_name == "array of float32":
                meta.array(name, file.array(name, "float32").tolist())
            elif entry.type_name == "string":
                meta.string(name, file.text(name) or "")
            elif entry.type_name == "bool":
                meta.boolean(name, bool(file.boolean(name)))
            else:
                meta.uint32(name, file.integer(name) or 0)
        if Key.TOKENIZER_MASK_ID not in meta.values:
            meta.uint32(Key.TOKENIZER_MASK_ID, file.entries[Key.TOKENIZER_TOKENS].count - 1)
