"""The token of a vocabulary that stands for masked positions."""

from __future__ import annotations

import re
from pathlib import Path

from ..convert.schema import Key
from ..text.gguf_metadata import GgufMetadata

UNUSED = re.compile(r"<[^>]*(mask|reserved|unused|fim_pad|extra_id)[^>]*>", re.IGNORECASE)
"""Names of tokens that a chat model never writes: of Qwen, Llama 3, gpt-oss, Gemma and others."""


def mask_token_of(target: Path, given: str | None) -> int:
    """Returns the id of the mask token for a target, from the vocabulary of its GGUF alone.

    given: the token that the user chose. ValueError if the vocabulary lacks it, or if none was
    given and no token is unused by its name; OSError for a target that cannot be read.
    """
    with GgufMetadata(target) as metadata:
        texts = metadata.texts(Key.TOKENIZER_TOKENS) or []
    ids = {text.decode("utf-8", "replace"): i for i, text in enumerate(texts)}
    if given is not None:
        if given not in ids:
            raise ValueError(
                f"--mask-token: the target's vocabulary has no token {given!r}; "
                "name a token that it never writes"
            )
        return ids[given]
    names = sorted((name for name in ids if UNUSED.fullmatch(name)), key=lambda x: ids[x])
    masks = [name for name in names if "mask" in name.lower()]
    if not names:
        special = [name for name in ids if re.fullmatch(r"<[^>]+>", name)]
        raise ValueError(
            "no token of the target's vocabulary is unused by its name; name one that it never "
            f"writes with --mask-token, maybe one of {', '.join(special[-8:])}"
        )
    return ids[(masks or names)[0]]
