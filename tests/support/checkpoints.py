"""Random small Hugging Face checkpoints: targets of every kind, and drafters for them.

Equal arguments give equal bytes. Sizes are odd on purpose: head_dim * heads differs from the hidden
size, and vocabularies are no multiples of 32. Norms, biases and decays are random too, so that any
lost transform changes the logits.
"""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from model_cache import cached
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "gpt-oss"),
    *("gemma3", "gemma4"),
)
KINDS = (*ARCHITECTURES, "gemma4moe", "gemma4e")
CLASSES = ("llama", "qwen35moe", "gpt-oss", "gemma4e")
"""One kind of each class: dense; recurrent with MoE; windows with sinks; shared K/V.

Tests of these properties use CLASSES. Logits, equality of drafted text, conversion and metadata are
tested with all KINDS.
"""
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
VOCAB_SIZE = 421  # more than the tokenizer's tokens, and no multiple of 32

# Settings of make_target().
ONE, SEVEN = {"num_hidden_layers": 1}, {"num_hidden_layers": 7}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Split patterns of the published tokenizer.json files, by llama.cpp's names.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    "llama-bpe": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,
    "qwen35": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _TAIL,
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _TAIL,
}
GEMMA3, GEMMA4 = "gemma3", "gemma4"
PRE_OF_KIND = {
    "llama": "llama-bpe",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3next": "qwen2",
    "gpt-oss": "gpt-4o",
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4moe": GEMMA4,
    "gemma4e": GEMMA4,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind it at all.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i + 1))\n",
    "In 1905 there were 42 answers to 7 questions; it's what they've said, isn't it?",
    "Schöne Grüße aus Köln. Où est la bibliothèque? El niño comió una manzana.",
    "The model reads the text, then the model writes the text, and then it stops.",
)


def heads(q: int, kv: int, size: int) -> dict[str, Any]:
    return {"num_attention_heads": q, "num_key_value_heads": kv, "head_dim": size}


def value_heads(keys: int, values: int) -> dict[str, Any]:
    return {"linear_num_key_heads": keys, "linear_num_value_heads": values}


@cache
def _tokenizer_json(pre: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERNS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer.to_str()


GEMMA4_TOKENS = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>", "mask": "<mask>"}


@cache
def _gemma4_tokenizer_json() -> str:
    """Returns a character-level BPE with byte fallback, and "\u2581" for spaces."""
    first = [*GEMMA4_TOKENS.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 4, special_tokens=first, show_progress=False
    )
    # llama.cpp also splits at newlines.
    lines = [line for text in _CORPUS for line in text.split("\n")]
    tokenizer.train_from_iterator(lines, trainer)
    description = json.loads(tokenizer.to_str())
    special = set(GEMMA4_TOKENS.values())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in special
    ]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    turns = [AddedToken(text, special=True) for text in ("<|turn>", "<turn|>", "<|channel>")]
    tokenizer.add_special_tokens(turns)
    tokenizer.add_tokens([AddedToken("<extra>", special=False, normalized=False)])
    return tokenizer.to_str()


@cache
def _sentencepiece_model() -> bytes:
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCAB_SIZE - 40,
        byte_fallback=True,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return written.getvalue()


def write_tokenizer(directory: Path, pre: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json, and tokenizer.model for GEMMA3.

    Byte-level BPE with the splits of `pre`; character-level BPE for GEMMA3 and GEMMA4.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if pre == GEMMA3:
        (directory / "tokenizer.model").write_bytes(_sentencepiece_model())
    if pre in (GEMMA3, GEMMA4):
        text = _gemma4_tokenizer_json()
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
        named: dict[str, Any] = {f"{name}_token": text for name, text in GEMMA4_TOKENS.items()}
        named |= {
            "extra_special_tokens": ["<|turn>", "<turn|>", "<|channel>"],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(token["id"]): token for token in json.loads(text)["added_tokens"]
            },
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
        return
    (directory / "tokenizer.json").write_text(_tokenizer_json(pre), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def text_config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return {**config, **config.get("text_config", {})}


@cached
def make_target(directory: Path, kind: str, *, pre: str | None = None, **settings: Any) -> Path:
    """Writes a random checkpoint of `kind` with a tokenizer; returns `directory`.

    pre: name of the tokenizer's split pattern. settings: see hf_models.write_target().
    """
    from hf_models import write_target

    write_target(directory, kind, **settings)
    write_tokenizer(directory, pre or PRE_OF_KIND[kind])
    return directory


@cached
def make_drafter(directory: Path, target_dir: Path, **settings: Any) -> Path:
    """Writes a random DFlash drafter for the target; returns `directory`.

    settings: see hf_models.write_drafter().
    """
    from hf_models import write_drafter

    write_drafter(directory, text_config_of(target_dir), **settings)
    return directory
