"""Tokenizer of a model folder as GGUF metadata: vocabulary, merges, special tokens, templates.

Byte-level BPE, Gemma 3's SentencePiece, and Gemma 4's BPE on characters. The result equals that of
llama.cpp's conversion/base.py (get_vocab_base), conversion/gemma.py and gguf-py's SpecialVocab.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

from tokenizers import Tokenizer

from . import pretokenizer
from .checkpoint import Config, read_json, read_object
from .errors import ConvertError, check_file, check_link
from .plan import Metadata
from .schema import Key

# Values of tokenizer.ggml.token_type (llama.h, enum llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SMOLLM_VOCAB_SIZE = 49152  # SmolLM's vocabulary size; for it, llama.cpp adds no BOS

SPECIAL_ID_KEYS = {
    "bos": Key.TOKENIZER_BOS_ID,
    "eos": Key.TOKENIZER_EOS_ID,
    "unk": Key.TOKENIZER_UNK_ID,
    "sep": Key.TOKENIZER_SEP_ID,
    "pad": Key.TOKENIZER_PAD_ID,
    "mask": Key.TOKENIZER_MASK_ID,
    "eot": Key.TOKENIZER_EOT_ID,
}
END_KEYS = (Key.TOKENIZER_EOS_ID, Key.TOKENIZER_EOT_ID, Key.TOKENIZER_EOM_ID)
"""Metadata keys of the tokens that end an answer."""
END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    )
)
"""Texts of tokens that end an answer in llama.cpp without a key (src/llama-vocab.cpp)."""
ADD_KEYS = {
    "bos": Key.TOKENIZER_ADD_BOS,
    "eos": Key.TOKENIZER_ADD_EOS,
    "sep": Key.TOKENIZER_ADD_SEP,
}


@dataclass(frozen=True, slots=True)
class _Files:
    """Tokenizer of a model folder and its parsed JSON files."""

    directory: Path
    tokenizer: Tokenizer
    json: dict[str, Any]
    config: dict[str, Any]


GEMMA4 = "gemma4"
"""Value of `tokenizer.ggml.model` for Gemma 4."""
# Control tokens of Gemma 4 that are kept in answers, to mark tool calls and thoughts.
VISIBLE = frozenset(
    f"{opening}{name}{closing}"
    for name in ("channel", "tool_call", "tool_response")
    for opening, closing in (("<|", ">"), ("<", "|>"))
) | {'<|"|>'}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NO_SCORE, _UNUSED_SCORE = -1000.0, -10000.0


def add_tokenizer(metadata: Metadata, directory: Path, vocab_size: int, pre: str | None) -> None:
    """Adds a folder's tokenizer, padded to vocab_size. pre: pre-tokenizer, None to detect it."""
    architecture = Config(directory).architecture
    if architecture.startswith("Gemma4"):
        _add_gemma4(metadata, directory, vocab_size)
        return
    if architecture.startswith("Gemma3"):
        _add_sentencepiece(metadata, directory, vocab_size)
        return
    files = _read(directory)
    if "ByteLevel" not in _types_in(files.json.get("pre_tokenizer")):
        path = directory / "tokenizer.json"
        raise ConvertError(f"{path}: is not a byte-level BPE tokenizer, others are not supported")
    tokens, types = _vocabulary(files, vocab_size)
    if pre is None:
        ids = files.tokenizer.encode(pretokenizer.CHECK_TEXT).ids
        pre = pretokenizer.name_for(ids, str(directory))
    metadata.string(Key.TOKENIZER_MODEL, "gpt2")
    metadata.string(Key.TOKENIZER_PRE, pretokenizer.check_name(pre))
    metadata.array(Key.TOKENIZER_TOKENS, tokens)
    metadata.array(Key.TOKENIZER_TOKEN_TYPE, types)
    metadata.array(Key.TOKENIZER_MERGES, _merges(files))
    _add_special(metadata, files, vocab_size)
    _add_templates(metadata, files)


