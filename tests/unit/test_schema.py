"""Names in schema.py equal those of the gguf package."""

from __future__ import annotations

import re

import gguf
import pytest
from dflash_gguf.convert import schema

# Names that gguf 0.19 lacks. Source: src/llama-arch.cpp and older drafter files.
KEYS_BEYOND_GGUF = re.compile(
    r"OLD_|TARGET_LAYERS|BLOCK_SIZE|CONV_(KERNEL|GROUP)_SIZE|SELECTOR_|SAMPLE_FROM_ANCHOR"
    r"|HAS_CONFIDENCE_HEAD|HIDDEN_ACTIVATION|ROPE_SCALE_LINEAR|YARN_TRUNCATE|ATTENTION_RECURRENT_LAYERS"
    r"|TOKENIZER_SUPPRESS_TOKENS|TOKENIZER_CLS_ID|ATTENTION_VALUE_SCALE|HYPER_CONNECTION|SWIGLU_CLAMP"
    r"|CLASSIFIER_POOLING_TYPE"
)
TENSORS_BEYOND_GGUF = re.compile(
    r"OLD_|MARKOV|CONF_PROJ|CONV_BASE|CONV_PROJ|SELECTOR|FC(_SCALE)?$|D2T|NGRAM"
)


def gguf_strings(root: type) -> set[str]:
    found: set[str] = set()
    for value in vars(root).values():
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, type):
            found |= gguf_strings(value)
    return found


@pytest.mark.parametrize("name", schema.names_of(schema.Key))
def test_keys_are_those_of_the_gguf_package(name: str) -> None:
    known = schema.names_of(schema.Key)[name] in gguf_strings(gguf.Keys)
    assert known or KEYS_BEYOND_GGUF.search(name)


@pytest.mark.parametrize("name", schema.names_of(schema.Tensor))
def test_tensors_are_those_of_the_gguf_package(name: str) -> None:
    base = re.sub(r"\.(weight|bias|scale)$", "", schema.names_of(schema.Tensor)[name])
    assert base in gguf.TENSOR_NAMES.values() or TENSORS_BEYOND_GGUF.search(name)


def test_architectures_are_those_of_the_gguf_package() -> None:
    arches = schema.names_of(schema.Arch)
    unknown = {
        name for name, value in arches.items() if value not in gguf.MODEL_ARCH_NAMES.values()
    }
    assert unknown <= {"DFLASH", "NGRAM", "OLD_DFLASH", "OLD_QWEN35_DFLASH", "OLD_GEMMA4_DFLASH"}


@pytest.mark.parametrize("group", [schema.Arch, schema.Key, schema.Tensor])
def test_no_name_is_defined_twice(group: type) -> None:
    values = list(schema.names_of(group).values())
    assert len(values) == len(set(values))
