"""The tokenizer with tiny vocabularies, and with a real one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vocabularies import (
    BOS,
    END,
    HARD_TEXTS,
    HELLO,
    byte_level,
    gemma,
    sentence_piece,
    write,
)

from dflash_gguf.text.stream import n_common
from dflash_gguf.text.tokenizer import Tokenizer

BOS_ID = "tokenizer.ggml.bos_token_id"


def tokenizer_of(path: Path, values: dict[str, Any], **settings: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_file(write(path, values, **settings))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_of(tmp_path / "a.gguf", byte_level())


@pytest.mark.parametrize("make", [byte_level, sentence_piece, gemma])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_texts_come_back(tmp_path: Path, make: Any, text: str) -> None:
    tokenizer = tokenizer_of(tmp_path / "a.gguf", make())
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_no_folder_need_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    if hasattr(os, "memfd_create"):
        assert tokenizer_of(tmp_path / "a.gguf", byte_level()).tokenize("hello")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match=r"directory found.*: name a writable folder with TMPDIR"):
        tokenizer_of(tmp_path / "a.gguf", byte_level())
    monkeypatch.undo()
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(Path(tempfile.gettempdir()).glob("dflash-*"))
    assert tokenizer_of(tmp_path / "a.gguf", byte_level()).tokenize("hello")
    assert set(Path(tempfile.gettempdir()).glob("dflash-*")) == before


def test_merges_and_special_tokens(tokenizer: Tokenizer) -> None:
    names = byte_level()["tokenizer.ggml.tokens"]

    def split(text: str, **settings: bool) -> list[str]:
        return [names[token] for token in tokenizer.tokenize(text, **settings)]

    assert split("hello w") == [BOS, "hell", "o", "Ġw"]
    assert split("hello", add_special=False) == ["hell", "o"]
    assert split(END, add_special=False) == [END]
    assert len(split(END, add_special=False, parse_special=False)) == len(END)


def test_control_tokens_are_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    end = tokenizer.tokenize(END, add_special=False)
    assert tokenizer.detokenize(end) == ""
    assert tokenizer.detokenize(end, special=True) == END
    assert tokenizer.piece(end[0]) == b""


def test_stop_tokens_are_those_of_llama_cpp(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_tokens == {260}
    named = [*byte_level()["tokenizer.ggml.tokens"], "<|endoftext|>", "<eom>"]
    more = byte_level(tokens=named, token_type=None, eom_token_id=264)
    assert tokenizer_of(tmp_path / "b.gguf", more).stop_tokens == {260, 263, 264}


def test_an_ordinary_token_does_not_stop_where_the_file_names_no_eos(tmp_path: Path) -> None:
    values = byte_level(eos_token_id=None)
    assert tokenizer_of(tmp_path / "b.gguf", values).stop_tokens == {260}


def test_a_file_that_names_no_bos_gets_none(tmp_path: Path) -> None:
    values = byte_level(pre="llama-bpe", bos_token_id=None, add_bos_token=None)
    assert tokenizer_of(tmp_path / "b.gguf", values).tokenize("o") == [ord("o")]


def test_any_architecture_gives_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "b.gguf", byte_level(), architecture="dflash")
    assert tokenizer.tokenize("hell") == [261, 258]


def test_a_file_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_file(write(tmp_path / "a.gguf", {})) is None


@pytest.mark.parametrize("pre", ["gpt-4o", "qwen2"])
def test_very_long_words_do_not_overflow_the_stack(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path / "b.gguf", byte_level(pre=pre))
    text = "l" * 120_000
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    with pytest.raises(ValueError, match="holds 1200000 characters without a word boundary"):
        tokenizer.tokenize("l" * 1_200_000)


def test_bad_arguments_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        tokenizer.tokenize("\ud800")
    for bad in (-1, 263):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 263"):
            tokenizer.detokenize([bad])
    tokenizer.close()
    tokenizer.close()
    with pytest.raises(ValueError, match="the tokenizer is closed"):
        tokenizer.tokenize("a")


def test_chat_uses_the_template_of_the_file(tokenizer: Tokenizer) -> None:
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_text(HELLO) == expected
    tokens = tokenizer.chat(HELLO)
    assert tokens[:2] == [261, 262]
    assert tokenizer.detokenize(tokens, special=True) == BOS + expected
    assert "<think>" in tokenizer.chat_text(HELLO, enable_thinking=False)
    begin, end = tokens.turn_boundaries  # a later prompt may diverge at the user's message
    assert tokenizer.detokenize(tokens[begin:end]) == "hello"


PIECES = (
    "<|im_start|>",
    "<|im_end|>",
    BOS,
    "</s>",
    "<",
    "|>",
    "hello",
    " w",
    "\n",
    " ",
    "é",
    "a b",
)


@pytest.mark.parametrize(
    "values", [byte_level(), sentence_piece(), gemma(), byte_level(add_eos_token=True)]
)
def test_turns_are_tokenized_as_within_the_whole_text(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    tokenizer, random = tokenizer_of(tmp_path / "a.gguf", values), Random(1)
    for _ in range(300):
        before, asked, after = ("".join(random.choices(PIECES, k=n)) for n in (8, 3, 5))
        text = before + asked + after
        tokens = tokenizer.chat_tokens(text, template="chatml", asked=asked)
        add_special = not text.startswith(tokenizer.special_text(BOS_ID) or BOS)
        assert tokens == tokenizer.tokenize(text, add_special=add_special)
        at = text.rfind(asked)
        assert list(tokens.turn_boundaries) == [
            n_common(tokenizer.tokenize(text[:end], add_special=add_special), tokens)
            for end in (at, at + len(asked))
        ]


def test_a_template_that_writes_bos_does_not_get_a_second(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.chat(HELLO, template="{{ bos_token }}{{ messages[0].content }}")
    assert tokens == tokenizer.tokenize("hello")


def test_templates_by_name_file_and_text(tmp_path: Path) -> None:
    values = byte_level() | {"tokenizer.chat_template.short": "[{{ messages[0].content }}]"}
    tokenizer = tokenizer_of(tmp_path / "b.gguf", values)
    file = tmp_path / "mine.jinja"
    file.write_text("({{ messages[0].content }})", encoding="utf-8")
    assert tokenizer.chat_text(HELLO, template="short") == "[hello]"
    assert tokenizer.chat_text(HELLO, template=str(file)) == "(hello)"
    assert tokenizer.chat_text(HELLO, template="<{{ messages[0].content }}>") == "<hello>"
    assert tokenizer.chat_text(HELLO, template="zephyr").startswith("<|user|>\nhello")
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not valid UTF-8"):
        tokenizer.chat_text(HELLO, template=str(file))
    with pytest.raises(
        ValueError, match=r"'nosuch' is no file that can be read .* short, .*chatml"
    ):
        tokenizer.chat_text(HELLO, template="nosuch")


CALLED: list[dict[str, Any]] = [
    *HELLO,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "42"},
]
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
NO_RESULTS = "{{ messages | map(attribute='tool_calls') | list }}"


@pytest.mark.parametrize("template", ["chatml", "gemma", SAID, USERS, USERS + NO_RESULTS])
def test_tool_calls_and_results_become_text_if_a_template_without_tools_drops_them(
    tokenizer: Tokenizer, template: str
) -> None:
    found = tokenizer.detokenize(tokenizer.chat(CALLED, template=template))
    assert "<tool_response>\n42\n</tool_response>" in found
    if template not in (USERS, USERS + NO_RESULTS):
        assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in found
    shown = SAID + "{% if messages[1].tool_calls %}!{% endif %}"
    assert tokenizer.detokenize(tokenizer.chat(CALLED, template=shown)).endswith("hello42!")


@pytest.mark.parametrize(
    ("template", "what"), [(SAID, "tool_calls"), (USERS + NO_RESULTS, "messages of role tool")]
)
def test_a_template_with_tools_that_drops_calls_or_results_is_refused(
    tokenizer: Tokenizer, template: str, what: str
) -> None:
    template += "{{ tools or '' }}"
    with pytest.raises(ValueError, match=f"the chat template does not show {what}: leave them"):
        tokenizer.chat(CALLED, template=template)
    assert tokenizer.chat(HELLO, template=template)


@pytest.mark.parametrize(
    ("content", "sentence"), [("a\0b", "'chatml' would end it"), ("\ud83d", "half of a surrogate")]
)
def test_builtin_templates_cut_no_text(tokenizer: Tokenizer, content: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tokenizer.chat([{"role": "user", "content": content}], template="chatml")


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "b.gguf", byte_level(chat_template=None))
    with pytest.raises(ValueError, match="the model has no chat template"):
        tokenizer.chat_text(HELLO)