def _note_lost_spaces(metadata: Metadata, files: _Files) -> None:
    """Adds a note on tokens that transformers matches with the spaces or word ends beside them."""
    lost = [
        entry.content
        for entry in files.tokenizer.get_added_tokens_decoder().values()
        if entry.lstrip or entry.rstrip or entry.single_word
    ]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        metadata.notes.append(
            f"lstrip, rstrip and single_word of {', '.join(map(repr, lost[:3]))}{more} cannot be "
            "stored in GGUF: beside these tokens, spaces become other tokens than in transformers"
        )


def _add_gemma4(metadata: Metadata, directory: Path, vocab_size: int) -> None:
    """Adds a BPE tokenizer on characters, with byte tokens for those outside the vocabulary."""
    files = _read(directory)
    if not files.json["model"].get("byte_fallback", False):
        path = directory / "tokenizer.json"
        raise ConvertError(f"{path}: is not the tokenizer of a Gemma 4 model: no byte_fallback")
    by_id = _texts_by_id(files, vocab_size)
    added = files.tokenizer.get_added_tokens_decoder()
    n_base = files.tokenizer.get_vocab_size(with_added_tokens=False)
    named = _named_special(files.config)
    tokens, types = [], []
    for index in range(vocab_size):
        text = by_id.get(index)
        kind = NORMAL
        if text is None:
            text, kind = f"[PAD{index}]", UNUSED
        elif _BYTE_TOKEN.fullmatch(text):
            kind = BYTE
        elif text in VISIBLE:
            kind = USER_DEFINED
        elif text in named:
            kind = CONTROL
        elif index in added and index >= n_base:
            kind = USER_DEFINED
        tokens.append(text)
        types.append(kind)
    metadata.string(Key.TOKENIZER_MODEL, GEMMA4)
    metadata.array(Key.TOKENIZER_TOKENS, tokens)
    metadata.array(Key.TOKENIZER_SCORES, [_NO_SCORE] * len(tokens))
    metadata.array(Key.TOKENIZER_TOKEN_TYPE, types)
    metadata.array(Key.TOKENIZER_MERGES, _merges(files))
    _add_special(metadata, files, vocab_size)
    _add_templates(metadata, files)
    metadata.boolean(Key.TOKENIZER_ADD_SPACE_PREFIX, False)
    metadata.boolean(Key.TOKENIZER_ADD_BOS, True)


def _add_sentencepiece(metadata: Metadata, directory: Path, vocab_size: int) -> None:
    """Adds the pieces and scores of tokenizer.model, and the added tokens of tokenizer.json."""
    path = directory / "tokenizer.model"
    if not path.is_file():
        raise ConvertError(f"{directory}: has no tokenizer.model")
    check_file(path)
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise ConvertError(f"{path}: needs the package sentencepiece: pip install it") from None
    files, pieces = _read(directory), SentencePieceProcessor()
    try:
        pieces.LoadFromSerializedProto(path.read_bytes())
    except Exception as error:  # sentencepiece raises RuntimeError or OSError for a bad file
        raise ConvertError(f"{path}: cannot be read as a SentencePiece model: {error}") from error
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    scores, types = [_UNUSED_SCORE] * vocab_size, [UNUSED] * vocab_size
    kinds = (
        (pieces.IsUnknown, UNKNOWN),
        (pieces.IsControl, CONTROL),
        (pieces.IsUnused, UNUSED),
        (pieces.IsByte, BYTE),
    )
    for index in range(min(pieces.vocab_size(), vocab_size)):
        tokens[index], scores[index] = pieces.IdToPiece(index), pieces.GetScore(index)
        types[index] = next((kind for is_kind, kind in kinds if is_kind(index)), NORMAL)
    for index, entry in files.tokenizer.get_added_tokens_decoder().items():
        if index >= vocab_size:
            continue
        is_control = entry.special or _looks_special(entry.content)
        types[index] = CONTROL if is_control else USER_DEFINED
        tokens[index] = entry.content if is_control else entry.content.replace("\u2581", " ")
        scores[index] = _NO_SCORE
    metadata.string(Key.TOKENIZER_MODEL, "llama")
    metadata.string(Key.TOKENIZER_PRE, "default")
    metadata.array(Key.TOKENIZER_TOKENS, tokens)
    metadata.array(Key.TOKENIZER_SCORES, scores)
    metadata.array(Key.TOKENIZER_TOKEN_TYPE, types)
    _add_special(metadata, files, vocab_size)
    _add_templates(metadata, files)
    metadata.boolean(Key.TOKENIZER_ADD_SPACE_PREFIX, False)


