"""Written files: bytes as the gguf package reads them, checked values, no leftovers on failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dflash_gguf.convert import quantize, write
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.plan import Metadata, TensorPlan, to_float32
from dflash_gguf.convert.write import header_bytes, write_gguf
from numpy.typing import NDArray
from plans import encoded, plan


def example() -> tuple[Metadata, list[TensorPlan], dict[str, str]]:
    metadata = Metadata("llama")
    metadata.string("general.architecture", "llama")
    metadata.uint32("{arch}.block_count", 4_000_000_000)
    metadata.float32("{arch}.eps", 1e-5)
    metadata.boolean("flag", True)
    metadata.string("text", "Größe \U0001f680")
    metadata.array("words", ["a", "", "ö"])
    metadata.array("numbers", [1, -2, 3])
    metadata.array("flags", [True, False])
    metadata.array("floats", [0.5, 2.0])
    metadata.array("nothing", [])
    values = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    plans = [plan("w.weight", values), plan("v.bias", values[0, :7]), plan("h.weight", values)]
    return metadata, plans, {"w.weight": "q8_0", "v.bias": "f32", "h.weight": "bf16"}


def test_the_gguf_package_reads_back_what_was_written(tmp_path: Path) -> None:
    metadata, plans, types = example()
    write_gguf(tmp_path / "x.gguf", metadata, plans, types)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    found = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert found.pop("llama.eps") == np.float32(1e-5)
    assert found == {
        "general.architecture": "llama",
        "llama.block_count": 4_000_000_000,
        "flag": True,
        "text": "Größe \U0001f680",
        "words": ["a", "", "ö"],
        "numbers": [1, -2, 3],
        "flags": [True, False],
        "floats": [0.5, 2.0],
    }
    kinds = {key: [t.name for t in field.types] for key, field in reader.fields.items()}
    assert kinds["numbers"] == ["ARRAY", "INT32"]
    assert kinds["flags"] == ["ARRAY", "BOOL"]
    assert kinds["floats"] == ["ARRAY", "FLOAT32"]
    for tensor, planned in zip(reader.tensors, plans, strict=True):
        assert tensor.name == planned.name
        assert tuple(tensor.shape[::-1]) == planned.shape
        values = planned.read(0, planned.n_rows).reshape(planned.shape)
        expected = gguf.quants.quantize(values, tensor.tensor_type)
        np.testing.assert_array_equal(tensor.data.view(np.uint8), expected.view(np.uint8))


def test_chunks_join_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 100)
    values = np.arange(200 * 32, dtype=np.float32).reshape(200, 32)
    write_gguf(tmp_path / "x.gguf", Metadata("a"), [plan("w", values)], {"w": "f32"})
    np.testing.assert_array_equal(gguf.GGUFReader(tmp_path / "x.gguf").tensors[0].data, values)


def test_plan_reads_parts_reordered_and_mapped() -> None:
    parts = [np.float32([[1, 2], [3, 4]]), np.float32([[5, 6]]), np.float32([[7, 8], [9, 10]])]
    joined = TensorPlan("t", (5, 2), tuple(parts))
    np.testing.assert_array_equal(joined.read(1, 4), np.concatenate(parts)[1:4])
    table = np.concatenate(parts)
    order = TensorPlan(
        "t",
        (5, 2),
        (table,),
        rows=np.int64([4, 3, 2, 1, 0]),
        columns=np.int64([1, 0]),
        apply=lambda values: values * 10,
    )
    np.testing.assert_array_equal(order.read(1, 3), table[::-1, ::-1][1:3] * 10)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_stored_types_pass_through_bit_for_bit() -> None:
    bits = np.uint16([[0x0001, 0x8000, 0x3F80, 0x7F7F]])
    np.testing.assert_array_equal(encoded(bits, "bf16"), bits)
    half = np.float16([[6e-8, -0.0, 65504.0]])
    np.testing.assert_array_equal(encoded(half, "f16").view(np.uint16), half.view(np.uint16))
    np.testing.assert_array_equal(encoded(bits, "f32"), to_float32(bits))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_values_that_are_not_finite_are_refused(bad: float, stored: str, outtype: str) -> None:
    values = np.ones((3, 32), np.float32)
    values[1, 5] = bad
    source = {"f32": values, "f16": values.astype(np.float16), "bf16": bfloat16(values)}[stored]
    with pytest.raises(ConvertError, match="t: holds NaN or infinite values"):
        encoded(source, outtype)


def test_large_finite_values_are_no_error_where_they_fit() -> None:
    values = np.full((2, 32), 3e38, np.float32)
    np.testing.assert_array_equal(encoded(values, "f32"), values)
    with pytest.raises(ConvertError, match=r"holds 3e\+38, float16 ends at 65504"):
        encoded(values, "f16")
    with pytest.raises(ConvertError, match="NaN or infinite"):
        encoded(np.full((1, 32), np.finfo(np.float32).max), "bf16")


def test_no_space_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(ConvertError, match="but only 10 are free there"):
        write_gguf(tmp_path / "x.gguf", *example())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = open

    def full(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "x" not in mode:
            return real_open(path, mode, *rest, **options)
        real_open(path, mode).close()
        return real_open("/dev/full", "wb")

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(ConvertError, match=r"x\.gguf: cannot be written: No space left on device"):
        write_gguf(tmp_path / "x.gguf", *example())
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("old")
    bad = [plan("t", np.full((1, 32), np.nan, np.float32))]
    with pytest.raises(ConvertError, match="NaN"):
        write_gguf(tmp_path / "x.gguf", Metadata("a"), bad, {"t": "f32"})
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    assert (tmp_path / "x.gguf").read_text() == "old"


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_name: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "x.gguf", *example(), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_reads_back_differently_is_not_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, plans, types = example()
    swapped = header_bytes(metadata, plans[1:2] + plans[:1] + plans[2:], types)
    monkeypatch.setattr(write, "header_bytes", lambda *_: swapped)
    with pytest.raises(ConvertError, match="differs from what was planned"):
        write_gguf(tmp_path / "x.gguf", metadata, plans, types)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"), [("sub/x.gguf", "No such file or directory"), (".", "is a folder")]
)
def test_bad_places_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        write_gguf(tmp_path / name, *example())


def test_values_that_do_not_fit_their_type_are_named(tmp_path: Path) -> None:
    for setter, value in (("uint32", -1), ("uint32", 1 << 32), ("array", [1 << 40])):
        metadata = Metadata("a")
        getattr(metadata, setter)("{arch}.key", value)
        with pytest.raises(ConvertError, match=r"a\.key: .* fit"):
            write_gguf(tmp_path / "x.gguf", metadata, [], {})


def test_read_pages_are_given_back_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(write, "RELEASE_BYTES", 1024)
    values = np.zeros((64, 64), np.float32)
    releases: list[bool] = []
    plans, types = [plan("w", values)], {"w": "f32"}
    write_gguf(tmp_path / "x", Metadata("a"), plans, types, release=lambda: releases.append(True))
    assert len(releases) == values.nbytes // 1024
