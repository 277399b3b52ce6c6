"""The command line of dflash-serve with models, and the folders of --models."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import Served, tiny
from vocabularies import byte_level, write

from dflash_gguf import bundled
from dflash_gguf.serve import command


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 lets other machines send requests: give"),
        ("--host 127.0.0.1,192.168.0.1", "--host 192.168.0.1 lets other machines send requests"),
        ("--host=", "--host is empty"),
        ("--host=,", "--host is empty"),
        ("--host 127.0.0.1:80", "must be an address or a name of this machine, without a port"),
        ("--host http://localhost", "must be an address or a name of this machine"),
        ("--port 70000", "--port is 70000, must be 0 to 65535"),
        ("--port -1", "--port is -1, must be 0 to 65535"),
        ("--timeout 0", "--timeout is 0, must be above 0 and at most"),
        ("--timeout nan", "--timeout is nan, must be above 0"),
        ("--timeout inf", "--timeout is inf, must be above 0"),
        ("--models-max -1", "--models-max is -1, must be at least 0"),
        ("--models . -c -1", "--ctx-size is -1"),
        ("--models . --draft-max 0", "--draft-max is 0"),
        ("--api-key=", "--api-key is empty"),
        ("--cors-origins https://a.example/", "--cors-origins holds 'https://a.example/'"),
        ("--queue -1", "--queue is -1"),
        ("-np 0", "--parallel is 0"),
        ("--sse-ping-interval 0", "--sse-ping-interval is 0"),
        ("--ssl-key-file x", "go together"),
        ("--api-key é", "printable ASCII"),
        ("-md x.gguf", "is a drafter"),
        ("--models . --alias x", "go with one model"),
        ('--chat-template-kwargs {"enable_thinking":1}', "enable_thinking must be true or false"),
        ("--lora a.gguf", "--lora: adapters are not applied"),
        ("--temp x", "--temp"),
    ],
)
def test_bad_flags_get_one_sentence(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(flags.split())
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "flags", ["--chat-template chatlm", "--chat-template {%", "--chat-template-file /no/such"]
)
def test_a_template_is_checked_at_the_start(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["-m", "python-tiny", *flags.split()])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {flags.split()[0]}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("-m /no/such.gguf", "/no/such.gguf: No such file"),
        ("-m python-tiny --port 1 --host 240.0.0.1 --no-api-key", "cannot listen on 240.0.0.1:1"),
        (
            "-m python-tiny --port 0 --draft-type mtp",
            "error: draft_type 'mtp' is not available; this decoder has: dflash, suffix",
        ),
    ],
)
def test_what_a_flag_names_is_missing(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(flags.split()) == 1
    assert sentence in capsys.readouterr().err


def test_a_draft_beyond_the_block_is_cut() -> None:
    served = tiny("-c", "256", "--draft", "chain", "--draft-max", "99")
    try:
        assert "--draft-max is 99, the drafter drafts at most" in served.log
        assert served.answer("/completion", prompt="def f", n_predict=8)["timings"]["draft_n"] > 0
    finally:
        assert served.close() == 0


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", byte_level())
    served = Served("-m", str(file), wait=False)
    served.wait_for("error: ")
    assert served.process.wait(10) == 1
    served.close()


def test_a_process_that_cannot_be_started_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("dflash_gguf.serve.engine_client.subprocess.Popen", popen)
    assert command.main(["-m", "python-tiny", "--port", "0"]) == 1
    assert "error: the process cannot be started: Cannot allocate" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two models, one of them with a drafter, and a drafter without a model."""
    found = bundled.find("python-tiny")
    (tmp_path / "drafted").mkdir()
    shutil.copy(found.target, tmp_path / "drafted")
    shutil.copy(found.drafter, tmp_path / "drafted")
    shutil.copy(found.target, tmp_path / "plain.gguf")
    shutil.copy(found.drafter, tmp_path / "lonely-drafter.gguf")
    return tmp_path


def test_a_request_chooses_among_models_and_one_is_loaded_at_a_time(folder: Path) -> None:
    served = Served("--models", str(folder), "-t", "1", "--temp", "0", wait=False)
    try:
        prompt = {"prompt": "def add(a, b):\n", "n_predict": 20}
        assert served.get("/health").status_code == 200
        texts = {}
        for name in ("drafted", "plain", "any", "drafted"):
            found = served.answer("/completion", model=name, **prompt)
            texts[found["model"]] = found["content"]
            drafter = served.get("/props", params={"model": name}).json()["drafter"]
            assert (drafter is not None) is (found["model"] == "drafted")
            states = {m["id"]: m["status"]["value"] for m in served.get("/models").json()["data"]}
            assert states.pop(found["model"]) == "loaded"
            assert set(states.values()) == {"unloaded"}
        assert texts["drafted"] == texts["plain"]
        found = served.post("/completion", {"model": "other", **prompt})
        assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
        assert "/v1/models lists" in found.json()["error"]["message"]
    finally:
        assert served.close() == 0


def test_two_models_are_loaded_where_two_may_be(folder: Path) -> None:
    flags = ("--models-max", "2", "--metrics", "-t", "1")
    served = Served("--models", str(folder), *flags, wait=False)
    try:
        for name in ("drafted", "plain", "drafted"):
            served.answer("/completion", model=name, prompt="def ", n_predict=2)
        states = {m["id"]: m["status"]["value"] for m in served.get("/models").json()["data"]}
        assert states == {"drafted": "loaded", "plain": "loaded"}
        assert served.answer("/completion", prompt="x", n_predict=1)["model"] == "drafted"
    finally:
        assert served.close() == 0


def test_https_origins_and_a_template_of_a_file(tmp_path: Path) -> None:
    key, certificate, template = (str(tmp_path / name) for name in ("k.pem", "c.pem", "t.jinja"))
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    Path(template).write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    flags = ("-m", "python-tiny", "-t", "1", "--slots", "--chat-template-file", template)
    flags = (*flags, "--ssl-key-file", key, "--ssl-cert-file", certificate)
    served = Served(*flags, "--cors-origins", "https://a.example,https://b.example")
    try:
        assert served.url.startswith("https://")
        messages = [{"role": "user", "content": "one"}]
        found = served.post(
            "/apply-template", {"messages": messages}, headers={"Origin": "https://b.example"}
        )
        assert found.json() == {"prompt": "<one>"}
        assert served.get("/props").json()["chat_template"] == Path(template).read_text()
        assert found.headers["Access-Control-Allow-Origin"] == "https://b.example"
        for origin in ("https://c.example", "http://a.example", "http://localhost"):
            found = served.get("/health", headers={"Origin": origin})
            assert "Access-Control-Allow-Origin" not in found.headers
        (slot,) = served.get("/slots").json()
        assert not slot["is_processing"]
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http"), timeout=5)
    finally:
        assert served.close() == 0