def _read(directory: Path) -> _Files:
    path = directory / "tokenizer.json"
    if not path.is_file():
        kind = "only a SentencePiece tokenizer" if (directory / "tokenizer.model").is_file() else ""
        reason = f"has {kind}, which is not supported" if kind else "has no tokenizer.json"
        raise ConvertError(f"{directory}: {reason}")
    content = read_json(path)
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise ConvertError(f"{path}: cannot be read as a tokenizer: {error}") from error
    if content["model"].get("type") != "BPE":
        raise ConvertError(f"{path}: is not a BPE tokenizer, others are not supported")
    return _Files(directory, tokenizer, content, read_object(directory / "tokenizer_config.json"))


def _types_in(value: Any) -> set[str]:
    """Returns all "type" values in a (nested) component of tokenizer.json."""
    if isinstance(value, list):
        return set().union(*map(_types_in, value))
    if not isinstance(value, dict):
        return set()
    own = {value["type"]} if isinstance(value.get("type"), str) else set()
    return own.union(*map(_types_in, value.values()))


def _content(entry: Any) -> str | None:
    """Returns the text of a special token, given as a string or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _looks_special(text: str) -> bool:
    """True for control tokens that some models add without the flag `special`."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _named_special(config: dict[str, Any]) -> set[str]:
    """Returns the texts of tokens with a special role in tokenizer_config.json."""
    entries = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        if not isinstance(extra, (list, dict)):
            raise ConvertError(f"tokenizer_config.json: {key!r} is {extra!r}, a list is needed")
        entries += extra.values() if isinstance(extra, dict) else extra
    return {text for text in map(_content, entries) if text is not None}


def _texts_by_id(files: _Files, vocab_size: int) -> dict[int, str]:
    by_id = {index: text for text, index in files.tokenizer.get_vocab(True).items()}
    highest = max(by_id, default=-1)
    if highest >= vocab_size:
        raise ConvertError(
            f"{files.directory}: the tokenizer has the token id {highest}, "
            f"but the model has vocab_size {vocab_size}"
        )
    return by_id


def _vocabulary(files: _Files, vocab_size: int) -> tuple[list[str], list[int]]:
    by_id = _texts_by_id(files, vocab_size)
    added = files.tokenizer.get_added_tokens_decoder()
    named = _named_special(files.config)
    tokens, types = [], []
    for index in range(vocab_size):
        text = by_id.get(index)
        kind = NORMAL
        if text is None:
            text, kind = f"[PAD{index}]", UNUSED
        elif index in added:
            entry = added[index]
            special = entry.special or text in named
            if not entry.normalized:
                # llama.cpp matches added tokens in normalised text, so their text is normalised.
                ids = files.tokenizer.encode(text, add_special_tokens=False).ids
                text = files.tokenizer.decode(ids, skip_special_tokens=False)
            kind = CONTROL if special or _looks_special(text) else USER_DEFINED
            if kind == USER_DEFINED:
                text = text.replace("\u2581", " ")
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _merges(files: _Files) -> list[str]:
    merges = files.json["model"].get("merges")
    if not merges:
        raise ConvertError(f"{files.directory}: tokenizer.json has no merges")
    if isinstance(merges[0], str):
        return list(merges)
    # GGUF separates the two parts of a merge by a space; a space in a part becomes U+0120.
    return [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]


