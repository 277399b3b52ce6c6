"""Sampling settings that a model's author recommends, from the model's file."""

from __future__ import annotations

import os
import warnings

from ..config import DecodeConfig
from ..convert.schema import Key
from .gguf_metadata import GgufMetadata

KEYS = {
    "temperature": Key.GENERAL_SAMPLING_TEMP,
    "top_k": Key.GENERAL_SAMPLING_TOP_K,
    "top_p": Key.GENERAL_SAMPLING_TOP_P,
    "min_p": Key.GENERAL_SAMPLING_MIN_P,
    "repeat_penalty": Key.GENERAL_SAMPLING_PENALTY_REPEAT,
    "repeat_last_n": Key.GENERAL_SAMPLING_PENALTY_LAST_N,
}
"""Metadata keys by the fields of DecodeConfig that they recommend."""


def recommended_sampling(path: str | os.PathLike[str]) -> dict[str, float]:
    """Returns the recommended values of DecodeConfig's fields by name; {} if there are none.

    Leaves out values that DecodeConfig refuses, with a UserWarning. Errors: as for GgufMetadata.
    """
    found: dict[str, float] = {}
    with GgufMetadata(path) as file:
        for name, key in KEYS.items():
            try:
                if (value := file.number(key)) is not None:
                    DecodeConfig(**{name: value})  # type: ignore[arg-type]
                    found[name] = value
            except ValueError as error:
                warnings.warn(f"{key} of {path} is ignored: {error}", stacklevel=2)
    return found
