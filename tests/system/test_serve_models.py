"""The life of several models: bad files, failed loads, presets, and models that sleep."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_drafter
from mtp_pairs import make_mtp
from pairs import convert_drafter
from serving import TEMPLATE, Served, tiny

from dflash_gguf import bundled

PAIR = bundled.find("python-tiny")
MODEL = PAIR.target.read_bytes()
ASKED = {"prompt": "def add(a, b):\n", "n_predict": 4}


def folder_server(folder: Path, *flags: str) -> Served:
    return Served("--models", str(folder), "-t", "1", "-c", "256", *flags, wait=False)


def states(served: Served) -> dict[str, str]:
    return {m["id"]: m["status"]["value"] for m in served.get("/v1/models").json()["data"]}


def replace(path: Path, data: bytes) -> None:
    """Replaces a file as downloaders do, so that a mapped one stays whole."""
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (Path.unlink, "b.gguf: No such file"),
        (lambda p: replace(p, MODEL[:-1]), "b.gguf: is incomplete"),
        (lambda p: replace(p, MODEL.replace(b"output_norm", b"output_nor_")), "output_norm.weight"),
        (lambda p: replace(p, MODEL.replace(b"qwen35", b"clip99")), "clip99"),
    ],
)
def test_a_model_that_goes_bad_takes_no_other_with_it(
    spoil: Any, sentence: str, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(MODEL)
    served = folder_server(tmp_path)
    try:
        assert served.answer("/completion", model="any", **ASKED)["model"] == "a"
        engine = served.engine_pid
        spoil(tmp_path / "b.gguf")
        bad = served.post("/completion", {"model": "b", **ASKED})
        assert bad.status_code == 503
        assert sentence in bad.json()["error"]["message"]
        assert states(served) == {"a": "loaded", "b": "unloaded"}
        assert served.answer("/completion", model="any", **ASKED)["model"] == "a"
        assert served.engine_pid == engine
        shown = {m["id"]: m for m in served.get("/v1/models").json()["data"]}
        assert shown["b"]["last_used_ms"] == 0 < shown["a"]["last_used_ms"]
        replace(tmp_path / "b.gguf", MODEL)
        assert served.answer("/completion", model="b", **ASKED)["model"] == "b"
        assert states(served) == {"a": "unloaded", "b": "loaded"}
    finally:
        assert served.close() == 0


def test_presets_set_flags_of_each_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(MODEL)
    (tmp_path / "lonely-drafter.gguf").write_bytes(PAIR.drafter.read_bytes())
    preset = tmp_path / "p.ini"
    preset.write_text(
        "[*]\nctk = q8_0\nctv = q8_0\n[a]\nctx-size = 512\n"
        f"model-draft = {tmp_path / 'lonely-drafter.gguf'}\ndraft-type = dflash\n"
        f"[fast]\nmodel = {PAIR.target}\nn-predict = 3\ntemp = 0.5\nload-on-startup = 1\n"
        f"[bad]\nmodel = {tmp_path / 'gone.gguf'}\n[typo]\nctx-size = 64\n"
    )
    served = Served("--models", str(tmp_path), "--models-preset", str(preset), wait=False)
    try:
        served.wait_for("loaded python-tiny.* context")
        for path in ("/props?model=a", "/slots?model=a"):  # a GET loads nothing
            assert "a is not loaded" in served.get(path).json()["error"]["message"]
        assert states(served) == {"a": "unloaded", "fast": "loaded"}
        assert "gone.gguf: No such file" in served.log
        assert "[typo] of" in served.log
        found = served.answer("/completion", model="fast", prompt="def f")
        assert found["tokens_predicted"] <= 3
        assert found["generation_settings"]["temperature"] == 0.5
        found = served.answer(
            "/completion", model="a", **ASKED | {"n_predict": 48, "draft": "chain"}
        )
        assert found["timings"]["draft_n"] > 0
        props = served.get("/props?model=a").json()
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["drafter"] == "lonely-drafter.gguf"
        shown = {m["id"]: m["status"]["args"] for m in served.get("/v1/models").json()["data"]}
        assert shown["a"][shown["a"].index("--model-draft") + 1].endswith("lonely-drafter.gguf")
        assert shown["a"][-2:] == ["--draft-type", "dflash"]
        assert "--cache-type-k" in shown["a"]
    finally:
        assert served.close() == 0


def test_a_model_that_nobody_asks_sleeps_and_wakes() -> None:
    served = tiny("-c", "256", "--sleep-idle-seconds", "0.5")
    try:
        served.wait_for("python-tiny: unloaded, no request for 0.5 s")
        assert served.get("/props").json()["is_sleeping"] is True
        text = served.answer("/completion", **ASKED)["content"]
        served.wait_until(lambda: served.get("/props").json()["is_sleeping"])
        assert served.get("/health").status_code == 200
        assert not served.get("/slots").json()[0]["is_processing"]
        assert states(served) == {"python-tiny": "unloaded"}
        assert served.answer("/completion", **ASKED)["content"] == text
        assert served.get("/props").json()["is_sleeping"] is False
    finally:
        assert served.close() == 0


def test_props_show_the_template_in_use(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file = tmp_path / "t.jinja"
    file.write_text(template)
    shutil.copy(PAIR.target, tmp_path / "m.gguf")
    served = Served("-m", str(tmp_path / "m.gguf"), "-c", "64", "--chat-template", str(file))
    try:
        assert served.get("/props").json()["chat_template"] == template
    finally:
        assert served.close() == 0


def test_a_unix_socket_is_listened_on(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)  # left by a server that was killed
    served = tiny("-c", "64", "--host", f"{path},[::1]")
    try:
        assert f"listening on unix:{path}" in served.log
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        assert served.close() == 0
    assert not os.path.exists(path)


def test_props_and_timings_show_each_drafter(tmp_path: Path) -> None:
    pair = make_mtp(tmp_path, "qwen35")
    directory = make_drafter(tmp_path / "dflash", pair.target_dir, block_size=8)
    drafter = convert_drafter(directory, pair.target_dir, tmp_path / "dflash.gguf", "qwen35")
    flags = ("-m", str(pair.target), "-md", str(drafter), "-md", str(pair.target))
    served = Served(*flags, "-t", "1", "-c", "512", "--chat-template", TEMPLATE)
    names = f"{drafter.name} + {pair.target.name}"
    try:
        assert served.get("/props").json()["drafter"] == names
        (shown,) = served.get("/v1/models").json()["data"]
        assert shown["meta"]["drafter"] == names
        texts = set()
        for kind in ("dflash", "mtp", "suffix", None):
            asked = {
                "prompt": "ab",
                "n_predict": 40,
                "ignore_eos": True,
                "seed": 3,
                "draft": "chain",
            }
            found = served.answer("/completion", **asked | ({"draft_type": kind} if kind else {}))
            texts.add(found["content"])
            by_proposer = found["dflash"]["candidates_by_proposer"]
            assert by_proposer.keys() <= {kind or "dflash"}
            if kind in ("dflash", "mtp"):
                n_drafted = by_proposer[kind]["n_drafted"]
                assert found["timings"]["draft_n"] == n_drafted > 0
        assert len(texts) == 1
    finally:
        assert served.close() == 0