def _template_flags(processor: dict[str, Any], roles: dict[str, str | None]) -> dict[str, bool]:
    """Returns flags: whether the TemplateProcessing step adds BOS, EOS and SEP to a text.

    If the step appends another token than EOS, that token becomes EOS, and the old EOS EOT.
    """
    flags: dict[str, bool] = {}
    single = [_special_id(item) for item in processor.get("single", [])]
    first = single[0] if len(single) > 1 else None
    last = single[-1] if len(single) > 1 else None
    if first is not None:
        roles["bos"] = roles["bos"] or first
        flags["bos"] = first in (roles["bos"], roles["cls"])
    if last is not None:
        if last != roles["eos"]:
            roles["eot"], roles["eos"] = roles["eos"], last
        flags["eos"] = True
    pair = processor.get("pair", [])
    if first is not None and pair and _special_id(pair[0]) == first:
        pair = pair[1:]
    if last is not None and pair and _special_id(pair[-1]) == last:
        pair = pair[:-1]
    between = [_special_id(item) for item in pair[1:-1]]
    if between and _is_sequence(pair[0], "A") and _is_sequence(pair[-1], "B"):
        separators = (roles["sep"], roles["eos"])
        flags["sep"] = (between[0] in separators and last is None) or (
            len(between) == 2 and between[1] in separators
        )
    return flags


def _special_id(item: dict[str, Any]) -> str | None:
    entry = item.get("SpecialToken", {}).get("id")
    return entry if isinstance(entry, str) else None


def _is_sequence(item: dict[str, Any], name: str) -> bool:
    return bool(item.get("Sequence", {}).get("id") == name)


def _add_special(metadata: Metadata, files: _Files, vocab_size: int) -> None:
    """Adds ids of the special tokens, and flags for adding them to a text."""
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "eot")
    roles = {name: _content(files.config.get(f"{name}_token")) for name in names}
    _note_lost_spaces(metadata, files)
    for name in names:
        if roles[name] is None and (lost := files.config.get(f"{name}_token")) is not None:
            metadata.notes.append(f"{name}_token is {lost!r:.80}, which is no text: it is left out")
    roles["bos"] = roles["bos"] or roles["cls"]
    roles["eos"] = roles["eos"] or roles["sep"]
    roles["eot"] = None  # set only if a TemplateProcessing replaces EOS
    flags: dict[str, bool] = {}
    post = files.json.get("post_processor") or {}
    for processor in post.get("processors", [post]):
        if processor.get("type") == "ByteLevel":
            flags = {"bos": False, "eos": False} | flags
        elif processor.get("type") == "TemplateProcessing":
            flags |= _template_flags(processor, roles)
    for name in ADD_KEYS:
        wanted = files.config.get(f"add_{name}_token")
        if isinstance(wanted, bool):
            flags.setdefault(name, wanted)
    config = Config(files.directory)
    is_llama = config.architecture == "LlamaForCausalLM"
    if is_llama and vocab_size == SMOLLM_VOCAB_SIZE:
        flags["bos"] = False
    for name, value in _special_ids(files, roles, config).items():
        if value >= vocab_size:
            raise ConvertError(
                f"{files.directory}: the {name} token has id {value}, "
                f"but the model has vocab_size {vocab_size}"
            )
        metadata.uint32(SPECIAL_ID_KEYS[name], value)
    _add_more_ends(metadata, files, config, vocab_size)
    for name, flag in flags.items():
        metadata.boolean(ADD_KEYS[name], flag)
    prefix = files.config.get("add_prefix_space")
    if is_llama and isinstance(prefix, bool):
        metadata.boolean(Key.TOKENIZER_ADD_SPACE_PREFIX, prefix)


