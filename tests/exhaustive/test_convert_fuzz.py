"""Mutated checkpoint folders are converted, or refused with a ConvertError."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_drafter, make_target
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.write import header_bytes

LONG = pytest.param(1000, marks=pytest.mark.full)
VALUES = (None, True, 0, -1, 3, 10**12, 1e30, 0.5, "", "x", [], {}, [1], ["a"], {"a": 1}, [[]])
VALUES += (float("nan"), [None], "full_attention", {"type": "yarn"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values in a JSON document, except inside lists of 50 and more."""
    items: Any = []
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and len(value) < 50:
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutate(document: Any, rng: random.Random) -> None:
    *path, last = rng.choice(list(places(document)))
    for key in path:
        document = document[key]
    if isinstance(document, dict) and rng.random() < 0.3:
        del document[last]
    else:
        document[last] = rng.choice(VALUES)


def outcome(directory: Path, target: Path | None) -> str:
    """Returns the message of the refusal, or an empty string if the folder converts."""
    try:
        planned = prepare(directory, "q4_k_m", Options(target_model_dir=target), "qwen2")
        header_bytes(planned.metadata, planned.plans, planned.types)
    except ConvertError as error:
        return str(error)
    return ""


@pytest.fixture(params=["llama", "qwen3moe", "qwen35", "drafter"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path | None]:
    if request.param == "drafter":
        target = make_target(tmp_path / "target", "qwen35")
        return make_drafter(tmp_path / "model", target), target
    return make_target(tmp_path / "model", request.param), None


@pytest.mark.parametrize("n_mutations", [120, LONG])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_mutated_json(folders: tuple[Path, Path | None], name: str, n_mutations: int) -> None:
    directory, target = folders
    rng = random.Random(f"{directory.name} {name}")
    path = next(d / name for d in (directory, target) if d is not None and (d / name).is_file())
    original = path.read_text()
    refused = 0
    for _ in range(n_mutations):
        document = json.loads(original)
        mutate(document, rng)
        path.write_text(json.dumps(document))
        sentence = outcome(directory, target)
        assert "\n" not in sentence
        refused += sentence != ""
    assert refused < n_mutations


@pytest.mark.parametrize("n_mutations", [120, LONG])
def test_mutated_safetensors(folders: tuple[Path, Path | None], n_mutations: int) -> None:
    directory, target = folders
    path = directory / "model.safetensors"
    original = path.read_bytes()
    n_header = 8 + int.from_bytes(original[:8], "little")
    rng = random.Random(5)
    refused = 0
    for _ in range(n_mutations):
        data = bytearray(original)
        data[rng.randrange(n_header)] = rng.randrange(256)
        path.write_bytes(data)
        refused += outcome(directory, target) != ""
    assert refused > n_mutations // 2
