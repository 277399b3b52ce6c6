"""Base or instruct: the variants of a target and of its drafter, by what their files say.

The end token does not tell them apart: a drafter of the right variant may have another one.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import NamedTuple

from ..convert.schema import Key
from .gguf_metadata import GgufMetadata

BASE, INSTRUCT = "base", "instruct"
MARKS = {
    **dict.fromkeys(("base", "pt", "pretrain", "pretrained"), BASE),
    **dict.fromkeys(("instruct", "it", "chat", "thinking", "sft", "dpo", "rlhf"), INSTRUCT),
}
"""Words of names that tell the variant: Qwen3-8B-Base, gemma-3-27b-it, Llama-2-7b-chat-hf."""
_EMPTY_WORDS = re.compile(r"meta|hf|gguf|draft(er)?|b\d+|i?q\d\w*|k|[sm]|bf16|f16|f32")
"""Words left out when names of a model, its files and its drafter are compared, such as q8_0."""


class Name(NamedTuple):
    """A name in a GGUF file. key: its metadata key. is_model: False if it names a drafter."""

    key: str
    text: str
    is_model: bool

    @property
    def variant(self) -> str | None:
        """The variant that a word of the name tells; None without such a word."""
        found = [MARKS[word] for word in _words(self.text) if word in MARKS]
        return INSTRUCT if INSTRUCT in found else BASE if found else None

    @property
    def family(self) -> tuple[str, ...]:
        """The name without the words that tell the variant, the file or the drafter."""
        words = itertools.takewhile(lambda word: word != "dflash", _words(self.text))
        return tuple(x for x in words if x not in MARKS and not _EMPTY_WORDS.fullmatch(x))


class Evidence(NamedTuple):
    """A variant, and the words that say why."""

    variant: str
    reason: str


def variant_of(path: str | os.PathLike[str]) -> Evidence:
    """Returns the variant of a model: by its names, else by whether it has a chat template.

    Errors: OSError; ValueError for a damaged file.
    """
    with GgufMetadata(path) as file:
        names, ancestors = _own_names(file, True), _base_models(file)
        has_template = Key.TOKENIZER_CHAT_TEMPLATE in file.entries
    by_template = (
        Evidence(INSTRUCT, "it has a chat template")
        if has_template
        else Evidence(BASE, "it has no chat template")
    )
    return _marked(names) or _fine_tuned(names, ancestors) or by_template


def mismatch(target: str | os.PathLike[str], drafter: str | os.PathLike[str]) -> str | None:
    """Returns a sentence if the drafter was probably made for the target's other variant.

    Compares general.finetune, general.name, the base models and whether there is a chat template.
    Errors: OSError; ValueError for a damaged file.
    """
    with GgufMetadata(target) as of_target, GgufMetadata(drafter) as of_drafter:
        names = _own_names(of_target, True)
        ancestors = _base_models(of_target)
        drafter_names = [*_own_names(of_drafter, False), *_base_models(of_drafter)]
        has_template, drafter_has_template = (
            Key.TOKENIZER_CHAT_TEMPLATE in file.entries for file in (of_target, of_drafter)
        )
    mine = _marked(names) or _fine_tuned(names, ancestors)
    theirs = _marked(drafter_names)
    mine = mine or _unmarked(names, drafter_names)
    theirs = theirs or _unmarked(drafter_names, names)
    if not has_template:
        if theirs is None and drafter_has_template:
            theirs = Evidence(INSTRUCT, "it has a chat template")
        mine = mine or Evidence(BASE, "it has no chat template")
    if mine is None or theirs is None or mine.variant == theirs.variant:
        return None
    return (
        f"the drafter {os.fspath(drafter)} is for a model of the variant {theirs.variant} "
        f"({theirs.reason}), the model {os.fspath(target)} is {mine.variant} ({mine.reason}): "
        "expect low acceptance; use the drafter of this variant"
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _own_names(file: GgufMetadata, is_model: bool) -> list[Name]:
    found = [(key, file.text(key)) for key in (Key.GENERAL_FINETUNE, Key.GENERAL_NAME)]
    return [Name(key, text, is_model) for key, text in found if text]


def _base_models(file: GgufMetadata) -> list[Name]:
    names = []
    for key in file.entries:
        if re.fullmatch(r"general\.base_model\.\d+\.(name|repo_url)", key):
            text = (file.text(key) or "").rstrip("/").rpartition("/")[2]
            names.append(Name(key, text, "dflash" not in _words(text)))
    return names


def _marked(names: list[Name]) -> Evidence | None:
    for name in names:
        if (variant := name.variant) is not None:
            return Evidence(variant, f'{name.key} is "{name.text}"')
    return None


def _fine_tuned(names: list[Name], ancestors: list[Name]) -> Evidence | None:
    """Returns INSTRUCT for a model, such as Qwen3-8B, that was fine-tuned from its base."""
    for name, ancestor in itertools.product(names, ancestors):
        if ancestor.variant == BASE and name.family == ancestor.family:
            return Evidence(INSTRUCT, f'{ancestor.key} is "{ancestor.text}"')
    return None


def _unmarked(names: list[Name], others: list[Name]) -> Evidence | None:
    """Judges names that tell no variant by names that do: Qwen3-8B beside Qwen3-8B-Base.

    A drafter's name may leave out that its model is an instruct model, as most are.
    """
    for name, other in itertools.product(names, others):
        if name.key == Key.GENERAL_FINETUNE or not name.family or name.family != other.family:
            continue
        if other.variant == BASE or (other.variant == INSTRUCT and name.is_model):
            variant = INSTRUCT if other.variant == BASE else BASE
            return Evidence(variant, f'{name.key} is "{name.text}"')
    return None
