"""Metadata of whole files compared with the gguf package, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_gguf.text.gguf_metadata import GgufMetadata


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("name", "größe")
    writer.add_array("words", ["a", "", "zwölf"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_values_come_back(file: Path) -> None:
    with GgufMetadata(file) as metadata:
        assert metadata.text("general.architecture") == "llama"
        assert metadata.text("name") == "größe"
        assert metadata.integer("u8") == 200
        assert metadata.integer("i64") == -(2**40)
        assert metadata.boolean("yes") is True
        assert metadata.texts("words") == [b"a", b"", "zwölf".encode()]
        assert np.array_equal(metadata.array("ints", "int32"), [1, -2, 3])
        assert np.array_equal(metadata.array("floats", "float64", "float32"), [0.5, 1.5])
        assert "words" in metadata
        for read in (metadata.text, metadata.integer, metadata.boolean, metadata.texts):
            assert read("none") is None
        assert metadata.array("none", "int32") is None


def test_entries_can_be_copied_into_another_file(file: Path, tmp_path: Path) -> None:
    with GgufMetadata(file) as metadata:
        entries = [metadata.raw(key) for key in ("words", "name", "ints")]
    copy = tmp_path / "b.gguf"
    copy.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 3) + b"".join(entries))
    with GgufMetadata(copy) as metadata:
        assert metadata.texts("words") == [b"a", b"", "zwölf".encode()]
        assert metadata.text("name") == "größe"


@pytest.mark.parametrize(
    ("read", "key", "sentence"),
    [
        ("text", "u8", "u8 is uint8, expected string"),
        ("boolean", "name", "name is string, expected bool"),
        ("integer", "f64", "f64 is float64, expected an integer"),
        ("integer", "yes", "yes is bool, expected an integer"),
        ("texts", "ints", "ints is array of int32, expected array of string"),
        ("array", "words", "words is array of string, expected array of int32"),
        ("array", "u8", "u8 is uint8, expected array of int32"),
    ],
)
def test_other_types_are_refused(file: Path, read: str, key: str, sentence: str) -> None:
    with GgufMetadata(file) as metadata, pytest.raises(ValueError) as caught:
        getattr(metadata, read)(key, *(["int32"] if read == "array" else []))
    assert str(caught.value) == f"{file}: {sentence}"


def header(n_entries: int, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, 0, n_entries)


def entry(key: bytes, code: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", code) + value


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "has 0 bytes, too short for a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file (it begins with b'PK"),
        (header(0, version=1), "has GGUF version 1, expected little-endian version 2 or 3"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is big-endian, expected little-endian"),
        (header(1), "is truncated or damaged, its metadata needs 8 bytes at offset 24 of 24"),
        (header(2**60) + entry(b"a", 4, bytes(4)), "is truncated or damaged"),
        (header(1) + struct.pack("<Q", 2**63), "is truncated or damaged"),
        (header(1) + entry(b"a", 99, bytes(8)), "a is of unknown type 99"),
        (header(1) + entry(b"a", 9, struct.pack("<IQ", 9, 1)), "a is an array of arrays"),
        (header(1) + entry(b"a", 9, struct.pack("<IQ", 5, 2**62)), "is truncated or damaged"),
        (header(1) + entry(b"a", 9, struct.pack("<IQ", 8, 2**62)), "is truncated or damaged"),
        (
            header(1) + entry(b"a", 9, struct.pack("<IQQ", 8, 2, 2**64 - 8) + bytes(8)),
            "is truncated or damaged within a",
        ),
        (header(2) + 2 * entry(b"a", 4, bytes(4)), "a occurs twice"),
        (header(1) + entry(b"\xff", 4, bytes(4)), "a metadata key is not valid UTF-8"),
        (header(1) + entry(b"k" * 70000, 4, bytes(4)), "a metadata key has 70000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, sentence: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        GgufMetadata(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_a_value_that_is_not_utf8_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(1) + entry(b"a", 8, struct.pack("<Q", 1) + b"\xff"))
    with GgufMetadata(path) as metadata, pytest.raises(ValueError, match="a is not valid UTF-8"):
        metadata.text("a")


def test_every_truncation_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    with GgufMetadata(file) as metadata:
        end = max(entry.end for entry in metadata.entries.values())
    path = tmp_path / "short.gguf"
    for size in range(end):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError):
            GgufMetadata(path)


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a file but a folder"):
        GgufMetadata(tmp_path)
    with pytest.raises(FileNotFoundError):
        GgufMetadata(tmp_path / "none.gguf")
