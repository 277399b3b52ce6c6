import numpy as np
import pytest

from dflash_gguf import native


def test_another_build_of_the_core_has_another_name(monkeypatch, tmp_path):
    ours = native.library_build()
    assert ours == native.library_build()
    other = tmp_path / "other"
    other.write_bytes(b"x")
    monkeypatch.setattr("dflash_gguf.native._ffi.installed_file", lambda _: other)
    assert native.library_build() != ours


def test_devices_name_the_cpu_with_its_memory():
    cpus = [device for device in native.devices() if device.type == "cpu"]
    assert len(cpus) == 1
    assert cpus[0].total_bytes > 2**28


def test_quantize_equals_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(1).standard_normal((7, 96), dtype=np.float32)
    for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1"):
        ours = native.quantize(values, name)
        theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
        # Values halfway between two codes may round either way.
        assert np.mean(ours != theirs) < 0.01, name


def test_quantize_is_the_same_for_any_number_of_threads():
    values = np.random.default_rng(2).standard_normal((67, 2048), dtype=np.float32)
    expected = native.quantize(values, "q4_K", n_threads=1)
    for n_threads in (2, 3, 0):
        assert np.array_equal(native.quantize(values, "q4_K", n_threads=n_threads), expected)


@pytest.mark.parametrize(
    ("shape", "name", "message"),
    [
        ((2, 100), "q4_K", "rows have 100 values, type q4_K needs a positive multiple of 256"),
        ((2, 32), "q9_9", "tensor type q9_9: ggml has no such type"),
        ((2, 256), "iq2_xxs", "tensor type iq2_xxs needs an importance matrix"),
        ((2, 32), "i32", "tensor type i32 is not a type to which"),
    ],
)
def test_quantize_refuses_by_name(shape, name, message):
    with pytest.raises(native.Error, match=message):
        native.quantize(np.zeros(shape, dtype=np.float32), name)


def test_quantize_refuses_a_strided_array():
    with pytest.raises(ValueError, match="contiguous float32"):
        native.quantize(np.zeros((4, 64), dtype=np.float32)[:, ::2], "q8_0")


def test_a_file_that_is_no_backend_module_is_named(tmp_path):
    with pytest.raises(native.Error, match=r"absent\.so: no such file"):
        native.load_backend(str(tmp_path / "absent.so"))
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(native.Error, match=r"text\.so: not a ggml backend"):
        native.load_backend(str(tmp_path / "text.so"))
