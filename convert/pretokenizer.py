"""Finds the pre-tokenizer (`tokenizer.ggml.pre`) of a byte-level BPE tokenizer.

Each name stands for a split pattern in llama.cpp. Tokenizers are recognised by a hash of the token
ids of a test text, which depends on the vocabulary too: each family of tokenizers has a hash.
Source: llama.cpp, conversion/base.py, get_vocab_base_pre.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from .errors import ConvertError

CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple emojis concatenated) "
    "\u2705 \U0001f999\U0001f999 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601"
    " ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= "
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)

PRE_TOKENIZERS = {
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    # CHECK_TEXT's hash by Qwen3-Embedding's tokenizer, which adds a trailing token
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "d30d75d9059f1aa2c19359de71047b3ae408c70875e8a3ccf8c5fba56c9d8af4": "qwen35",
    # CHECK_TEXT's hash by MiniCPM-V-4.6's tokenizer
    "1444df51289cfa8063b96f0e62b1125440111bc79a52003ea14b6eac7016fd5f": "qwen35",
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
    "846deafc5b0fa786186fa4ae6c7b49903cf2f1d1895bdb80b9120d60be135252": "gemma4",
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "d353350c764d8c3b39c763113960e4fb4919bea5fbf208a0e3b22e8469dc7406": "llama4",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
}


def hash_of(ids: Sequence[int]) -> str:
    """Returns the hash of CHECK_TEXT's token ids, by which PRE_TOKENIZERS finds tokenizers."""
    return sha256(str(list(ids)).encode()).hexdigest()


def check_name(name: str) -> str:
    """Returns `name`. Raises ConvertError if no pre-tokenizer has this name."""
    known = sorted(set(PRE_TOKENIZERS.values()))
    if name not in known:
        raise ConvertError(f"--pre {name}: unknown pre-tokenizer (known: {', '.join(known)})")
    return name


def name_for(ids: Sequence[int], where: str) -> str:
    """Returns the pre-tokenizer for the token ids of CHECK_TEXT. Raises ConvertError if unknown."""
    digest = hash_of(ids)
    if digest not in PRE_TOKENIZERS:
        raise ConvertError(
            f"{where}: the pre-tokenizer with hash {digest} is unknown; if it splits text as a "
            "known one does, name that one with --pre, or add the hash to PRE_TOKENIZERS in "
            "convert/pretokenizer.py"
        )
    return PRE_TOKENIZERS[digest]
