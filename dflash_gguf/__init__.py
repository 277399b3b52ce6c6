"""Runs GGUF language models faster with the same output, by DFlash speculative decoding."""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# A clone hides the installed package, which has the core and the converter: add its folder.
__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from .async_decoder import AsyncDecoder, AsyncStream
    from .config import DecodeConfig, LoadConfig
    from .decoder import Decoder
    from .loading import load
    from .memory.fit import Fit
    from .memory.plan import Plan
    from .native import Device, Error, devices, ggml_version
    from .outputs import Result, Step
    from .planning import fit, plan
    from .sampling.noise import TokenLogprobs
    from .stream import Stream

__all__ = [
    "AsyncDecoder",
    "AsyncStream",
    "DecodeConfig",
    "Decoder",
    "Device",
    "Error",
    "Fit",
    "LoadConfig",
    "Plan",
    "Result",
    "Step",
    "Stream",
    "TokenLogprobs",
    "__version__",
    "devices",
    "fit",
    "ggml_version",
    "load",
    "plan",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncDecoder": "async_decoder",
    "AsyncStream": "async_decoder",
    "DecodeConfig": "config",
    "Decoder": "decoder",
    "Device": "native",
    "Error": "native",
    "Fit": "memory.fit",
    "LoadConfig": "config",
    "Plan": "memory.plan",
    "Result": "outputs",
    "Step": "outputs",
    "Stream": "stream",
    "TokenLogprobs": "sampling.noise",
    "devices": "native",
    "fit": "planning",
    "ggml_version": "native",
    "load": "loading",
    "plan": "planning",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use.

    The decoder opens llama.cpp's library, which a converter lacks, and the entry points of the
    commands must be imported before a Ctrl-C.
    """
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names too that were not used yet, for completion."""
    return sorted({*globals(), *__all__})
