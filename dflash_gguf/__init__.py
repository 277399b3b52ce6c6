"""Runs GGUF language models faster with the same output, by DFlash speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import DecodeConfig, LoadConfig
from .native import Error, devices, ggml_version
from .outputs import Result, Step

if TYPE_CHECKING:
    from .decoder import Decoder
    from .loading import load
    from .stream import Stream

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


_HOMES = {"Decoder": "decoder", "Stream": "stream", "load": "loading"}


def __getattr__(name: str) -> Any:
    """Imports the decoder on first use only: the converter runs without llama.cpp's library."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
