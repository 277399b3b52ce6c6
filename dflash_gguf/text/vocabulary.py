"""Checks the tokenizer in a GGUF file and copies the checked entries to a new file.

llama.cpp, which tokenizes, aborts the process on a damaged vocabulary. It therefore reads only
`Vocabulary.to_gguf()`, which also serves architectures that llama.cpp does not know.
Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..convert.schema import Key
from .gguf_metadata import GgufMetadata

GPT2, SPM, GEMMA4 = "gpt2", "llama", "gemma4"
MODELS = (GPT2, SPM, GEMMA4)
WITHOUT_VOCABULARY = ("no_vocab", "none")
_PRE_NAMES = """
a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r
dbrx deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4
f2llmv2 falcon falcon-h1 falcon3 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling
grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-es jina-de joyai-llm kanana2 kimi-k2 kormo
laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b
minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact seed-coder
smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya
trillion ufakzeka viking youtu
"""
PRE_NAMES = frozenset(_PRE_NAMES.split())
"""Pre-tokenizers of tokenizer model "gpt2" in llama.cpp 0c1e57098, without those for embedding
models and those for text that is not byte-level."""

MAX_TOKENS = 1 << 24
NORMAL, CONTROL, BYTE, MAX_TOKEN_TYPE = 1, 3, 6, 6
USED_IDS = (
    Key.TOKENIZER_BOS_ID,
    Key.TOKENIZER_EOS_ID,
    Key.TOKENIZER_EOT_ID,
    Key.TOKENIZER_EOM_ID,
    Key.TOKENIZER_UNK_ID,
    Key.TOKENIZER_MASK_ID,
)
UNUSED_IDS = (
    Key.TOKENIZER_PAD_ID,
    Key.TOKENIZER_SEP_ID,
    Key.TOKENIZER_FIM_PRE_ID,
    Key.TOKENIZER_FIM_SUF_ID,
    Key.TOKENIZER_FIM_MID_ID,
    Key.TOKENIZER_FIM_PAD_ID,
    Key.TOKENIZER_FIM_REP_ID,
    Key.TOKENIZER_FIM_SEP_ID,
)
"""Keys of special ids that generation does not need; ids out of range are left out."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked tokenizer of a GGUF file.

    tokens: texts in the file, UTF-8. types: GGUF token types [n_tokens], or None. ids, flags:
    special ids and boolean settings by metadata key. templates: chat templates by name; the default
    one is "". entries: bytes of the file's entries that `to_gguf` copies.
    """

    model: str
    tokens: list[bytes]
    types: np.ndarray[tuple[int], np.dtype[np.int32]] | None
    ids: dict[str, int]
    flags: dict[str, bool]
    suppressed: frozenset[int]
    templates: dict[str, str]
    entries: list[bytes] = field(repr=False)

    def to_gguf(self) -> bytes:
        """Returns the bytes of a GGUF file with this vocabulary and no tensors."""
        entries = [_string_entry(Key.GENERAL_ARCHITECTURE, "llama"), *self.entries]
        entries += [_entry(key, 4, struct.pack("<I", value)) for key, value in self.ids.items()]
        entries += [_entry(key, 7, struct.pack("<?", value)) for key, value in self.flags.items()]
        return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + b"".join(entries)


def read_vocabulary(file: GgufMetadata) -> Vocabulary | None:
    """Reads the tokenizer of a file, None if it has none; ValueError for the first defect."""
    model = file.text(Key.TOKENIZER_MODEL)
    if model is None or model in WITHOUT_VOCABULARY:
        return None
    if model not in MODELS:
        raise _error(file, Key.TOKENIZER_MODEL, f"is {model!r}, supported are {', '.join(MODELS)}")
    pre = file.text(Key.TOKENIZER_PRE)
    if model == GPT2 and pre not in PRE_NAMES | {None, ""}:
        raise _error(file, Key.TOKENIZER_PRE, f"names the unknown pre-tokenizer {pre!r}")
    tokens = _tokens(file)
    known = _unique(file, tokens)
    types = _types(file, tokens)
    _check_scores(file, model, len(tokens))
    if model == SPM:
        _check_bytes(file, known)
    else:
        _check_merges(file, known, may_lack=pre == "kimi-k2")
    ids = _ids(file, len(tokens))
    copied = [Key.TOKENIZER_MODEL, Key.TOKENIZER_TOKENS]
    copied += [Key.TOKENIZER_MERGES] if model != SPM else []
    copied += [Key.TOKENIZER_PRE] if model == GPT2 else []
    copied += [Key.TOKENIZER_TOKEN_TYPE, Key.TOKENIZER_SCORES]
    copied += [Key.GENERAL_NAME] if file.text(Key.GENERAL_NAME) is not None else []
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        ids=ids,
        flags=_flags(file, model, ids),
        suppressed=_suppressed(file, len(tokens)),
        templates=_templates(file),
        entries=[file.raw(key) for key in copied if key in file],
    )


def _tokens(file: GgufMetadata) -> list[bytes]:
    key = Key.TOKENIZER_TOKENS
    tokens = file.texts(key)
    if not tokens:
        raise _error(file, key, "is missing or empty")
    if len(tokens) > MAX_TOKENS:
        raise _error(file, key, f"has {len(tokens)} entries, the limit is {MAX_TOKENS}")
    _check_utf8(file, key, tokens)
    return tokens


def _unique(file: GgufMetadata, tokens: list[bytes]) -> frozenset[bytes]:
    """Returns the set of token texts as llama.cpp reads them, cut at the first NUL.

    ValueError for equal texts, on which llama.cpp would abort.
    """
    named = tokens
    if b"" in tokens or b"\0" in b"".join(tokens):
        texts = (text.partition(b"\0")[0] for text in tokens)
        named = [text or b"[EMPTY_%d]" % token for token, text in enumerate(texts)]
    known = frozenset(named)
    if len(known) < len(named):
        first: dict[bytes, int] = {}
        for token, text in enumerate(named):
            if first.setdefault(text, token) != token:
                text_shown = text.decode()
                what = f"holds {text_shown!r} twice, as ids {first[text]} and {token}"
                raise _error(file, Key.TOKENIZER_TOKENS, what)
    return known


def _types(
    file: GgufMetadata, tokens: list[bytes]
) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    key = Key.TOKENIZER_TOKEN_TYPE
    types = file.array(key, "int32")
    if types is None:
        return None
    _check_count(file, key, len(types), len(tokens))
    if types.min() < 0 or types.max() > MAX_TOKEN_TYPE:
        bad = int(np.flatnonzero((types < 0) | (types > MAX_TOKEN_TYPE))[0])
        raise _error(file, key, f"gives token {bad} the unknown type {types[bad]}")
    for token in np.flatnonzero(types == BYTE):
        if not _is_byte_name(tokens[token]):
            name = tokens[token].decode()
            raise _error(file, key, f"marks token {token} as a byte, its text is {name!r}")
    return types


def _check_scores(file: GgufMetadata, model: str, n_tokens: int) -> None:
    key = Key.TOKENIZER_SCORES
    scores = file.array(key, "float32", "int32")
    if scores is None:
        if model == SPM:
            raise _error(file, key, f"is missing, the tokenizer model {SPM!r} needs it")
        return
    _check_count(file, key, len(scores), n_tokens)
    if not np.isfinite(scores).all():
        bad = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise _error(file, key, f"gives token {bad} the score {scores[bad]}")


def _check_bytes(file: GgufMetadata, known: frozenset[bytes]) -> None:
    """Checks that every byte has a token, because other text is encoded byte by byte."""
    for byte in range(256):
        if b"<0x%02X>" % byte not in known and bytes([byte]) not in known:
            what = f"has no token for the byte 0x{byte:02X}"
            raise _error(file, Key.TOKENIZER_TOKENS, what)


def _check_merges(file: GgufMetadata, known: frozenset[bytes], *, may_lack: bool) -> None:
    key = Key.TOKENIZER_MERGES
    merges = file.texts(key)
    if merges is None:
        if may_lack:
            return
        raise _error(file, key, "is missing")
    _check_utf8(file, key, merges)
    for index, merge in enumerate(merges):
        at = merge.find(b" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not right:
            raise _error(file, key, f"entry {index} is {merge.decode()!r}, expected two parts")
        if left not in known or right not in known or left + right not in known:
            missing = next(text for text in (left, right, left + right) if text not in known)
            what = f"entry {index} needs {missing.decode()!r}, which is not in the vocabulary"
            raise _error(file, key, what)


def _ids(file: GgufMetadata, n_tokens: int) -> dict[str, int]:
    ids = {}
    for key in USED_IDS + UNUSED_IDS:
        value = file.integer(key)
        if value is None:
            continue
        if 0 <= value < n_tokens:
            ids[key] = value
        elif key in USED_IDS:
            raise _error(file, key, f"is {value}, the vocabulary has {n_tokens} tokens")
    return ids


def _flags(file: GgufMetadata, model: str, ids: dict[str, int]) -> dict[str, bool]:
    """Reads the boolean settings. llama.cpp aborts if a token that it must add has no id."""
    flags = {}
    for key, id_key in (
        (Key.TOKENIZER_ADD_BOS, Key.TOKENIZER_BOS_ID),
        (Key.TOKENIZER_ADD_EOS, Key.TOKENIZER_EOS_ID),
    ):
        value = file.boolean(key)
        if value and id_key not in ids:
            raise _error(file, key, f"is true, but {id_key} is missing")
        if value is not None:
            flags[key] = value
        elif id_key not in ids:
            flags[key] = False
    if model == GEMMA4 and Key.TOKENIZER_BOS_ID not in ids:
        raise _error(file, Key.TOKENIZER_BOS_ID, f"is missing, the model {GEMMA4!r} needs it")
    prefix = file.boolean(Key.TOKENIZER_ADD_SPACE_PREFIX)
    flags[Key.TOKENIZER_ADD_SPACE_PREFIX] = model == SPM if prefix is None else prefix
    return flags


def _suppressed(file: GgufMetadata, n_tokens: int) -> frozenset[int]:
    ids = file.array(Key.TOKENIZER_SUPPRESS_TOKENS, "int32")
    return frozenset() if ids is None else frozenset(i for i in ids.tolist() if 0 <= i < n_tokens)


def read_templates(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the chat templates of a model's file by name; the default one is ""."""
    with GgufMetadata(path) as file:
        return _templates(file)


