"""Sampling settings that a model file recommends, beside flags and a request's own."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from fakes import FakeModel, FakeSequence

from dflash_gguf import DecodeConfig, Decoder
from dflash_gguf.cli.arguments import decode_config, parser
from dflash_gguf.serve.arguments import parser as serve_parser
from dflash_gguf.serve.arguments import settings_of
from dflash_gguf.text.recommended import recommended_sampling


def written(path: Path, **values: float) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_settings_are_read_with_the_digits_they_were_written_with(tmp_path: Path) -> None:
    path = written(tmp_path / "a", temp=0.6, top_k=20, top_p=0.95, penalty_repeat=1.05, xtc=0.1)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repeat_penalty": 1.05}
    assert recommended_sampling(path) == expected
    assert recommended_sampling(written(tmp_path / "b")) == {}


def test_bad_values_are_left_out_with_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path / "a", temp=-1.0, top_p=7.5, top_k=1.5, penalty_last_n=-1, min_p=0.1)
    with pytest.warns(UserWarning, match="general.sampling") as said:
        assert recommended_sampling(path) == {"min_p": 0.1}
    assert len(said) == 4


def test_flags_replace_what_the_file_recommends() -> None:
    recommended = {"temperature": 0.6, "top_k": 20}
    args = parser().parse_args(["-m", "x", "-p", "y", "--top-k", "5", "--min-p", "0"])
    config = decode_config(args, recommended)
    assert (config.temperature, config.top_k, config.min_p, config.top_p) == (0.6, 5, 0.0, 0.95)
    args = parser().parse_args(["-m", "x", "-p", "y", "--temp", "0"])
    assert decode_config(args, recommended).temperature == 0.0


@pytest.mark.parametrize(
    ("flags", "temperature", "top_k"), [([], 0.6, 20), (["--temp", "1", "--top-k", "9"], 1.0, 9)]
)
def test_a_server_takes_the_settings_of_each_model(
    flags: list[str], temperature: float, top_k: int
) -> None:
    settings = settings_of(serve_parser().parse_args(["-m", "x", *flags]))
    config = settings.defaults({"temperature": 0.6, "top_k": 20})
    assert (config.temperature, config.top_k) == (temperature, top_k)
    assert settings.defaults({}).temperature == (1.0 if flags else 0.8)


def test_a_decoder_takes_the_settings_of_its_file() -> None:
    sequence = FakeSequence(FakeModel(), b"yes", 0)
    decoder = Decoder(sequence, None, recommended={"temperature": 0.6, "top_k": 20})
    config = decoder.request([1], top_k=3).config
    assert (config.temperature, config.top_k) == (0.6, 3)
    assert decoder.request([1], DecodeConfig()).config.temperature == 0.0
