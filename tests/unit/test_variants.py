"""Base and instruct files of a pair are told apart by the names that real files have."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from dflash_gguf.text.variants import mismatch

NAME, TUNE, BASE = "general.name", "general.finetune", "general.base_model.0.name"
URL, TEMPLATE = "general.base_model.0.repo_url", "tokenizer.chat_template"

Keys = dict[str, str]


def write(path: Path, keys: Keys) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in keys.items():
        writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


IT = {TEMPLATE: "{{ messages }}"}
RIGHT: dict[str, tuple[Keys, Keys]] = {
    "unmarked instruct": ({NAME: "Qwen3 8B", **IT}, {NAME: "Qwen3-8B-DFlash-b16", **IT}),
    "fine-tuned": (
        {NAME: "Qwen3 8B", BASE: "Qwen3 8B Base", **IT},
        {NAME: "Drafter", BASE: "Qwen3 8B"},
    ),
    "gemma": (
        {NAME: "Gemma 4 31B It", TUNE: "it", **IT},
        {NAME: "Gemma 4 31B It DFlash", TUNE: "it-DFlash"},
    ),
    "a drafter's short name": (
        {NAME: "Qwen3 Coder 30B A3B Instruct", TUNE: "Instruct", **IT},
        {NAME: "Qwen3 Coder 30B A3B DFlash"},
    ),
    "llama": (
        {NAME: "Meta Llama 3.1 8B Instruct", BASE: "Meta Llama 3.1 8B", **IT},
        {NAME: "LLaMA3.1-8B-Instruct-DFlash-UltraChat"},
    ),
    "gpt-oss": ({NAME: "Gpt Oss 20B", **IT}, {NAME: "gpt-oss-20b-DFlash", BASE: "gpt-oss-20b"}),
    "both base": ({NAME: "Qwen3 8B Base"}, {NAME: "Qwen3-8B-Base-DFlash"}),
    "thinking": ({NAME: "Qwen3 4B Thinking 2507", **IT}, {NAME: "Qwen3 4B Instruct 2507 DFlash"}),
    "another release": ({NAME: "Qwen3 4B", **IT}, {BASE: "Qwen3 4B Instruct 2507"}),
    "no names": ({}, {}),
    "no names, templates": (IT, IT),
    "a drafter without template": ({NAME: "Snapshots", **IT}, {NAME: "Model"}),
    "a converter's name": ({NAME: "Snapshots", **IT}, {BASE: "Llama 3.1 8B Instruct"}),
}
WRONG: dict[str, tuple[Keys, Keys, str]] = {
    "Qwen3 base": ({NAME: "Qwen3 8B Base", **IT}, {NAME: "Qwen3-8B-DFlash-b16", **IT}, "base"),
    "Qwen3 base, by base model": ({TUNE: "Base"}, {BASE: "Qwen3 8B", NAME: "D", **IT}, "base"),
    "Qwen3 base drafter": (
        {NAME: "Qwen3 8B", BASE: "Qwen3 8B Base", **IT},
        {NAME: "Draft", URL: "https://huggingface.co/Qwen/Qwen3-8B-Base"},
        "instruct",
    ),
    "gemma pt": ({NAME: "Gemma 4 27b Pt", TUNE: "pt"}, {NAME: "gemma-4-27b-it-DFlash"}, "base"),
    "gemma without pt": ({NAME: "Gemma 4 31B"}, {URL: "https://x/google/gemma-4-31B-it"}, "base"),
    "llama base": ({NAME: "Meta Llama 3.1 8B"}, {BASE: "Llama 3.1 8B Instruct"}, "base"),
    "llama base drafter": (
        {NAME: "Llama 3.1 8B Instruct", **IT},
        {NAME: "D", BASE: "Llama 3.1 8B"},
        "instruct",
    ),
    "llama 2 chat": ({NAME: "Llama 2 7b Chat Hf", **IT}, {BASE: "Llama 2 7b Hf"}, "instruct"),
    "mistral": ({NAME: "Mistral 7B v0.3"}, {NAME: "Mistral-7B-Instruct-v0.3-DFlash"}, "base"),
    "no chat template": ({NAME: "Snapshots"}, {NAME: "Drafter", **IT}, "base"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_pair_is_not_warned_of(tmp_path: Path, case: str) -> None:
    target, drafter = RIGHT[case]
    assert mismatch(write(tmp_path / "t", target), write(tmp_path / "d", drafter)) is None


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pair_is_named_with_what_was_compared(tmp_path: Path, case: str) -> None:
    target, drafter, variant = WRONG[case]
    said = mismatch(write(tmp_path / "t", target), write(tmp_path / "d", drafter))
    assert said is not None and f"/t is {variant} (" in said
