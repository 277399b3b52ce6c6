"""The command line of dflash-serve, and texts that become prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_gguf.cli.arguments import template_of, template_variables
from dflash_gguf.cli.llama_flags import ignored_flags
from dflash_gguf.serve.arguments import (
    parser,
    settings_of,
    thinks,
    with_environment,
)
from dflash_gguf.serve.listen import checked_hosts, is_local
from dflash_gguf.serve.prompts import PromptBuilder
from dflash_gguf.serve.schemas import BadRequestError, TemplateBody
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
    lines = ignored_flags(args)
    assert any(line.startswith("--cache-reuse is ignored: shifted") for line in lines)
    assert len(lines) == 11


def test_environment_variables_stand_for_flags_that_are_not_given() -> None:
    environ = {
        "LLAMA_ARG_PORT": "9000",
        "LLAMA_ARG_CTX_SIZE": "777",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_ENDPOINT_SLOTS": "false",
        "LLAMA_API_KEY": "k1,k2",
        "LLAMA_ARG_REMAP_DEVELOPER_ROLE": "1",
        "LLAMA_SPEC_NO_THINK": "1",
        "HOME": "/",
    }
    args = parser().parse_args(with_environment(["--port", "1"], environ))
    assert (args.port, args.n_ctx, args.metrics, args.slots) == (1, 777, True, False)
    assert settings_of(args).keys == ("k1", "k2")
    assert thinks(args, {}) is False
    assert any(line.startswith("--remap-developer-role") for line in ignored_flags(args))
    given = parser().parse_args(with_environment(["--reasoning", "on"], environ))
    assert thinks(given, {}) is True
    short = parser().parse_args(with_environment(["-c", "5"], environ))
    assert short.n_ctx == 5
    with pytest.raises(ValueError, match="LLAMA_ARG_JINJA is 'maybe'"):
        with_environment([], {"LLAMA_ARG_JINJA": "maybe"})


def test_which_hosts_are_of_this_machine() -> None:
    assert all(map(is_local, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "/run/x.sock")))
    assert not any(map(is_local, ("0.0.0.0", "::", "127.evil.example", "10.0.0.1", "")))
    assert checked_hosts(["[::1]", "::1", "x.sock"]) == ["::1", "::1", "x.sock"]


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
    assert thinks(parsed(), {}) is True


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("-kwargs", "[1]", "must be a JSON object, not list"),
        ("-kwargs", "null", "must be a JSON object, not NoneType"),
        ("-kwargs", "{", "is '{', must be a JSON object"),
        ("-kwargs", "[" * 100_000, "must be a JSON object"),
        ("-kwargs", '{"enable_thinking": "no"}', "enable_thinking must be true or false, not str"),
        ("-kwargs", '{"thinking": 0}', "thinking must be true or false, not int"),
        ("-kwargs", '{"messages": []}', "holds messages, which the conversation sets"),
        ("", "chatlm", "is no file that can be read (No such file or directory) and none of: tool"),
        ("", ".", "is no file that can be read (Is a directory)"),
        ("", "{% if %}", "the chat template is broken in line 1"),
        ("", "{{ x | no_such_filter }}", "the chat template is broken in line 1"),
        ("", "plain.txt", "is not Jinja"),
        ("", "bad.txt", "is not valid UTF-8"),
        ("-file", "missing.txt", "missing.txt: No such file or directory"),
        ("-file", "chatml", "chatml: No such file or directory"),
        ("-file", "plain.txt", "is not Jinja"),
        ("-file", "broken.txt", "the chat template is broken in line 2"),
        ("-file", "bad.txt", "bad.txt is not valid UTF-8"),
    ],
)
def test_flags_of_templates_are_checked_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, value: str, sentence: str
) -> None:
    (tmp_path / "plain.txt").write_text("hello")
    (tmp_path / "broken.txt").write_text("hello\n{% for %}")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    args = parsed(f"--chat-template{flag}", value)
    with pytest.raises(ValueError, match=rf"^--chat-template{flag}\b") as caught:
        template_variables(args)
        template_of(args, {"tool": SAID})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_come_from_names_files_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text(SAID)
    for flag, value, template in (
        ("--chat-template", "chatml", "chatml"),
        ("--chat-template", "tool", "tool"),
        ("--chat-template", str(file), SAID),
        ("--chat-template", SAID, SAID),
        ("--chat-template-file", str(file), SAID),
    ):
        assert template_of(parsed(flag, value), {"tool": SAID}) == template
    assert template_of(parsed(), {}) is None


SAID = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "think", "end"),
    [
        # Templates that always open the reasoning, have a switch, or only contain the marks.
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
    assert texts.chat_text(body).endswith(end)


def test_thoughts_that_were_begun_are_continued(tokenizer: Tokenizer) -> None:
    texts = PromptBuilder(tokenizer, SAID + "<think>\n{# </think> #}")
    user = {"role": "user", "content": "x"}
    begun = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    text = texts.chat_text(TemplateBody(messages=[user, begun]))
    assert text == "user:x;<think>\nhm\n</think>\n\nyes"
    text = texts.chat_text(TemplateBody(messages=[user, begun | {"content": ""}]))
    assert text == "user:x;<think>\nhm"
    no_thoughts = PromptBuilder(tokenizer, SAID)
    with pytest.raises(BadRequestError, match="the chat template has no reasoning"):
        no_thoughts.chat_text(TemplateBody(messages=[user, begun]))
