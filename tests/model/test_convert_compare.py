"""`--check` accepts converted files, and finds and names every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS, make_drafter, make_target
from dflash_gguf.convert.__main__ import main
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.compare import LIMITS, check
from dflash_gguf.convert.conversion import Conversion, prepare
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.plan import TensorPlan, list_plan
from dflash_gguf.convert.write import write_gguf

PRE = "qwen2"
Damage = Callable[[dict[str, TensorPlan]], None]


def write(conversion: Conversion, path: Path) -> Path:
    write_gguf(path, conversion.metadata, conversion.plans, conversion.types)
    return path


def convert(model_dir: Path, path: Path, outtype: str = "f32", **options: Any) -> Path:
    return write(prepare(model_dir, outtype, Options(**options), PRE), path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of each kind; hybrids have more value heads than key heads."""
    base = tmp_path_factory.mktemp("targets")
    made = {kind: make_target(base / kind, kind) for kind in KINDS}
    made["qwen35"] = make_target(base / "mtp", "qwen35", mtp=True, linear_num_value_heads=6)
    made["mxfp4"] = make_target(base / "mxfp4", "gpt-oss", packed_experts=True)
    made["gemma4"] = make_target(base / "gemma4", "gemma4", wrapped=True)
    made["fused"] = make_target(base / "fused", "qwen35moe", wrapped=True, fused_experts=True)
    return made


FORMS = [*KINDS, "fused", "mxfp4"]


