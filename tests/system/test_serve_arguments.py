"""The command line of dflash-serve, the folders of --models, and texts that become prompts."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served
from vocabularies import byte_level, write

from dflash_gguf import bundled
from dflash_gguf.serve import command
from dflash_gguf.serve.arguments import (
    notes,
    parser,
    settings_of,
    template_variables,
    thinks,
    with_environment,
)
from dflash_gguf.serve.listen import is_loopback
from dflash_gguf.serve.models import models_in_folder
from dflash_gguf.serve.prompts import PromptBuilder
from dflash_gguf.serve.schemas import BadRequestError, TemplateBody
from dflash_gguf.text import chat
from dflash_gguf.text.tokenizer import Tokenizer


def parsed(*flags: str) -> Any:
    return parser().parse_args(flags)


def test_defaults_are_those_of_llama_server() -> None:
    settings = settings_of(parsed())
    assert settings.decode.temperature == 0.8
    assert (settings.decode.top_k, settings.decode.max_tokens) == (40, None)
    assert not settings.keys
    assert (settings.has_slots, settings.has_metrics) == (True, False)
    assert settings_of(parsed("-n", "5", "--temp", "0")).decode.max_tokens == 5


def test_flags_of_llama_server_are_taken() -> None:
    flags = (
        "-c 4096 -np 4 -b 512 -ub 256 -n 99 -t 3 -ngl 20 -ctk q8_0 -ctv q8_0 -a one,two --host ::1 "
        "--port 0 --timeout 30 --metrics --no-slots --props --cache-ram 100 --cache-reuse 256 "
        "--slot-save-path . --cache-prompt --jinja --reasoning-format deepseek "
        "--reasoning-budget 0 --threads-http 4 -fa on --kv-unified --spec-type draft-dflash "
        "--spec-draft-n-max 3 --chat-template chatml --tags a,b --no-webui "
        "--no-ui --offline --swa-full"
    )
    args = parsed(*flags.split())
    settings = settings_of(args)
    assert (args.n_ctx, args.n_parallel, args.n_ubatch, args.cache_type_k) == (4096, 4, 256, "q8_0")
    assert settings.tags == ("a", "b")
    assert settings.decode.draft_max == 3
    assert (args.cache_ram, settings.slot_save_path) == (100, Path())
    assert thinks(args, {}) is False
    lines = notes(args)
    assert any(line.startswith("--cache-reuse is ignored: shifted") for line in lines)
    assert len(lines) == 11


def test_environment_variables_stand_for_flags_that_are_not_given() -> None:
    environ = {
        "LLAMA_ARG_PORT": "9000",
        "LLAMA_ARG_CTX_SIZE": "777",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_ENDPOINT_SLOTS": "false",
        "LLAMA_API_KEY": "k1,k2",
        "HOME": "/",
    }
    args = parser().parse_args(with_environment(["--port", "1"], environ))
    assert (args.port, args.n_ctx, args.metrics, args.slots) == (1, 777, True, False)
    assert settings_of(args).keys == ("k1", "k2")
    short = parser().parse_args(with_environment(["-c", "5"], environ))
    assert short.n_ctx == 5
    with pytest.raises(ValueError, match="LLAMA_ARG_JINJA is 'maybe'"):
        with_environment([], {"LLAMA_ARG_JINJA": "maybe"})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 lets other machines ask: give --api-key"),
        ("--host 127.0.0.1,192.168.0.1", "--host 192.168.0.1 lets other machines ask"),
        ("--timeout 0", "--timeout is 0, must be greater than 0"),
        ("--queue -1", "--queue is -1"),
        ("-np 0", "--parallel is 0"),
        ("--sse-ping-interval 0", "--sse-ping-interval is 0"),
        ("--ssl-key-file x", "go together"),
        ("--api-key é", "printable ASCII"),
        ("-md x.gguf", "is a drafter for a model"),
        ("--models . --alias x", "go with one model"),
        ("-m /no/such.gguf", "/no/such.gguf: No such file"),
        ("-m python-tiny --port 1 --host 240.0.0.1 --no-api-key", "cannot listen on 240.0.0.1:1"),
        (
            "-m python-tiny --port 0 --draft-type none",
            "error: draft_type 'none' is not there; this decoder has: dflash, copy",
        ),
        ("-m python-tiny --port 0 --draft tree --draft-max 99", "drafter drafts at most"),
        ("--temp x", ""),
    ],
)
def test_bad_flags_get_one_sentence(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert command.main(flags.split()) == 1
    except SystemExit as error:
        assert error.code == 2
    assert sentence in capsys.readouterr().err


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


def test_which_hosts_are_of_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "127.evil.example", "10.0.0.1", "")))


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    args = parsed("--api-key", "zero", "--api-key-file", str(file))
    assert settings_of(args).keys == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        settings_of(args)


def test_values_for_the_template() -> None:
    args = parsed("--chat-template-kwargs", '{"enable_thinking": false, "x": 1}')
    variables = template_variables(args)
    assert thinks(args, variables) is False
    assert variables == {"x": 1}
    assert thinks(parsed("--reasoning", "on"), {}) is True
    with pytest.raises(ValueError, match="must be a JSON object"):
        template_variables(parsed("--chat-template-kwargs", "[1]"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, one of them with a drafter."""
    found = bundled.find("python-tiny")
    (tmp_path / "drafted").mkdir()
    shutil.copy(found.target, tmp_path / "drafted")
    shutil.copy(found.drafter, tmp_path / "drafted")
    shutil.copy(found.target, tmp_path / "plain.gguf")
    shutil.copy(found.drafter, tmp_path / "lonely-drafter.gguf")
    return tmp_path


