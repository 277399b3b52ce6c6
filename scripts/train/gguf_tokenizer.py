"""Reads the tokenizer of a GGUF as a transformers tokenizer, with the file's pre-tokenizer.

transformers' own reader splits every text as GPT-2 does, and reads a wrong end token in some files.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash_gguf.text.gguf_metadata import GgufMetadata

from .vocabulary import SPLIT

# Split patterns of models' tokenizer.json, by llama.cpp's name of the pre-tokenizer.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,),
    "qwen35": (SPLIT,),
    "smollm": (
        r"\p{N}",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
}
_TAKES_WHOLE_WORDS = ("llama-bpe",)
"""Pre-tokenizers for which a word in the vocabulary is one token, even without merges."""
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a GGUF; raises ValueError or OSError if it is not supported."""
    with GgufMetadata(path) as metadata:
        pre = metadata.text("tokenizer.ggml.pre")
        texts = metadata.texts("tokenizer.ggml.tokens") or []
        merges = metadata.texts("tokenizer.ggml.merges") or []
        types = metadata.array("tokenizer.ggml.token_type", "int32", "uint32")
        if pre not in _SPLITS or not texts or types is None or len(types) != len(texts):
            known = ", ".join(_SPLITS)
            raise ValueError(f"{path}: tokenizer {pre!r} is not supported; supported are {known}")
        tokens = [text.decode() for text in texts]
        tokenizer = Tokenizer(
            models.BPE(
                {token: i for i, token in enumerate(tokens)},
                [tuple(merge.decode().split(" ")) for merge in merges],
                ignore_merges=pre in _TAKES_WHOLE_WORDS,
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, types.tolist(), strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )

        def special(name: str) -> str | None:
            i = metadata.integer(f"tokenizer.ggml.{name}_token_id")
            return tokens[i] if i is not None and 0 <= i < len(tokens) else None

        bos = special("bos")
        if bos is not None and metadata.boolean("tokenizer.ggml.add_bos_token"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
            )

        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=bos,
            eos_token=special("eos"),
            pad_token=special("padding"),
            chat_template=metadata.text("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
        )
