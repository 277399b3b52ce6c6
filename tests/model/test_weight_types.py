"""Weight types on the CPU: their kernels, and repacked weights like the file's.

tests/exhaustive/same_bits.py compares every type bit by bit; two cases here may escape its cuts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from device import DEVICE
from gguf_files import Parts, edited, make_gguf
from numpy.typing import NDArray

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Engine, Error, Model, Sequence, quantize

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the CPU's kernels are meant")

TOKENS = np.random.default_rng(5).integers(0, 400, 49).tolist()
FLOATS = ("f32", "f16", "bf16")
# At least two types of each family, without types that need an importance matrix.
QUANTISED = ["q4_0", "q8_0", "q2_K", "q3_K", "q4_K", "q6_K", "iq4_nl", "iq4_xs", "iq3_s", "iq2_s"]
QUANTISED += ["iq1_m", "tq2_0", "mxfp4"]
REARRANGED = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
REARRANGED += ["iq4_nl", "iq4_xs", "mxfp4"]


GROUPS = (1, 3, 4, 5, 8, 11, 16)
"""Rows of passes that compute TOKENS[1:]; kernels treat these numbers of rows differently."""


def quantised_to(type_name: str, parts: Parts) -> None:
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, (data, old) in parts.tensors.items():
        is_matrix = data.ndim >= 2 and "conv1d" not in name and "gate_inp" not in name
        if is_matrix and old == gguf.GGMLQuantizationType.F32 and data.shape[-1] % block == 0:
            rows = quantize(np.ascontiguousarray(data).reshape(-1, data.shape[-1]), type_name)
            parts.tensors[name] = (rows.reshape(*data.shape[:-1], -1), kind)


def single_logits(sequence: Sequence) -> NDArray[np.float32]:
    sequence.prefill(TOKENS[:1])
    return np.stack([sequence.decode(token).logits() for token in TOKENS[1:]])


def load(path: Path, **settings: Any) -> Model:
    return Model(str(path), LoadConfig(n_ctx=128, n_threads=1, **settings))


@pytest.mark.parametrize("outtype", FLOATS)
def test_floats(tmp_path: Path, outtype: str) -> None:
    # Widths are no multiples of a vector, except those that attention and the recurrence require.
    sizes = {"hidden_size": 100, "moe_intermediate_size": 43, "num_experts": 7}
    model = load(make_gguf(tmp_path, "qwen35moe", outtype=outtype, **sizes))
    assert any(name.startswith(outtype + " ") for name in model.kernels)
    assert not any("CPU" in name for name in model.kernels if outtype in name)
    assert model.copied_bytes == 0


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "mxfp4", "iq3_s"])
def test_quantised_experts(tmp_path: Path, type_name: str, repack: bool) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    plain = make_gguf(tmp_path, "qwen3moe", num_experts_per_tok=3, **sizes)
    path = edited(plain, tmp_path / "it.gguf", lambda parts: quantised_to(type_name, parts))
    model = load(path, repack=repack)
    kernels = [name for name in model.kernels if name.startswith(type_name.lower() + " ")]
    assert len(kernels) == 1
    assert model.kernels[kernels[0]] > 0.9 * sum(model.kernels.values())


def test_an_expert_of_many_rows_adds_the_same(tmp_path: Path) -> None:
    """One expert gets more rows than a kernel multiplies at once."""
    path = make_gguf(tmp_path, "qwen3moe", num_experts=2, num_experts_per_tok=1)
    tokens = (TOKENS * 6)[:250]
    logits = []
    for n_ubatch in (250, 40):
        sequence = Sequence(Engine(Model(str(path), LoadConfig(n_ctx=256, n_ubatch=n_ubatch))))
        logits.append(sequence.prefill(tokens).logits())
    np.testing.assert_array_equal(*logits)


def test_a_graph_does_not_take_the_places_of_another(tmp_path: Path) -> None:
    """Graphs of 33 and 4 rows have equally many nodes, but only one has quantisation nodes."""
    layers = ["linear_attention", "full_attention"]
    path = make_gguf(tmp_path, "qwen35moe", head_dim=64, num_hidden_layers=2, layer_types=layers)
    config = LoadConfig(n_ctx=64, n_threads=1, n_gpu_layers=0)
    expected = Sequence(Engine(Model(str(path), config))).logits(TOKENS[:4])
    sequence = Sequence(Engine(Model(str(path), config)))
    sequence.logits(TOKENS[:33])
    sequence.reset()
    np.testing.assert_array_equal(sequence.logits(TOKENS[:4]), expected)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An F32 model whose rows are whole blocks of every type."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return make_gguf(tmp_path_factory.mktemp("plain"), "qwen3", **sizes)


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("type_name", QUANTISED)
def test_quantised(plain: Path, tmp_path: Path, type_name: str, repack: bool) -> None:
    path = edited(plain, tmp_path / "it.gguf", lambda parts: quantised_to(type_name, parts))
    model = load(path, repack=repack)
    kernels = [name for name in model.kernels if name.startswith(type_name.lower() + " ")]
    assert len(kernels) == 1
    if not repack:
        assert model.copied_bytes == 0 and kernels[0].endswith(" ggml")


@pytest.mark.parametrize("type_name", REARRANGED)
def test_rearranged_weights_are_those_of_the_file(
    plain: Path, tmp_path: Path, type_name: str
) -> None:
    """Tests the installed library: compilers may round loops of one kernel differently."""
    path = edited(plain, tmp_path / "it.gguf", lambda parts: quantised_to(type_name, parts))
    logits = []
    for repack in (True, False):
        model = load(path, repack=repack)
        assert (model.copied_bytes > 0) is repack
        logits.append(single_logits(Sequence(Engine(model))))
    ours, plainly = logits  # rounding differences add up to 1 % of the range
    assert np.abs(ours - plainly).max() <= 0.05 * np.ptp(plainly)


def mixed(parts: Parts) -> None:
    """Quantises the matrices in turn to every type that has packed kernels."""
    types = cycle(REARRANGED)
    for name, (data, _) in list(parts.tensors.items()):
        if data.ndim >= 2:
            one = replace(parts, tensors={name: parts.tensors[name]})
            quantised_to(next(types), one)
            parts.tensors.update(one.tensors)


def save_logits(path: Path) -> None:
    """Saves the logits of TOKENS[1:], one by one and in passes of GROUPS rows."""
    single = single_logits(Sequence(Engine(load(path))))
    sequence = Sequence(Engine(load(path)))
    sequence.prefill(TOKENS[:1])
    ends = np.cumsum((1, *GROUPS)).tolist()
    rows = [sequence.logits(TOKENS[first:end]) for first, end in pairwise(ends)]
    np.save(path.with_suffix(".npy"), np.stack((single, np.concatenate(rows))))


def run_with_set(path: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Runs save_logits() in a process that uses the instruction set and those after it."""
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**os.environ, "DFLASH_CPU": name, "PYTHONPATH": folders}
    command = [sys.executable, __file__, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_each_instruction_set(tmp_path: Path) -> None:
    """Compares rows of passes with single rows bit by bit, and each set with the best."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3}
    path = edited(make_gguf(tmp_path, "qwen3", **sizes), tmp_path / "it.gguf", mixed)
    names = run_with_set(path, "none").stderr.strip().rsplit(": ", 1)[-1].split(", ")
    assert names[-1] == "portable"
    best = None
    for name in names:
        done = run_with_set(path, name)
        assert done.returncode == 0, done.stderr
        single, grouped = np.load(path.with_suffix(".npy"))
        np.testing.assert_array_equal(grouped, single, err_msg=name)
        best = single if best is None else best
        assert np.abs(single - best).max() < 0.01 * np.ptp(best), name


if __name__ == "__main__":
    try:
        save_logits(Path(sys.argv[1]))
    except Error as error:
        sys.exit(str(error))
