"""The converter command: bad input gives one sentence, exit code 1, and no file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_drafter, make_target
from conversions import edit_config, edit_tensors
from dflash_gguf.convert import write
from dflash_gguf.convert.__main__ import main
from safetensors.torch import load_file, save_file

from dflash_gguf.text.tokenizer import Tokenizer

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("originals")
    make_target(folder / "model", "qwen3", num_hidden_layers=5)
    make_target(folder / "shards", "llama", max_shard_size="300KB")
    make_target(folder / "moe", "qwen3moe")
    make_target(folder / "hybrid", "qwen35")
    make_drafter(folder / "drafter", folder / "model")
    make_drafter(folder / "drafter2", folder / "model", dflash2=True)
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals, tmp_path / "in")
    (tmp_path / "out").mkdir()
    return tmp_path / "in"


def run(folder: Path, name: str, *more: str) -> int:
    out = folder.parent / "out" / "x.gguf"
    return main([str(folder / name), "--outfile", str(out), "--pre", "qwen2", *more])


def assert_refused(
    folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str], *more: str
) -> None:
    assert run(folder, name, *more) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert list((folder.parent / "out").iterdir()) == []


def first(directory: Path, pattern: str) -> Path:
    return next(iter(sorted(directory.glob(pattern))))


def set_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_drafter(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text())
    edit_config(path, dflash_config=content["dflash_config"] | changes)


def poison(path: Path, value: float) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, path / "model.safetensors")


def cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-n_bytes])


TARGETS: dict[str, tuple[str, Damage, str]] = {
    "no such folder": ("model", shutil.rmtree, "not a model folder (it has no config.json)"),
    "not a model folder": (
        "model",
        lambda p: (p / "config.json").unlink(),
        "not a model folder (it has no config.json)",
    ),
    "config is not JSON": (
        "model",
        lambda p: (p / "config.json").write_text("{"),
        "config.json: is not JSON",
    ),
    "unknown architecture": (
        "model",
        lambda p: edit_config(p, architectures=["BertModel"]),
        "architecture 'BertModel' is not supported (supported: LlamaForCausalLM,",
    ),
    "no architecture": (
        "model",
        lambda p: edit_config(p, architectures=None),
        "names no model class",
    ),
    "no weights": (
        "model",
        lambda p: (p / "model.safetensors").unlink(),
        "has no safetensors weights",
    ),
    "missing shard": (
        "shards",
        lambda p: first(p, "model-*").unlink(),
        "the shard model-00001-of-",
    ),
    "no index": (
        "shards",
        lambda p: (p / "model.safetensors.index.json").unlink(),
        "but no model.safetensors.index.json",
    ),
    "shard lacks a tensor": (
        "shards",
        lambda p: set_json(
            p / "model.safetensors.index.json",
            weight_map={"ghost": first(p, "model-*").name},
        ),
        "lacks 'ghost'",
    ),
    "shard outside the folder": (
        "shards",
        lambda p: set_json(
            p / "model.safetensors.index.json", weight_map={"a": "../../etc/passwd"}
        ),
        "names the shard '../../etc/passwd'",
    ),
    "truncated shard": (
        "shards",
        lambda p: cut(first(p, "model-*"), 100),
        "corrupt safetensors file",
    ),
    "NaN weights": (
        "model",
        lambda p: poison(p, float("nan")),
        "output_norm.weight: holds NaN or infinite values",
    ),
    "infinite weights": (
        "model",
        lambda p: poison(p, float("inf")),
        "output_norm.weight: holds NaN or infinite values",
    ),
    "integer weights": (
        "model",
        lambda p: edit_tensors(p, **{"model.norm.weight": torch.arange(96)}),
        "'model.norm.weight' has dtype I64",
    ),
    "missing tensor": (
        "model",
        lambda p: edit_tensors(p, **{"model.layers.1.self_attn.k_norm.weight": None}),
        "'model.layers.1.self_attn.k_norm.weight' is missing",
    ),
    "tensor without a place": (
        "model",
        lambda p: edit_tensors(p, **{"model.layers.0.extra.weight": torch.ones(3)}),
        "'model.layers.0.extra.weight' has no place in Qwen3ForCausalLM",
    ),
    "wrong shape": (
        "model",
        lambda p: edit_config(p, intermediate_size=161),
        "has shape [160, 96], config.json asks for [161, 96]",
    ),
    "key missing": (
        "model",
        lambda p: edit_config(p, hidden_size=None),
        "config.json: lacks 'hidden_size'",
    ),
    "key of the wrong type": (
        "model",
        lambda p: edit_config(p, num_hidden_layers="two"),
        "'num_hidden_layers' is 'two', an integer from 1 to 512 is needed",
    ),
    "too many layers": (
        "hybrid",
        lambda p: edit_config(p, num_hidden_layers=10**12, layer_types=None),
        "'num_hidden_layers' is 1000000000000, an integer from 1 to 512 is needed",
    ),
    "odd head size": (
        "shards",
        lambda p: edit_config(p, head_dim=33),
        "head_dim is 33, must be even",
    ),
    "eps is no number": (
        "model",
        lambda p: edit_config(p, rms_norm_eps=float("nan")),
        "'rms_norm_eps' is nan, a number is needed",
    ),
    "heads that do not divide": (
        "model",
        lambda p: edit_config(p, num_key_value_heads=3),
        "4 attention heads are no multiple of 3 key-value heads",
    ),
    "already quantised": (
        "model",
        lambda p: edit_config(p, quantization_config={"quant_method": "fp8"}),
        "already quantised",
    ),
    "other activation": (
        "model",
        lambda p: edit_config(p, hidden_act="relu"),
        "hidden_act 'relu' is not supported",
    ),
    "sliding window": (
        "model",
        lambda p: edit_config(p, use_sliding_window=True, sliding_window=64),
        "full attention only",
    ),
    "weights of experts not renormalised": (
        "moe",
        lambda p: edit_config(p, norm_topk_prob=False),
        "norm_topk_prob is not true",
    ),
    "dense layers among experts": (
        "moe",
        lambda p: edit_config(p, mlp_only_layers=[0]),
        "ask for dense layers",
    ),
    "value heads that do not divide": (
        "hybrid",
        lambda p: edit_config(p, linear_num_value_heads=3),
        "3 linear value heads are no multiple of 2 key heads",
    ),
    "unknown layer type": (
        "hybrid",
        lambda p: edit_config(p, layer_types=["ring_attention"] * 4),
        "layer type 'ring_attention' is not linear_attention or full_attention",
    ),
    "layer types of another length": (
        "hybrid",
        lambda p: edit_config(p, layer_types=["full_attention"]),
        "layer_types needs 4 entries",
    ),
    "vocabulary larger than the embeddings": (
        "model",
        lambda p: edit_config(p, vocab_size=200),
        "config.json asks for [200, 96]",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_bad_target(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, damage, message = TARGETS[case]
    damage(folder / name)
    assert_refused(folder, name, message, capsys)


DRAFTERS: dict[str, tuple[Damage, str]] = {
    "hidden size": (
        lambda p: edit_config(p.parent / "model", hidden_size=128),
        "the drafter's hidden_size is 96, but that of its target",
    ),
    "vocabulary": (
        lambda p: edit_config(p, vocab_size=400),
        "the drafter's vocab_size is 400, but that of its target",
    ),
    "layer id beyond the target": (
        lambda p: set_drafter(p, target_layer_ids=[0, 9]),
        "names layer 9, but the target",
    ),
    "last layer": (
        lambda p: set_drafter(p, target_layer_ids=[0, 4]),
        "has 5 layers; give layers of 0 to 3",
    ),
    "layer ids are no integers": (
        lambda p: set_drafter(p, target_layer_ids=["0"]),
        "target_layer_ids is ['0'], integers are needed",
    ),
    "number of layer ids": (
        lambda p: set_drafter(p, target_layer_ids=[0, 1, 2]),
        "'fc.weight' has shape [96, 192], config.json asks for [96, 288]",
    ),
    "mask token outside": (
        lambda p: set_drafter(p, mask_token_id=421),
        "mask_token_id 421 is outside the vocabulary of 421",
    ),
    "no mask token": (
        lambda p: set_drafter(p, mask_token_id=None),
        "'mask_token_id' is None, an integer of at least 0 is needed",
    ),
    "block size": (
        lambda p: edit_config(p, block_size=1),
        "'block_size' is 1, an integer of at least 2 is needed",
    ),
    "DSpark by its class": (
        lambda p: edit_config(p, architectures=["Qwen3DSparkModel"]),
        "Qwen3DSparkModel is a DSpark drafter, only DFlash drafters can be run",
    ),
    "DSpark by its tensors": (
        lambda p: edit_tensors(p, **{"markov_head.markov_w1.weight": torch.ones(2, 2)}),
        "is a DSpark drafter ('markov_head.markov_w1.weight')",
    ),
    "a bias of another size": (
        lambda p: edit_tensors(p, **{"layers.0.self_attn.q_proj.bias": torch.ones(120)}),
        "'layers.0.self_attn.q_proj.bias' has shape [120], config.json asks for [128]",
    ),
    "a list of tokens with two dimensions": (
        lambda p: edit_tensors(p, d2t=torch.zeros(3, 4, dtype=torch.int64)),
        "'d2t' is not a list of I64 offsets to tokens 0 to 420",
    ),
    "a list of tokens without dimensions": (
        lambda p: edit_tensors(p, d2t=torch.tensor(5)),
        "'d2t' is not a list of I64 offsets to tokens 0 to 420",
    ),
    "a list of no tokens": (
        lambda p: edit_tensors(p, d2t=torch.zeros(0, dtype=torch.int64)),
        "'d2t' is not a list of I64 offsets to tokens 0 to 420",
    ),
    "a list of bytes": (
        lambda p: edit_tensors(p, d2t=torch.zeros(40, dtype=torch.uint8)),
        "'d2t' is not a list of I64 offsets to tokens 0 to 420",
    ),
    "a list of tokens beyond the vocabulary": (
        lambda p: edit_tensors(p, d2t=torch.full((40,), 382)),
        "'d2t' is not a list of I64 offsets to tokens 0 to 420",
    ),
    "a list of tokens without a head": (
        lambda p: edit_tensors(p, d2t=torch.zeros(40, dtype=torch.int64)),
        "'d2t' has 40 tokens, 'lm_head.weight' must have a row for each",
    ),
    "mask embedding file": (
        lambda p: (p / "mask_embedding.pt").write_bytes(b""),
        "mask_embedding.pt, which is not supported",
    ),
    "target is no folder": (
        lambda p: shutil.rmtree(p.parent / "model"),
        "not a model folder",
    ),
}


@pytest.mark.parametrize("case", DRAFTERS)
def test_bad_drafter(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = DRAFTERS[case]
    damage(folder / "drafter")
    target = ("--target-model-dir", str(folder / "model"))
    assert_refused(folder, "drafter", message, capsys, *target)


def test_drafter_without_its_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(folder, "drafter", "a DFlash drafter needs --target-model-dir", capsys)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("DFlash2DraftModel", "DFlash2DraftModel is a DFlash2 drafter, only DFlash drafters"),
        ("DFlashDraftModel", "'conv_kernel_size': it is a DFlash2 drafter, only DFlash drafters"),
    ],
)
def test_dflash2_drafters_are_refused(
    folder: Path, architecture: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_json(folder / "drafter2" / "config.json", architectures=[architecture])
    target = ("--target-model-dir", str(folder / "model"))
    assert_refused(folder, "drafter2", message, capsys, *target)


def test_target_folder_needs_no_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    assert run(folder, "drafter", "--target-model-dir", str(folder / "model")) == 0


def test_no_disk_space(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    assert_refused(folder, "model", "but only 10 are free there", capsys)


def test_sharded_and_single_checkpoints_give_the_same_tensors(folder: Path) -> None:
    tensors = {}
    for path in (folder / "shards").glob("*.safetensors"):
        tensors |= load_file(path)
    shutil.copytree(folder / "shards", folder / "single", ignore=shutil.ignore_patterns("model*"))
    save_file(tensors, folder / "single" / "model.safetensors")
    files = []
    for name in ("shards", "single"):
        assert run(folder, name, "--outtype", "f32") == 0
        reader = gguf.GGUFReader(folder.parent / "out" / "x.gguf")
        files.append({tensor.name: tensor.data.copy() for tensor in reader.tensors})
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    assert files[0].keys() == files[1].keys()
    for name, data in files[0].items():
        np.testing.assert_array_equal(data, files[1][name])


def test_dry_run_lists_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder / "model"), "--pre", "qwen2", "--dry-run", "--outtype", "q8_0"]) == 0
    listed = capsys.readouterr().out
    assert "blk.4.attn_q.weight" in listed
    assert "q8_0" in listed
    assert "qwen3, q8_0: 58 tensors" in listed
    assert list((folder.parent / "out").iterdir()) == []


def test_verbose_lists_every_tensor_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "model", "--verbose") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 58
    assert lines[0].split()[0] == "token_embd.weight"


def test_success_prints_one_line_without_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "model"), "--pre", "qwen2", "--outtype", "Q8_0"]) == 0
    out, err = capsys.readouterr()
    path = folder / "model" / "model-q8_0.gguf"
    assert path.is_file()
    assert out.startswith(f"{path}: qwen3, q8_0: 58 tensors, ")
    assert (out.count("\n"), err) == (1, "")


def test_inspect_describes_what_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "model") == 0
    out = folder.parent / "out" / "x.gguf"
    assert main(["--inspect", str(out)]) == 0
    assert "58 tensors" in capsys.readouterr().out
    assert main(["--inspect", str(folder / "model" / "config.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["x", "--outtype", "q3_k"], ["x", "--expect", "base"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_names_that_are_not_utf8_are_converted(folder: Path) -> None:
    there = (folder / "model").rename(folder / os.fsdecode(b"\xff"))
    out = folder.parent / "out" / os.fsdecode(b"\xff.gguf")
    assert main([str(there), "--outfile", str(out), "--pre", "qwen2"]) == 0
    assert main([str(there), "--check", str(out)]) == 0


def test_a_missing_folder_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--outfile", str(tmp_path / "no" / "x.gguf")]) == 2
    assert capsys.readouterr().err.startswith("error: --outfile")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_the_model_is_not_replaced(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "model" / name
    before = out.read_bytes()
    assert main([str(folder / "model"), "--outfile", str(out), "--pre", "qwen2"]) == 2
    assert capsys.readouterr().err == (
        f"error: --outfile {out}: is a file of the model, give another name\n"
    )
    assert out.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_writing_leaves_nothing(
    folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(write, "_verify", lambda *_: os.kill(os.getpid(), number))
    assert run(folder, "model") == 130
    assert list((folder.parent / "out").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_package_runs_as_a_module(folder: Path) -> None:
    out = folder.parent / "out" / "x.gguf"
    command = [sys.executable, "-m", "dflash_gguf.convert", str(folder / "model")]
    done = subprocess.run(
        [*command, "--outfile", str(out), "--pre", "qwen2"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: ")
    assert out.is_file()


def converted(folder: Path) -> dict[str, Any]:
    out = folder.parent / "out" / "x.gguf"
    fields = gguf.GGUFReader(out).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("token")}


@pytest.mark.parametrize("in_config", ["OLDER", None])
@pytest.mark.parametrize(
    "file, expected",
    [("chat_template.jinja", "NEWER"), ("chat_template.json", None), (None, None)],
)
def test_the_template_is_that_which_transformers_takes(
    folder: Path, in_config: str | None, file: str | None, expected: str | None
) -> None:
    set_json(folder / "model" / "tokenizer_config.json", chat_template=in_config)
    if file is not None:
        text = "NEWER" if file.endswith("jinja") else json.dumps({"chat_template": "NEWER"})
        (folder / "model" / file).write_text(text)
    assert run(folder, "model") == 0
    found = converted(folder).get("tokenizer.chat_template")
    assert found == (expected or in_config or (None if file is None else "NEWER"))


def test_several_end_tokens_are_kept_or_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    ids = sorted(texts.values())[300:303]
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert run(folder, "model") == 0
    found = converted(folder)
    assert found["tokenizer.ggml.eos_token_id"] not in ids
    assert found["tokenizer.ggml.eot_token_id"] == ids[0]
    assert found["tokenizer.ggml.eom_token_id"] == ids[1]
    assert f"warning: end tokens [{ids[2]}] of eos_token_id cannot be" in capsys.readouterr().err
    assert {*ids[:2]} <= Tokenizer.from_file(folder.parent / "out" / "x.gguf").stop_tokens


def test_lost_flags_of_added_tokens_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["lstrip"] = True
    path.write_text(json.dumps(content))
    assert run(folder, "model") == 0
    token = content["added_tokens"][0]["content"]
    assert f"warning: lstrip, rstrip and single_word of {token!r} cannot" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, value",
    [
        ("extra_special_tokens", 5),
        ("additional_special_tokens", "<a>"),
        ("chat_template", 7),
        ("chat_template", {"default": 7}),
        ("chat_template", [{"name": "default"}, "x"]),
    ],
)
def test_a_wrong_type_in_the_tokenizer_s_config_is_named(
    folder: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    set_json(folder / "model" / "tokenizer_config.json", **{key: value})
    assert_refused(folder, "model", f"{value!r}", capsys)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (folder / "model" / name).write_text(pointer)
    assert_refused(folder, "model", f"{name}: is a pointer of Git LFS, not the file", capsys)


def test_inspect_judges_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_json(folder / "model" / "tokenizer_config.json", chat_template="x")
    assert run(folder, "model") == 0
    out = folder.parent / "out" / "x.gguf"
    inspect = ["--inspect", str(out)]
    assert main(inspect) == main([*inspect, "--expect", "instruct"]) == 0
    assert main([*inspect, "--expect", "base"]) == 1
    assert "(it has a chat template), --expect is base" in capsys.readouterr().err
    data = out.read_bytes()
    out.write_bytes(data[:-100])
    assert main(inspect) == 1
    assert "TRUNCATED" in capsys.readouterr().out
    assert main([*inspect, "--expect", "instruct"]) == 1
    assert "TRUNCATED" in capsys.readouterr().err
    out.write_bytes(data.replace(b"qwen3", b"clip9"))
    assert main([*inspect, "--expect", "instruct"]) == 1
    assert "is not a model, its architecture is 'clip9'" in capsys.readouterr().err
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main([*inspect, "--expect", "base"]) == 1
    assert "has no weights, only metadata" in capsys.readouterr().err
