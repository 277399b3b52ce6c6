"""Hugging Face model folder: config.json and the tensors of its safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .errors import ConvertError, check_file, check_link
from .safetensors import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises ConvertError if it is missing or malformed."""
    try:
        check_file(path)
        check_link(path)
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path}: is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty without the file; ConvertError for other content."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ConvertError(f"{path}: is not a JSON object")
    return content


def is_number(value: Any) -> bool:
    """True if a JSON value is a finite number."""
    return type(value) in (int, float) and abs(value) < math.inf


class Config:
    """config.json with typed access; keys of `text_config` replace those of the top level."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "config.json"
        if not self.path.is_file():
            raise ConvertError(f"{directory}: not a model folder (it has no config.json)")
        raw = read_json(self.path)
        if not isinstance(raw, dict):
            raise ConvertError(f"{self.path}: is not a JSON object")
        text = raw.get("text_config")
        self.values: dict[str, Any] = {**raw, **text} if isinstance(text, dict) else raw

    @property
    def architecture(self) -> str:
        """Name of the model class, the first of `architectures`, for example "Qwen3ForCausalLM"."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ConvertError(f"{self.path}: names no model class in 'architectures'")
        return names[0]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or `default` if it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, maximum: int = 1 << 31) -> int:
        """Returns an integer setting; raises ConvertError if it is missing or not in 1..maximum."""
        value = self.get(key, default)
        if value is None:
            raise ConvertError(f"{self.path}: lacks {key!r}")
        if type(value) is not int or not 1 <= value <= maximum:
            raise ConvertError(
                f"{self.path}: {key!r} is {value!r}, an integer from 1 to {maximum} is needed"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a setting that is a finite number; ConvertError for a missing or other value."""
        value = self.get(key, default)
        if value is None:
            raise ConvertError(f"{self.path}: lacks {key!r}")
        if not is_number(value):
            raise ConvertError(f"{self.path}: {key!r} is {value!r}, a number is needed")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """Returns a JSON object, empty if the key is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ConvertError(f"{self.path}: {key!r} is {value!r}, an object is needed")
        return value


class Checkpoint:
    """Config and tensors of a model folder. Tensor names lose the prefix `language_model.`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = Config(directory)
        method = self.config.mapping("quantization_config").get("quant_method")
        if self.config.get("quantization_config") is not None and method != "mxfp4":
            raise ConvertError(
                f"{self.config.path}: the checkpoint is already quantised "
                f"('quantization_config' names {method!r}, only 'mxfp4' can be taken over); "
                "convert the original weights"
            )
        self.files = _open_files(directory)
        self._where: dict[str, tuple[SafetensorsFile, str]] = {}
        for file in self.files:
            for name in file.entries:
                short = name.replace("language_model.", "")
                if short.startswith("model.mtp."):
                    short = short.removeprefix("model.")
                if short in self._where:
                    other = self._where[short][0].path
                    raise ConvertError(f"{file.path}: tensor {name!r} is also in {other.name}")
                self._where[short] = (file, name)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, row-major."""
        file, original = self._where[name]
        return file.entries[original].shape

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor in the terms of safetensors, for example "BF16"."""
        file, original = self._where[name]
        return file.entries[original].dtype

    def view(self, name: str, *, packed: bool = False) -> NDArray[Any]:
        """Returns a zero-copy view of a tensor; see SafetensorsFile.view."""
        file, original = self._where[name]
        return file.view(original, packed=packed)

    def release(self) -> None:
        """Releases the mapped pages of all files; see SafetensorsFile.release."""
        for file in self.files:
            file.release()


def _open_files(directory: Path) -> list[SafetensorsFile]:
    index = directory / INDEX_NAME
    if index.is_file():
        return _open_shards(directory, index)
    single = directory / "model.safetensors"
    if single.is_file():
        return [SafetensorsFile(single)]
    shards = sorted(directory.glob("model-*.safetensors"))
    if shards:
        raise ConvertError(f"{directory}: has {shards[0].name} but no {INDEX_NAME}")
    raise ConvertError(f"{directory}: has no safetensors weights (model.safetensors or shards)")


def _open_shards(directory: Path, index: Path) -> list[SafetensorsFile]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(f"{index}: has no 'weight_map'")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConvertError(f"{index}: names the shard {shard!r}, a file name is needed")
        if not (directory / shard).is_file():
            raise ConvertError(f"{directory}: the shard {shard} is missing")
    files = [SafetensorsFile(directory / shard) for shard in sorted(set(weight_map.values()))]
    found = {name: file.path.name for file in files for name in file.entries}
    for name, shard in weight_map.items():
        if found.get(name) != shard:
            raise ConvertError(
                f"{directory / shard}: lacks {name!r}, which {INDEX_NAME} places there"
            )
    for name, shard in found.items():
        if name not in weight_map:
            raise ConvertError(f"{directory / shard}: has {name!r}, which {INDEX_NAME} lacks")
    return files
