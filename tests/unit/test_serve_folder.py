"""Models of a folder, and the presets of --models-preset."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_gguf import bundled
from dflash_gguf.serve.folder import models_in_folder
from dflash_gguf.serve.presets import ALL, arguments_of, read_presets

PAIR = bundled.find("python-tiny")
MODEL = PAIR.target.read_bytes()
FIRST, SECOND = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"


def found(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the files by model name, and the reasons by file left out."""
    left: dict[str, str] = {}

    def leave_out(path: Path, why: str) -> None:
        left[str(path.relative_to(folder))] = why

    models = models_in_folder(folder, leave_out)
    return {model.name: str(model.path.relative_to(folder)) for model in models}, left


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("half.gguf", lambda p: p.write_bytes(MODEL[:3000]), "claims 108 tensors"),
        ("cut.gguf", lambda p: p.write_bytes(MODEL[:-1]), "is incomplete, 1 of"),
        ("empty.gguf", lambda p: p.touch(), "is empty"),
        ("web.gguf", lambda p: p.write_text("<!DOCTYPE html>"), "is not a GGUF file"),
        (
            "lfs.gguf",
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
            "is a pointer of Git LFS",
        ),
        ("link.gguf", lambda p: p.symlink_to("gone"), "is a link to gone: No such file"),
        ("ring.gguf", lambda p: p.symlink_to(p.name), "is a link to ring.gguf: Too many levels"),
        ("pipe.gguf", os.mkfifo, "not a file"),
        (
            "mmproj-F16.gguf",
            lambda p: p.write_bytes(MODEL.replace(b"qwen35", b"clip99")),
            "is of architecture 'clip99'",
        ),
        ("drafter.gguf", lambda p: shutil.copy(PAIR.drafter, p), "is a drafter, not a model"),
    ],
)
def test_a_bad_file_is_left_out_and_the_others_are_served(
    name: str, make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(MODEL)
    (tmp_path / "q").mkdir()
    make(tmp_path / name)
    if name != "drafter.gguf":
        (tmp_path / "q" / "model.gguf").write_bytes(MODEL)
        make(tmp_path / "q" / name)
    models, left = found(tmp_path)
    assert models.keys() == {"a", "q"} if name != "drafter.gguf" else {"a"}
    assert all(why in reason for reason in left.values())
    assert {Path(file).name for file in left} == {name}


def test_models_have_names_of_their_own(tmp_path: Path) -> None:
    files = (
        *("a.gguf", "a/x.gguf", "b/Q4.gguf", "b/Q8.gguf", "any.gguf"),
        *("c.gguf", "c.GGUF", "d/drafted.gguf", ".hidden.gguf", "notes.txt"),
    )
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(MODEL)
    shutil.copy(PAIR.drafter, tmp_path / "d" / "drafter.gguf")
    models, left = found(tmp_path)
    assert models == {
        "a": "a.gguf",
        "a/x": "a/x.gguf",
        "any.gguf": "any.gguf",
        "b/Q4": "b/Q4.gguf",
        "b/Q8": "b/Q8.gguf",
        "c": "c.GGUF",
        "c.gguf": "c.gguf",
        "d": "d/drafted.gguf",
    }
    assert not left
    *_, drafted = models_in_folder(tmp_path, lambda *_: None)
    assert drafted.drafters == (tmp_path / "d" / "drafter.gguf",)
    shutil.copy(PAIR.drafter, tmp_path / "d" / "other.gguf")
    _, left = found(tmp_path)
    assert {Path(file).name for file in left} == {"drafter.gguf", "other.gguf"}


def test_a_preset_is_a_command_line_of_one_model(tmp_path: Path) -> None:
    file = tmp_path / "p.ini"
    file.write_text(
        "version = 1\n; a comment\n[*]\nc = 512\n  ctk = q8_0 ; of all models\n\n"
        "[a]\nLLAMA_ARG_CTX_SIZE = 256\ndraft-type = suffix\njinja = true\ntemp = 0\n"
        "no-cache-prompt = on\nload-on-startup = true\n"
        "[org/b:Q8_0]\nmodel = b.gguf\nmodel-draft = d.gguf, e.gguf\n"
    )
    presets = read_presets(str(file))
    assert presets.keys() == {ALL, "a", "org/b:Q8_0"}
    args = arguments_of(presets["a"], ["--temp", "1"])
    assert (args.n_ctx, args.cache_type_k, args.draft_type) == (256, "q8_0", "suffix")
    assert (args.temperature, args.cache_prompt, presets["a"].loads_on_startup) == (1, False, True)
    other = presets["org/b:Q8_0"]
    assert (other.model, other.drafters) == (Path("b.gguf"), (Path("d.gguf"), Path("e.gguf")))
    assert arguments_of(other, []).n_ctx == 512


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[a]\nctx = 5", r"\[a\] ctx: is no flag of dflash-serve"),
        ("[*]\nctx-size = long", r"\[\*\] ctx-size: .*'long'"),
        ("[a]\ncache-type-k = q9", r"\[a\] cache-type-k: .*q9"),
        ("[a]\nport = 80", r"\[a\] port: is for the whole server"),
        ("[a]\napi-key = x", r"\[a\] api-key: is for the whole server"),
        ("[a]\nlora = x.gguf", r"\[a\] lora: .*adapters are not applied"),
        ("[a]\nload-on-startup = soon", r"\[a\] load-on-startup: it is 'soon', must be 1 or 0"),
        ("[a]\njinja = maybe", r"\[a\] jinja: it is 'maybe', must be 1 or 0"),
        ("[a]\nc = 1\nc = 2", "option 'c' in section 'a' already exists"),
        ("[a]\nnothing", "contains parsing errors"),
        ("[a\nc = 5", "contains parsing errors"),
    ],
)
def test_a_bad_preset_names_section_and_key(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "p.ini"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_presets(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_file_of_an_mtp_layer_is_the_drafter_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(MODEL)
    writer = gguf.GGUFWriter(folder / "mtp-model.gguf", "qwen35")
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (model,) = models_in_folder(tmp_path, lambda *_: None)
    assert (model.path.name, model.drafters) == ("model.gguf", (folder / "mtp-model.gguf",))
    shutil.copy(PAIR.drafter, folder / "drafter.gguf")
    left: dict[Path, str] = {}
    (model,) = models_in_folder(tmp_path, left.__setitem__)
    assert model.drafters == (folder / "drafter.gguf", folder / "mtp-model.gguf")
    shutil.copy(PAIR.drafter, folder / "other.gguf")
    (model,) = models_in_folder(tmp_path, left.__setitem__)
    assert model.drafters == (folder / "mtp-model.gguf",)
    assert set(left) == {folder / "drafter.gguf", folder / "other.gguf"}
