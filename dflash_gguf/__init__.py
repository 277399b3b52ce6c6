"""Runs GGUF language models faster with the same output, by DFlash speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import DecodeConfig, LoadConfig
from .core import Error, devices, ggml_version
from .results import Result, Step

if TYPE_CHECKING:
    from .decoder import Decoder, Stream, load

__all__ = [
    "DecodeConfig",
    "Decoder",
    "Error",
    "LoadConfig",
    "Result",
    "Step",
    "Stream",
    "devices",
    "ggml_version",
    "load",
]


def __getattr__(name: str) -> Any:
    """The decoder on first use: it opens llama.cpp's library, which a converter does not need."""
    if name in ("Decoder", "Stream", "load"):
        from . import decoder

        return getattr(decoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
