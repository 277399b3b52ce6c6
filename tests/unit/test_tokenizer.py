"""Tokenizer metadata: vocabulary, special tokens, templates, and the pre-tokenizer's hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SPECIAL_TOKENS, write_tokenizer
from dflash_gguf.convert import pretokenizer
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.plan import Metadata
from dflash_gguf.convert.tokenizer import add_tokenizer
from tokenizers import Tokenizer

PREFIX = "tokenizer.ggml."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, "qwen2")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    return tmp_path


def read(folder: Path, vocab_size: int = 421, pre: str | None = "qwen2") -> dict[str, Any]:
    metadata = Metadata("qwen3")
    add_tokenizer(metadata, folder, vocab_size, pre)
    return {key.removeprefix(PREFIX): value for key, (_, value) in metadata.values.items()}


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_vocabulary_is_the_tokenizers_with_gaps_filled(folder: Path) -> None:
    found = read(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    assert [tokenizer.id_to_token(i) for i in range(size)] == found["tokens"][:size]
    assert found["tokens"][size:] == [f"[PAD{i}]" for i in range(size, 421)]
    kinds = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert {kinds[text] for text in SPECIAL_TOKENS} == {3}
    assert kinds["<tool_call>"] == 4
    assert kinds["[PAD420]"] == 5
    assert kinds["a"] == 1
    assert found["model"] == "gpt2"
    assert found["pre"] == "qwen2"


def test_special_tokens_come_from_the_tokenizer_then_from_the_config(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = read(folder)
    assert found["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert found["padding_token_id"] == tokenizer.token_to_id("<|endoftext|>")
    assert "bos_token_id" not in found
    edit(folder, "config.json", lambda c: c.update(bos_token_id=7, eos_token_id=9))
    found = read(folder)
    assert found["bos_token_id"] == 7
    assert found["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    edit(folder, "config.json", lambda c: c.update(bos_token_id=421))
    with pytest.raises(ConvertError, match="bos token has id 421, but the model has vocab_size"):
        read(folder)


def test_special_tokens_may_be_objects(folder: Path) -> None:
    token = {"content": "<|im_start|>", "__type": "AddedToken"}
    edit(folder, "tokenizer_config.json", lambda c: c.update(bos_token=token))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert read(folder)["bos_token_id"] == tokenizer.token_to_id("<|im_start|>")


def template(*items: str) -> list[dict[str, Any]]:
    return [
        {"Sequence": {"id": i, "type_id": 0}}
        if i in "AB"
        else {"SpecialToken": {"id": i, "type_id": 0}}
        for i in items
    ]


def use_template(folder: Path, single: list[str], pair: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = {
        "type": "TemplateProcessing",
        "single": template(*single),
        "pair": template(*pair),
        "special_tokens": {
            text: {"id": text, "ids": [tokenizer.token_to_id(text)], "tokens": [text]}
            for text in SPECIAL_TOKENS
        },
    }
    processors = [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}, processor]
    post = {"type": "Sequence", "processors": processors}
    edit(folder, "tokenizer.json", lambda t: t.update(post_processor=post))


START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@pytest.mark.parametrize(
    ("single", "pair", "expected"),
    [
        # Llama 3: BOS before each of two texts.
        (
            [START, "A"],
            [START, "A", START, "B"],
            {"add_bos_token": True, "add_eos_token": False, "add_sep_token": False},
        ),
        # Qwen3-Embedding: another token than EOS at the end, and EOS becomes EOT.
        (
            ["A", PAD],
            ["A", "B", PAD],
            {"add_bos_token": False, "add_eos_token": True, "eot": END, "eos": PAD},
        ),
        (
            [START, "A", END],
            [START, "A", END, "B", END],
            {"add_bos_token": True, "add_eos_token": True, "add_sep_token": False},
        ),
        (["A"], ["A", "B"], {"add_bos_token": False, "add_eos_token": False}),
    ],
)
def test_templates_say_what_a_text_begins_and_ends_with(
    folder: Path, single: list[str], pair: list[str], expected: dict[str, Any]
) -> None:
    use_template(folder, single, pair)
    found = read(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for role in ("eot", "eos"):
        if role in expected:
            assert found[f"{role}_token_id"] == tokenizer.token_to_id(expected[role])
    flags = {key: value for key, value in found.items() if key.startswith("add_")}
    assert flags == {key: value for key, value in expected.items() if key.startswith("add_")}


def test_merges_in_both_notations(folder: Path) -> None:
    pairs = read(folder)["merges"]
    assert all(len(merge.split(" ")) == 2 for merge in pairs)
    texts = list(pairs)
    edit(folder, "tokenizer.json", lambda t: t["model"].update(merges=texts))
    assert read(folder)["merges"] == texts
    edit(folder, "tokenizer.json", lambda t: t["model"].update(merges=[]))
    with pytest.raises(ConvertError, match=r"tokenizer\.json has no merges"):
        read(folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"name": "default", "template": "a"}], {"": "a"}),
        ({"default": "a", "tools": "b"}, {"": "a", "s": ["tools"], ".tools": "b"}),
        ([{"name": "tools", "template": "b"}], {"s": ["tools"], ".tools": "b"}),
        ([], {}),
    ],
)
def test_named_templates_have_keys(folder: Path, given: Any, expected: dict[str, Any]) -> None:
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template=given))
    found = read(folder)
    start = "tokenizer.chat_template"
    assert {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)} == expected


def test_what_gguf_cannot_hold_is_noted(folder: Path) -> None:
    named = [{"name": name, "template": name} for name in ("a-b", "a_b")]
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template=named, bos_token=5))
    metadata = Metadata("qwen3")
    add_tokenizer(metadata, folder, 421, "qwen2")
    first, second = metadata.notes
    assert first == "bos_token is 5, which is no text: it is left out"
    assert second == "the chat template 'a_b' is left out: an earlier one is 'a_b' too"


@pytest.mark.parametrize(
    ("given", "eot"), [(7, 7), ([7], 7), ([421, -1, 7, 7], 7), ([421], None), (None, None)]
)
def test_end_tokens_of_generation_are_kept(folder: Path, given: Any, eot: int | None) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    found = read(folder)
    assert (found.get("eot_token_id"), found.get("eom_token_id")) == (eot, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
        ("generation_config.json", '{"eos_token_id": [7, true]}', "token ids are needed"),
        ("generation_config.json", "[1]", "is not a JSON object"),
        ("chat_template.json", "[1]", "is not a JSON object"),
        ("chat_template.jinja", b"\xff", "is not valid UTF-8"),
        ("additional_chat_templates/x.jinja", b"\xff", "is not valid UTF-8"),
    ],
)
def test_files_of_another_form_are_refused(
    folder: Path, name: str, content: str | bytes, message: str
) -> None:
    edit(folder, "tokenizer_config.json", lambda c: c.pop("chat_template"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConvertError, match=f"{folder / name}: .*{message}"):
        read(folder)


def test_chat_templates_in_their_places(folder: Path) -> None:
    assert "im_start" in read(folder)["tokenizer.chat_template"]
    edit(folder, "tokenizer_config.json", lambda c: c.pop("chat_template"))
    assert "tokenizer.chat_template" not in read(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert read(folder)["tokenizer.chat_template"] == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert read(folder)["tokenizer.chat_template"] == "from jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool-use.jinja").write_text("with tools")
    found = read(folder)
    assert found["tokenizer.chat_template"] == "from jinja"
    assert found["tokenizer.chat_template.tool_use"] == "with tools"
    assert found["tokenizer.chat_templates"] == ["tool_use"]


def test_check_text_is_the_one_the_hashes_were_made_with() -> None:
    digest = hashlib.sha256(pretokenizer.CHECK_TEXT.encode()).hexdigest()
    assert digest == "a36179c1e2b1cfcfbfad1dc779addad2ffc778201e4cf0d538bddeafa2c526da"
    assert len(pretokenizer.CHECK_TEXT) == 350


def test_an_unknown_hash_is_printed_with_the_way_out(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digest = pretokenizer.hash_of(tokenizer.encode(pretokenizer.CHECK_TEXT).ids)
    with pytest.raises(ConvertError, match=f"hash {digest} is unknown.*--pre.*PRE_TOKENIZERS"):
        read(folder, pre=None)


def test_a_known_hash_gives_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digest = pretokenizer.hash_of(tokenizer.encode(pretokenizer.CHECK_TEXT).ids)
    monkeypatch.setitem(pretokenizer.PRE_TOKENIZERS, digest, "smollm")
    assert read(folder, pre=None)["pre"] == "smollm"


def test_an_unknown_pre_tokenizer_name_is_refused(folder: Path) -> None:
    with pytest.raises(ConvertError, match=r"--pre nonsense: unknown pre-tokenizer \(known: "):
        read(folder, pre="nonsense")


def test_smollm_texts_do_not_begin_with_bos(folder: Path) -> None:
    edit(folder, "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"]))
    edit(folder, "tokenizer_config.json", lambda c: c.update(add_prefix_space=False))
    found = read(folder, vocab_size=49152)
    assert found["add_bos_token"] is False
    assert found["add_space_prefix"] is False
    assert len(found["tokens"]) == 49152


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t["model"].update(type="Unigram"), "cannot be read as a tokenizer"),
        (lambda t: t.update(pre_tokenizer=None), "not a byte-level BPE"),
        (lambda t: t["model"].update(merges=[["nope", "nada"]]), "cannot be read as a tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(
    folder: Path, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(folder, "tokenizer.json", damage)
    with pytest.raises(ConvertError, match=message):
        read(folder)


def test_missing_and_foreign_tokenizer_files(folder: Path) -> None:
    with pytest.raises(ConvertError, match="token id 383, but the model has vocab_size 300"):
        read(folder, vocab_size=300)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConvertError, match="is not JSON"):
        read(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match=r"has no tokenizer\.json"):
        read(folder)
    (folder / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(ConvertError, match="only a SentencePiece tokenizer"):
        read(folder)
