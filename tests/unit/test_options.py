"""Types of settings by name, the names of the package, and retired ones."""

from __future__ import annotations

from dataclasses import fields

import pytest

import dflash_gguf
from dflash_gguf.config import DecodeConfig, LoadConfig
from dflash_gguf.options import DecodeOptions, LoadOptions


@pytest.mark.parametrize(
    ("options", "config"), [(LoadOptions, LoadConfig), (DecodeOptions, DecodeConfig)]
)
def test_options_have_the_fields_of_their_config(options: type, config: type) -> None:
    declared = {x.name: x.type for x in fields(config)}
    assert {name: x.__forward_arg__ for name, x in options.__annotations__.items()} == declared


def test_public_names_are_listed_before_they_are_used() -> None:
    assert set(dflash_gguf.__all__) <= set(dir(dflash_gguf))
    for name in dflash_gguf.__all__:
        assert getattr(dflash_gguf, name) is not None
