"""A target's GGUF in place of its model folder: the settings and the tokenizer of its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_gguf.text.gguf_metadata import GgufMetadata

from .checkpoint import Config
from .errors import ConvertError
from .gguf_header import ArrayValue, GgufHeader, read_header
from .plan import Metadata
from .schema import Key


class GgufConfig(Config):
    """The settings of a GGUF's model that a drafter depends on, by their names in config.json."""

    def __init__(self, path: Path) -> None:
        self.directory = self.path = path
        self.values = _settings(read_header(path))


def _settings(header: GgufHeader) -> dict[str, Any]:
    def of(key: str) -> Any:
        found = header.metadata.get(key.replace("{arch}", str(arch.value if arch else "")))
        return None if found is None else found.value

    arch = header.metadata.get(Key.GENERAL_ARCHITECTURE)
    tokens, sections = of(Key.TOKENIZER_TOKENS), of(Key.ROPE_DIMENSION_SECTIONS)
    settings = {"hidden_size": of(Key.EMBEDDING_LENGTH)}
    if type(n_blocks := of(Key.BLOCK_COUNT)) is int:
        settings["num_hidden_layers"] = n_blocks - (of(Key.NEXTN_PREDICT_LAYERS) or 0)
    if isinstance(tokens, ArrayValue):
        settings["vocab_size"] = tokens.count
    if isinstance(sections, ArrayValue) and any(sections.head):
        settings["rope_parameters"] = {"mrope_section": list(sections.head)}
    return settings


def copy_tokenizer(metadata: Metadata, path: Path) -> None:
    """Adds the tokenizer of a GGUF byte by byte."""
    try:
        with GgufMetadata(path) as found:
            for key in found.entries:
                if key.startswith("tokenizer."):
                    value = found.raw(key)[8 + len(key.encode()) :]
                    metadata.values[key] = ("raw", value)
    except ValueError as error:
        raise ConvertError(str(error)) from None
