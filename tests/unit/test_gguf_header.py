"""The GGUF header parser and --inspect: valid, truncated and malformed files."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.gguf_header import ArrayValue, read_header
from dflash_gguf.convert.inspect import inspect


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def uint32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def row(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """Returns a tensor's header entry; `shape` in ggml's order."""
    dims = struct.pack(f"<I{len(shape)}q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", type_id, offset)


def header(
    values: list[bytes], rows: list[bytes], *, version: int = 3, counts: tuple[int, int] = (0, 0)
) -> bytes:
    n_rows, n_values = counts[0] or len(rows), counts[1] or len(values)
    start = b"GGUF" + struct.pack("<Iqq", version, n_rows, n_values)
    return b"".join([start, *values, *rows])


def good() -> bytes:
    """Returns a file with tensors F32 [4, 8] at offset 0 and F32 [5] at 128, then padding."""
    raw = header(
        [text("general.architecture") + struct.pack("<I", 8) + text("llama")],
        [row("a.weight", (8, 4), 0, 0), row("b.weight", (5,), 0, 128)],
    )
    return raw + bytes(-len(raw) % 32) + bytes(128 + 20)


def read(tmp_path: Path, raw: bytes) -> Any:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    return read_header(path)


def test_reads_what_gguf_py_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("f", 0.5)
    writer.add_bool("flag", True)
    writer.add_uint64("long", 1 << 40)
    writer.add_array("words", [f"w{i}" for i in range(1000)])
    writer.add_array("numbers", [1, -2, 3])
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("t.weight", values)
    writer.add_tensor("q.weight", gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = read_header(path)
    values_of = {key: entry.value for key, entry in found.metadata.items()}
    assert values_of["general.architecture"] == "llama"
    assert (values_of["f"], values_of["flag"], values_of["long"]) == (0.5, True, 1 << 40)
    assert values_of["words"] == ArrayValue(1000, tuple(f"w{i}" for i in range(512)))
    assert values_of["numbers"] == ArrayValue(3, (1, -2, 3))
    assert found.metadata["numbers"].type == "int32"
    tensor = found.tensors["t.weight"]
    raw = path.read_bytes()[tensor.start : tensor.start + tensor.n_bytes]
    assert tensor.shape == (2, 32)
    assert raw == values.tobytes()
    assert found.tensors["q.weight"].n_bytes == 2 * 34
    assert found.missing_bytes == 0


@pytest.mark.parametrize("cut", [1, 20, 21, 148])
def test_a_cut_file_is_named_truncated(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(good()[:-cut])
    found = read_header(path)
    assert found.missing_bytes == cut
    assert "TRUNCATED" in inspect(path)
    n_cut = 1 if cut <= 20 else 2
    assert f"{n_cut} of 2 tensors are cut off" in inspect(path)


def test_a_file_without_tensors_lacks_none(tmp_path: Path) -> None:
    raw = header([uint32("general.alignment", 1 << 31)], [])
    assert read(tmp_path, raw).missing_bytes == 0
    assert "complete (0 bytes)" in inspect(tmp_path / "x.gguf")


def test_every_cut_of_the_header_is_an_error(tmp_path: Path) -> None:
    raw = good()
    end = raw.index(b"b.weight") + 8 + 4 + 8 + 4 + 8
    for length in range(end):
        with pytest.raises(ConvertError):
            read(tmp_path, raw[:length])
    assert read(tmp_path, raw[:end]).missing_bytes > 0


def test_every_flipped_byte_gives_a_header_or_a_sentence(tmp_path: Path) -> None:
    raw = good()
    n_errors = 0
    for position in range(len(raw) - 148):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            try:
                read(tmp_path, bytes(damaged))
                inspect(tmp_path / "x.gguf")
            except ConvertError as error:
                n_errors += 1
                assert "\n" not in str(error)
    assert n_errors > 100


NO_TENSOR: list[bytes] = []
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "magic": (lambda: b"ggml" + good()[4:], "not a GGUF file"),
    "version": (lambda: header([], [], version=1) + bytes(64), "has GGUF version 1"),
    "big-endian": (lambda: header([], [], version=3 << 24) + bytes(64), "big-endian"),
    "tensor count": (lambda: header([], [], counts=(1 << 60, 0)), "cannot hold them"),
    "value count": (lambda: header([], [], counts=(0, 1 << 60)), "cannot hold them"),
    "negative count": (lambda: header([], [], counts=(-1, 0)), "claims -1 tensors"),
    "key beyond the end": (
        lambda: header([struct.pack("<Q", 1 << 63) + bytes(20)], []),
        "claims 9223372036854775808 bytes",
    ),
    "key twice": (lambda: header([uint32("a", 1), uint32("a", 2)], []), "'a' twice"),
    "key not UTF-8": (
        lambda: header([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)], []),
        "not valid UTF-8",
    ),
    "value type": (lambda: header([text("a") + struct.pack("<II", 99, 0)], []), "unknown type 99"),
    "array type": (
        lambda: header([text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(32)], []),
        "array of the unknown type 9",
    ),
    "array length": (
        lambda: header([text("a") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(32)], []),
        "claims 2305843009213693952 elements",
    ),
    "string in a long array": (
        lambda: header(
            [
                text("a") + struct.pack("<IIQ", 9, 8, 530)
                + text("x") * 520 + struct.pack("<Q", (1 << 64) - 1)
            ],
            [],
        ),
        "strings of 'a' reaches beyond",
    ),
    "alignment": (
        lambda: header([uint32("general.alignment", 24)], []),
        "general.alignment is uint32 24",
    ),
    "alignment array": (
        lambda: header([text("general.alignment") + struct.pack("<IIQI", 9, 4, 1, 32)], []),
        "general.alignment is an array",
    ),
    "alignment text": (
        lambda: header([text("general.alignment") + struct.pack("<I", 8) + text("32")], []),
        "general.alignment is string 32",
    ),
    "alignment type": (
        lambda: header([text("general.alignment") + struct.pack("<IQ", 10, 32)], []),
        "general.alignment is uint64 32",
    ),
    "name too long": (lambda: header([], [row("n" * 64, (4,), 0, 0)]), "has 64 bytes"),
    "dimensions": (lambda: header([], [row("a", (1,) * 5, 0, 0)]), "has 5 dimensions"),
    "negative size": (lambda: header([], [row("a", (-4,), 0, 0)]), "impossible shape"),
    "huge size": (lambda: header([], [row("a", (1 << 40, 1 << 40), 0, 0)]), "impossible shape"),
    "tensor type": (lambda: header([], [row("a", (4,), 77, 0)]), "unknown type 77"),
    "tensor twice": (
        lambda: header([], [row("a", (8,), 0, 0), row("a", (8,), 0, 32)]),
        "tensor 'a' twice",
    ),
    "partial block": (lambda: header([], [row("a", (33,), 8, 0)]), "rows of 33"),
    "unaligned": (
        lambda: header([], [row("a", (8,), 0, 0), row("b", (8,), 0, 36)]),
        "not a multiple of 32",
    ),
    "overlap": (
        lambda: header([], [row("a", (16,), 0, 0), row("b", (8,), 0, 32)]),
        "overlaps 'a'",
    ),
    "gap": (
        lambda: header([], [row("a", (8,), 0, 0), row("b", (8,), 0, 64)]),
        "leaves a gap after 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_one_sentence(tmp_path: Path, case: str) -> None:
    make, message = BROKEN[case]
    raw = make()
    with pytest.raises(ConvertError, match=message) as caught:
        read(tmp_path, raw + (bytes(64) if raw and "count" not in case else b""))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_folder_and_a_missing_file_are_sentences(tmp_path: Path) -> None:
    for path, problem in ((tmp_path, "not a file"), (tmp_path / "none.gguf", "cannot be read")):
        with pytest.raises(ConvertError, match=problem):
            inspect(path)


def page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def test_of_twenty_gigabytes_only_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    words = b"".join(text(f"token{i}") for i in range(250_000))
    tokens = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 250_000) + words
    raw = header([tokens], [row("a.weight", (1 << 20, 5120), 0, 0)])
    with path.open("wb") as stream:
        stream.write(raw)
        stream.truncate(len(raw) + -len(raw) % 32 + (20 << 30) - 1)
    before = page_faults()
    report = inspect(path)
    # Observed: 5 page faults. Reading the whole file would take 10,000 of 2 MB each.
    assert page_faults() - before < 2000
    assert "TRUNCATED" in report
    assert "1 of 1 tensors are cut off" in report