def test_a_folder_of_models(folder: Path, tmp_path: Path) -> None:
    drafted, plain = models_in_folder(folder)
    assert (drafted.name, plain.name) == ("drafted", "plain")
    assert drafted.drafter is not None
    assert plain.drafter is None
    shutil.copy(plain.path, folder / "drafted" / "second.gguf")
    with pytest.raises(ValueError, match="holds 2 models and 1 drafters"):
        models_in_folder(folder)
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no GGUF file of a model"):
        models_in_folder(empty)


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


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    found = Tokenizer.from_file(write(tmp_path / "a.gguf", byte_level(add_bos_token=False)))
    assert found is not None
    return found


SAID = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "think", "end"),
    [
        # As four families of templates have it: always open, a switch, none but the marks.
        (SAID + "<think>\n{# </think> #}", None, "<think>\n"),
        (SAID + "<think>\n{# </think> #}", False, "<think>\n</think>"),
        (
            SAID + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>"
            "{% endif %}",
            False,
            "<think>\n\n</think>",
        ),
        (SAID + "{# </think> #}", False, "user:x;"),
        (SAID + "{# <|END_THINKING|> #}", False, "<|START_THINKING|><|END_THINKING|>"),
        (SAID + "{# <|END_THINKING|> #}", True, "user:x;"),
    ],
)
def test_thinking_that_is_off_closes_what_is_open(
    tokenizer: Tokenizer, template: str, think: bool | None, end: str
) -> None:
    texts = PromptBuilder(tokenizer, template)
    body = TemplateBody(messages=[{"role": "user", "content": "x"}], enable_thinking=think)
    assert texts.chat_text(body)[0].endswith(end)


def test_thoughts_that_were_begun_are_continued(tokenizer: Tokenizer) -> None:
    texts = PromptBuilder(tokenizer, SAID + "<think>\n{# </think> #}")
    user = {"role": "user", "content": "x"}
    begun = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    text = texts.chat_text(TemplateBody(messages=[user, begun]))[0]
    assert text == "user:x;<think>\nhm\n</think>\n\nyes"
    text = texts.chat_text(TemplateBody(messages=[user, begun | {"content": ""}]))[0]
    assert text == "user:x;<think>\nhm"
    no_thoughts = PromptBuilder(tokenizer, SAID)
    with pytest.raises(BadRequestError, match="the template has no thoughts"):
        no_thoughts.chat_text(TemplateBody(messages=[user, begun]))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}",
            "t",
        ),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "longer"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_templates_are_bounded(
    monkeypatch: pytest.MonkeyPatch, template: str, sentence: str
) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.3)
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARACTERS", 1 << 20)
    with pytest.raises(ValueError, match="the chat template fails: ") as caught:
        chat.render(template, [], special_tokens={})
    assert sentence in str(caught.value)
