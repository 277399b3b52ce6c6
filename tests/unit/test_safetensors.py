"""Safetensors headers: views of tensors, and an error for each kind of damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.plan import to_float32
from dflash_gguf.convert.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from safetensors.numpy import save_file


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_views_equal_the_saved_values_without_a_copy(tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(1)
    shapes = {"a": (3, 5), "b": (2, 2, 4), "empty": (0, 4)}
    expected, header, data = {}, {"__metadata__": {"format": "pt"}}, b""
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float16 if dtype == "F16" else np.float32)
        stored = values
        if dtype == "BF16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
            values = (stored.astype(np.uint32) << 16).view(np.float32)
        expected[name] = values.astype(np.float32)
        header[name] = entry(len(data), len(data) + stored.nbytes, dtype, list(shape))
        data += stored.tobytes()
    file = SafetensorsFile(written(tmp_path / "m.safetensors", header, data))
    assert set(file.entries) == set(shapes)
    for name, values in expected.items():
        view = file.view(name)
        assert view.shape == values.shape
        assert not view.flags.writeable or view.size == 0
        np.testing.assert_array_equal(to_float32(view), values)


def test_pages_can_be_released_and_read_again(tmp_path: Path) -> None:
    save_file({"a": np.arange(5000.0, dtype=np.float32)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    view = file.view("a")
    before = view.sum()
    file.release()
    assert view.sum() == before


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "header beyond the file": (None, struct.pack("<Q", 1000) + b"{}", "header of 1000 bytes, but"),
    "huge header": (None, struct.pack("<Q", 1 << 40) + b"{}", f"limit is {MAX_HEADER_BYTES}"),
    "shorter than its length field": (None, b"\1\2\3", "shorter than the 8 bytes"),
    "empty": (None, b"", "shorter than the 8 bytes"),
    "not JSON": (b"{nonsense", b"", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not JSON"),
    "deep nesting": (b"[" * 200000, b"", "not JSON"),
    "a number of a million digits": (b'{"a": {"shape": [' + b"9" * 10**6 + b"]}}", b"", "not JSON"),
    "many names": (
        b"{%s}" % b",".join(b'"%d": 0' % min(n, 39998) for n in range(40000)),
        b"",
        "'39998' occurs twice",
    ),
    "not an object": ([1, 2], b"", "not a JSON object"),
    "name twice": (
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},'
        b' "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b"",
        "'a' occurs twice",
    ),
    "data beyond the file": ({"a": entry(0, 16)}, bytes(8), "'a' ends at byte"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "'a' and 'b' overlap"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "4 unused bytes before 'b'"),
    "trailing bytes": ({"a": entry(0, 4)}, bytes(9), "5 unused bytes at the end"),
    "wrong size": ({"a": entry(0, 8, shape=[3])}, bytes(8), r"takes 8 bytes, but F32 \[3\]"),
    "negative offset": ({"a": entry(-4, 0, shape=[1])}, bytes(4), "data_offsets"),
    "negative shape": ({"a": entry(0, 4, shape=[-1, -1])}, bytes(4), "invalid shape"),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4, 8]}},
        bytes(4),
        "data_offsets",
    ),
    "boolean shape": ({"a": entry(0, 4, shape=[True])}, bytes(4), "invalid shape"),
    "entry is no object": ({"a": 7}, b"", "unknown dtype None"),
    "unknown dtype": ({"a": entry(0, 4, dtype="F5")}, bytes(4), "unknown dtype 'F5'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    header, data, message = DAMAGED[damage]
    path = tmp_path / "m.safetensors"
    if header is None:
        path.write_bytes(data)
    else:
        written(path, header, data)
    with pytest.raises(ConvertError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    save_file(
        {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}, tmp_path / "m.safetensors"
    )
    whole = (tmp_path / "m.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(ConvertError):
            SafetensorsFile(tmp_path / "cut.safetensors")


def test_a_tensor_that_is_no_float_is_refused_when_used(tmp_path: Path) -> None:
    save_file({"ids": np.arange(4)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    with pytest.raises(ConvertError, match="'ids' has dtype I64; weights must be one of"):
        file.view("ids")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="cannot be read: No such file"):
        SafetensorsFile(tmp_path / "absent.safetensors")