def _templates(file: GgufMetadata) -> dict[str, str]:
    templates = {}
    for key in file.entries:
        if key == Key.TOKENIZER_CHAT_TEMPLATE or key.startswith(Key.TOKENIZER_CHAT_TEMPLATE + "."):
            templates[key[len(Key.TOKENIZER_CHAT_TEMPLATE) + 1 :]] = file.text(key) or ""
    return templates


def _is_byte_name(text: bytes) -> bool:
    return re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", text) is not None


def _check_utf8(file: GgufMetadata, key: str, texts: Iterable[bytes]) -> None:
    """Checks that all texts are UTF-8: for speed decodes them at once, split by line breaks."""
    texts = list(texts)
    try:
        b"\n".join(texts).decode()
    except UnicodeDecodeError:
        for index, text in enumerate(texts):
            try:
                text.decode()
            except UnicodeDecodeError:
                what = f"entry {index} is {text!r}, not valid UTF-8"
                raise _error(file, key, what) from None


def _check_count(file: GgufMetadata, key: str, count: int, n_tokens: int) -> None:
    if count != n_tokens:
        raise _error(file, key, f"has {count} entries, the vocabulary has {n_tokens} tokens")


def _error(file: GgufMetadata, key: str, what: str) -> ValueError:
    return ValueError(f"{file.path}: {key} {what}")


def _entry(key: str, code: int, value: bytes) -> bytes:
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", code) + value


def _string_entry(key: str, text: str) -> bytes:
    value = text.encode()
    return _entry(key, 8, struct.pack("<Q", len(value)) + value)
