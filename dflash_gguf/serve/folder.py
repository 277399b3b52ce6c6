"""Models in a folder: which files are sound, their drafters and their names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..convert.errors import ConvertError
from ..convert.gguf_header import GgufHeader, read_parts
from ..convert.schema import DRAFTERS, Arch, Key, Tensor

LAST_USED = "any"
"""Model name in a request that stands for the model used last."""
MODEL, MTP = "model", "mtp"
LEFT_OUT = Callable[[Path, str], None]
"""Called with each file that is not served, and the reason."""
SPLIT_NAME = re.compile(r"-\d{5}-(of-\d{5}\.gguf)$")
TARGETS = {name for key, name in vars(Arch).items() if key.isupper()} - {Arch.CLIP, *DRAFTERS}


@dataclass(frozen=True)
class FoundModel:
    """A model in a folder, its name and its drafters."""

    name: str
    path: Path
    drafters: tuple[Path, ...] = ()


def check(path: Path) -> GgufHeader:
    """Returns the header of a complete model file. ValueError says what is wrong with the file."""
    try:
        str(path).encode()
        path.stat()
        first, *others = read_parts(path)
    except UnicodeEncodeError:
        raise ValueError("the name is not UTF-8, as responses need it: rename it") from None
    except OSError as error:
        dangling = f"is a link to {os.readlink(path)}: " if path.is_symlink() else ""
        raise ValueError(f"{dangling}{error.strerror}") from None
    except ConvertError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None
    for part in (first, *others):
        if part.missing_bytes:
            name = "" if part is first else f"its part {part.path.name} "
            raise ValueError(
                f"{name}is incomplete, {part.missing_bytes} of {part.needed_bytes} bytes are "
                "missing"
            )
    return first


def models_in_folder(folder: str | os.PathLike[str], leave_out: LEFT_OUT) -> list[FoundModel]:
    """Returns the models of a folder and its subfolders; calls leave_out for each bad file.

    Drafters of different kinds draft for the models of their subfolder.
    """
    found: list[FoundModel] = []
    taken = {LAST_USED}
    root = Path(folder)
    for path in sorted(root.iterdir(), key=lambda path: (path.is_dir(), path)):
        if path.is_dir():
            try:
                files = sorted(file for file in path.iterdir() if _is_gguf(file))
            except OSError as error:
                leave_out(path, str(error.strerror))
                continue
            models, drafters = _sorted(files, leave_out)
            names = [path.name] if len(models) == 1 else [f"{path.name}/{x.stem}" for x in models]
        elif _is_gguf(path):
            models, drafters = _sorted([path], leave_out)
            names = [path.stem] * len(models)
        else:
            continue
        for kind, files in list(drafters.items()):
            if models and len(files) == 1:
                continue
            why = f"is one of several {kind} drafters" if models else "is a drafter, not a model"
            for drafter in drafters.pop(kind):
                leave_out(drafter, f"{why}: name it with model-draft in a --models-preset")
        for name, model in zip(names, models, strict=True):
            relative = str(model.relative_to(root))
            free = (
                x for x in (name, relative.removesuffix(model.suffix), relative) if x not in taken
            )
            one_of_each = tuple(file for files in drafters.values() for file in files)
            found.append(FoundModel(next(free), model, one_of_each))
            taken.add(found[-1].name)
    return found


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.name.startswith(".")


def _sorted(files: list[Path], leave_out: LEFT_OUT) -> tuple[list[Path], dict[str, list[Path]]]:
    """Returns the targets among files, and the drafters by kind."""
    models: list[Path] = []
    drafters: dict[str, list[Path]] = {}
    for path in files:
        try:
            kind = _kind(path)
        except (ValueError, ConvertError) as error:
            leave_out(path, str(error))
            continue
        if kind == MODEL:
            models.append(path)
        elif kind is not None:
            drafters.setdefault(kind, []).append(path)
    return models, drafters


def _kind(path: Path) -> str | None:
    """Returns MODEL or the drafter's kind; None for a later part of a model. ValueError if bad."""
    header = check(path)
    if SPLIT_NAME.search(path.name) and header.integer(Key.SPLIT_NO, 0) > 0:
        if not path.with_name(SPLIT_NAME.sub(r"-00001-\1", path.name)).exists():
            raise ValueError("is a part of a split model whose first part is missing")
        return None
    kind = header.metadata.get(Key.GENERAL_ARCHITECTURE)
    name = kind.value if kind else None
    if name not in TARGETS and name not in DRAFTERS:
        what = "an image or audio projector" if name == Arch.CLIP else f"of architecture {name!r}"
        raise ValueError(f"is {what}, which cannot be run as a model")
    n_mtp = header.integer(Key.NEXTN_PREDICT_LAYERS.format(arch=name), 0)
    has_layers = Tensor.ATTN_NORM.format(bid=0) in header.tensors
    if name in DRAFTERS:
        return name
    return MTP if n_mtp > 0 and not has_layers else MODEL