@pytest.mark.parametrize("kind", FORMS)
def test_a_converted_file_passes(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    report = check(folders[kind], convert(folders[kind], tmp_path / "x.gguf"))
    assert report.ok, str(report)
    assert max(tensor.error for tensor in report.tensors) < 3e-7


def test_a_file_without_mtp_layers_passes(folders: dict[str, Path], tmp_path: Path) -> None:
    file = convert(folders["qwen35"], tmp_path / "x.gguf", mtp=False)
    report = check(folders["qwen35"], file)
    assert report.ok, str(report)
    assert not any("nextn" in tensor.name for tensor in report.tensors)


def test_a_file_of_the_mtp_layer_alone_passes(folders: dict[str, Path], tmp_path: Path) -> None:
    file = convert(folders["qwen35"], tmp_path / "mtp-x.gguf", only_mtp=True)
    report = check(folders["qwen35"], file)
    assert report.ok, str(report)
    names = {tensor.name for tensor in report.tensors if not tensor.name.startswith("blk.4.")}
    assert names == {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert "blk.4.nextn.eh_proj.weight" in {tensor.name for tensor in report.tensors}
    with pytest.raises(ConvertError, match="has no MTP layer, which --mtp needs"):
        convert(folders["llama"], tmp_path / "x.gguf", only_mtp=True)


@pytest.mark.parametrize("only_mtp", [False, True])
def test_a_shortlist_passes(folders: dict[str, Path], tmp_path: Path, only_mtp: bool) -> None:
    file = convert(folders["qwen35"], tmp_path / "x.gguf", draft_vocab=300, only_mtp=only_mtp)
    report = check(folders["qwen35"], file)
    assert report.ok, str(report)
    shapes = {tensor.name: tensor.shape for tensor in report.tensors}
    assert shapes["d2t"][0] >= 300
    assert (shapes["output.weight"][0] == shapes["d2t"][0]) == only_mtp


def test_a_shortlist_without_the_end_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    conversion = prepare(folders["qwen35"], "f32", Options(draft_vocab=300), PRE)
    _, end = conversion.metadata.values["tokenizer.ggml.eos_token_id"]
    conversion.plans[-1] = list_plan("d2t", np.arange(301))
    report = check(folders["qwen35"], write(conversion, tmp_path / "x.gguf"))
    assert report.problems == (f"d2t: lacks the end token {end}",)


@pytest.mark.parametrize(
    ("kind", "n", "sentence"),
    [
        ("llama", 300, "llama: has no MTP layer, which --draft-vocab needs"),
        ("qwen35", 255, "--draft-vocab is 255, give 256 to 420 tokens"),
        ("qwen35", 421, "--draft-vocab is 421, give 256 to 420 tokens"),
    ],
)
def test_a_bad_draft_vocab_is_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str, n: int, sentence: str
) -> None:
    with pytest.raises(ConvertError, match=sentence):
        convert(folders[kind], tmp_path / "x.gguf", draft_vocab=n)


@pytest.mark.parametrize("neox", [True, False])
def test_a_drafter_passes(folders: dict[str, Path], tmp_path: Path, neox: bool) -> None:
    target = folders["qwen3"]
    settings = {} if neox else {"rope_is_neox_style": False}
    drafter = make_drafter(tmp_path / "drafter", target, **settings)
    file = write(prepare(drafter, "f32", Options(target), PRE), tmp_path / "x.gguf")
    report = check(drafter, file, target)
    assert report.ok, str(report)
    with pytest.raises(ConvertError, match="target-model-dir"):
        check(drafter, file)


OUTTYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_m", "q5_k_m", "q6_k")


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_the_limits_hold_with_room(tmp_path: Path, outtype: str) -> None:
    folder = make_target(
        tmp_path / "m", "llama", hidden_size=256, num_hidden_layers=2, intermediate_size=512
    )
    report = check(folder, convert(folder, tmp_path / "x.gguf", outtype))
    assert report.ok, str(report)
    for name in {tensor.type for tensor in report.tensors} - {"F32"}:
        worst = max(tensor.error for tensor in report.tensors if tensor.type == name)
        assert LIMITS[name] / 3 < worst, name


def swap(plans: dict[str, TensorPlan], a: str, b: str) -> None:
    first, second = plans[a], plans[b]
    plans[a], plans[b] = replace(second, name=a), replace(first, name=b)


def drop(plans: dict[str, TensorPlan], name: str) -> None:
    del plans[name]


def change(plans: dict[str, TensorPlan], name: str, **fields: object) -> None:
    plans[name] = replace(plans[name], **fields)  # type: ignore[arg-type]


def add(plans: dict[str, TensorPlan], name: str) -> None:
    values = np.ones((1, 96), np.float32)
    plans[name] = TensorPlan(name, (96,), (values,))


def reshape(plans: dict[str, TensorPlan], name: str, rows: int, columns: int) -> None:
    values = plans[name].read(0, plans[name].n_rows).reshape(rows, columns)
    change(plans, name, shape=(rows, columns), parts=(values,))


def one_wrong_value(plans: dict[str, TensorPlan], name: str) -> None:
    values = plans[name].read(0, plans[name].n_rows).copy()
    values[3, 5] += 0.5
    change(plans, name, parts=(values,), rows=None)


DAMAGES: dict[str, tuple[str, Damage, list[str]]] = {
    "swapped tensors": (
        "qwen3",
        lambda p: swap(p, "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        ["blk.0.ffn_gate.weight: relative", "blk.0.ffn_up.weight: relative"],
    ),
    "swapped layers": (
        "llama",
        lambda p: swap(p, "blk.0.attn_norm.weight", "blk.1.attn_norm.weight"),
        ["blk.0.attn_norm.weight: relative", "blk.1.attn_norm.weight: relative"],
    ),
    "missing norm": (
        "qwen3",
        lambda p: drop(p, "blk.1.attn_q_norm.weight"),
        ["blk.1.attn_q_norm.weight: is missing"],
    ),
    "missing +1": (
        "qwen35",
        lambda p: change(p, "blk.3.attn_k_norm.weight", apply=None),
        ["blk.3.attn_k_norm.weight: relative"],
    ),
    "value heads not reordered in z": (
        "qwen35",
        lambda p: change(p, "blk.0.attn_gate.weight", rows=None),
        ["blk.0.attn_gate.weight: relative"],
    ),
    "value heads not reordered in out": (
        "qwen35moe",
        lambda p: change(p, "blk.1.ssm_out.weight", columns=None),
        ["blk.1.ssm_out.weight: relative"],
    ),
    "value heads not reordered in dt": (
        "qwen35",
        lambda p: change(p, "blk.2.ssm_dt.bias", columns=None),
        ["blk.2.ssm_dt.bias: relative"],
    ),
    "decay as A_log": (
        "qwen35",
        lambda p: change(p, "blk.0.ssm_a", apply=None),
        ["blk.0.ssm_a: relative"],
    ),
    "rope not permuted": (
        "llama",
        lambda p: change(p, "blk.1.attn_k.weight", rows=None),
        ["blk.1.attn_k.weight: relative"],
    ),
    "one wrong value": (
        "llama",
        lambda p: one_wrong_value(p, "blk.0.attn_q.weight"),
        ["blk.0.attn_q.weight: relative"],
    ),
    "wrong shape": (
        "llama",
        lambda p: reshape(p, "output.weight", 96, 421),
        ["output.weight: has shape [96, 421], the checkpoint gives [421, 96]"],
    ),
    "extra tensor": (
        "qwen3",
        lambda p: add(p, "blk.0.ffn_norm_2.weight"),
        ["blk.0.ffn_norm_2.weight: is in the file"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(
    folders: dict[str, Path], tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, apply, expected = DAMAGES[damage]
    conversion = prepare(folders[kind], "f32", Options(), PRE)
    plans = {plan.name: plan for plan in conversion.plans}
    apply(plans)
    types = {name: conversion.types.get(name, "f32") for name in plans}
    damaged = replace(conversion, plans=list(plans.values()), types=types)
    file = write(damaged, tmp_path / "x.gguf")
    report = check(folders[kind], file)
    assert len(report.problems) == len(expected)
    for wanted in expected:
        assert any(problem.startswith(wanted) for problem in report.problems), report.problems
    assert main([str(folders[kind]), "--check", str(file)]) == 1
    assert "problem: " in capsys.readouterr().out


def test_wrong_metadata_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    conversion = prepare(folders["qwen35"], "f32", Options(), PRE)
    values = conversion.metadata.values
    values["qwen35.rope.freq_base"] = ("float32", 10000.0)
    values["qwen35.rope.dimension_sections"] = ("array", [1, 2, 1, 0])
    del values["qwen35.ssm.conv_kernel"]
    report = check(folders["qwen35"], write(conversion, tmp_path / "x.gguf"))
    assert sorted(report.problems) == [
        "qwen35.rope.dimension_sections: is [1, 2, 1, 0], the checkpoint gives [2, 1, 1, 0]",
        "qwen35.rope.freq_base: is 10000.0, the checkpoint gives 1000000.0",
        "qwen35.ssm.conv_kernel: is missing, the checkpoint gives 4",
    ]


@pytest.mark.parametrize(("head_dim", "n_problems"), [(24, 0), (32, 2)])
def test_a_head_size_may_be_left_out_where_readers_assume_it(
    tmp_path: Path, head_dim: int, n_problems: int
) -> None:
    """Older files lack the head size; readers then assume hidden size / heads, here 96 / 4."""
    folder = make_target(tmp_path / "m", "llama", head_dim=head_dim)
    conversion = prepare(folder, "f32", Options(), PRE)
    for kind in ("key", "value"):
        del conversion.metadata.values[f"llama.attention.{kind}_length"]
    report = check(folder, write(conversion, tmp_path / "x.gguf"))
    assert len(report.problems) == n_problems, report.problems


def test_what_cannot_be_compared_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    file = convert(folders["qwen3"], tmp_path / "x.gguf")
    with pytest.raises(ConvertError, match=r"architecture is 'qwen3', .* needs 'llama'"):
        check(folders["llama"], file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConvertError, match="TRUNCATED"):
        check(folders["qwen3"], file)


def test_the_command_prints_a_table_and_returns_zero(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = convert(folders["qwen3"], tmp_path / "x.gguf", "q8_0")
    assert main([str(folders["qwen3"]), "--check", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "blk.1.attn_q_norm.weight" in printed
    assert printed.rstrip().endswith("matches the checkpoint")
