"""Runs GGUF language models faster with the same output, by DFlash speculative decoding."""

from .core import Error, devices, ggml_version

__all__ = ["Error", "devices", "ggml_version"]