def _add_more_ends(metadata: Metadata, files: _Files, config: Config, vocab_size: int) -> None:
    """Adds end tokens of generation_config.json that llama.cpp does not know by their text."""
    path = files.directory / "generation_config.json"
    given: Any = read_object(path).get("eos_token_id")
    if given is None:
        path, given = config.path, config.get("eos_token_id")
        # The tokenizer's EOS replaces a single eos_token_id of config.json.
        given = given if isinstance(given, list) else []
    ids = given if isinstance(given, list) else [given]
    if any(type(index) is not int for index in ids):
        raise ConvertError(f"{path}: eos_token_id is {given!r:.80}, token ids are needed")
    texts = {index: text for text, index in files.tokenizer.get_vocab(True).items()}
    kept = {value for key, (_, value) in metadata.values.items() if key in END_KEYS}
    lost = [x for x in ids if x in range(vocab_size) and x not in kept]
    lost = [x for x in dict.fromkeys(lost) if texts.get(x) not in END_TEXTS]
    for key in END_KEYS:
        if lost and key not in metadata.values:
            metadata.uint32(key, lost.pop(0))
    if lost:
        metadata.notes.append(
            f"end tokens {lost} of eos_token_id cannot be stored in GGUF, which holds "
            f"{len(END_KEYS)}: give them as stop texts"
        )


def _special_ids(files: _Files, roles: dict[str, str | None], config: Config) -> dict[str, int]:
    """Returns ids of special tokens from the tokenizer's files, else from config.json."""
    added: dict[str, int] = {}
    for entry in files.json.get("added_tokens") or []:
        added.setdefault(entry["content"], entry["id"])
    result: dict[str, int] = {}
    for name in SPECIAL_ID_KEYS:
        text = roles[name]
        value = added.get(text) if text is not None else None
        if value is None and (name != "eot" or text is not None):
            value = config.get(f"{name}_token_id")
        # Some configs list several EOS ids; then the tokenizer's own EOS is used.
        if type(value) is int and value >= 0:
            result[name] = value
    return result


def _add_templates(metadata: Metadata, files: _Files) -> None:
    """Adds the chat template, and each further template under a key with its name."""
    template = _template(files)
    if template is None:
        return
    if isinstance(template, str):
        metadata.string(Key.TOKENIZER_CHAT_TEMPLATE, template)
        return
    named: dict[str, str] = {}
    for name, text in template.items():
        ascii_name = "".join(c if c in ascii_letters + digits else "_" for c in name)
        if ascii_name in named:
            metadata.notes.append(
                f"the chat template {name!r} is left out: an earlier one is {ascii_name!r} too"
            )
        named.setdefault(ascii_name, text)
    default = named.pop("default", None)
    for name, text in named.items():
        metadata.string(f"{Key.TOKENIZER_CHAT_TEMPLATE}.{name}", text)
    metadata.array(Key.TOKENIZER_CHAT_TEMPLATES, list(named))
    if default is not None:
        metadata.string(Key.TOKENIZER_CHAT_TEMPLATE, default)


def _template(files: _Files) -> str | dict[str, str] | None:
    """Returns one chat template, or several by name: those that transformers takes.

    chat_template.jinja goes before tokenizer_config.json, and that before chat_template.json.
    """
    jinja = files.directory / "chat_template.jinja"
    found: Any = _text_of(jinja) if jinja.is_file() else files.config.get("chat_template")
    if found is None:
        found = read_object(files.directory / "chat_template.json").get("chat_template")
    more = sorted((files.directory / "additional_chat_templates").glob("*.jinja"))
    if isinstance(found, list) and all(isinstance(choice, dict) for choice in found):
        found = {choice.get("name"): choice.get("template") for choice in found}
    if more and (found is None or isinstance(found, str)):
        found = {} if found is None else {"default": found}
    if isinstance(found, dict):
        found |= {path.stem: _text_of(path) for path in more}
    if found is None:
        return None
    texts = (*found, *found.values()) if isinstance(found, dict) else (found,)
    if not all(isinstance(text, str) for text in texts):
        raise ConvertError(
            f"{files.directory}: chat_template is {found!r:.80}, a text or a list of names and "
            "templates is needed"
        )
    templates: str | dict[str, str] | None = found
    return templates


def _text_of(path: Path) -> str:
    check_link(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConvertError(f"{path}: is not valid UTF-8") from None
